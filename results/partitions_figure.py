"""Methods on IID data and with one class per client: a row each, its two accuracies joined."""

from collections.abc import Mapping
from pathlib import Path
from textwrap import fill

from fedlens.reporting.figures import style
from fedlens.reporting.study.statistics import Estimate

ENDS = {"IID": "IID data", "Nc=1": "one class per client (Nc=1)"}
ROW = 0.35  # inches


def draw(rows: Mapping[str, Mapping[str, Estimate]], target: Path, *, start: float = 0) -> None:
    """`rows`: a label's test accuracy in %, by partition; the axis begins at `start`."""
    names = [fill(label, 46) for label in rows]
    with style.paper():
        left = max(map(style.text_width, names)) + 0.12
        figure, ((axes,),) = style.panels(
            1, 1, width=style.TEXT, height=ROW * len(rows), left=left, top=0.3
        )
        for place, row in enumerate(rows.values()):
            means = [row[column].mean for column in ENDS if column in row]
            axes.plot(means, [place] * len(means), color=style.GREY, linewidth=0.8, zorder=1)
        for (column, label), look in zip(ENDS.items(), style.LOOKS, strict=False):
            tests = {
                place: row[column] for place, row in enumerate(rows.values()) if column in row
            }
            axes.errorbar(
                [test.mean for test in tests.values()],
                list(tests),
                xerr=[test.half or 0 for test in tests.values()],
                fmt=look.marker,
                color=look.colour,
                capsize=2,
                label=label,
            )
        axes.set_yticks(range(len(rows)), names)
        axes.invert_yaxis()
        axes.set_xlim(left=start)
        axes.set_xlabel("test accuracy [%]")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
        style.plain(axes, "x")
        style.save(figure, target)
