"""Learning curves of running runs: validation accuracy over epochs or rounds, from journals."""

import io
from collections.abc import Sequence

from fedlens.reporting.figures.style import (
    GREY,
    LINE,
    LOOKS,
    TEXT,
    legend_below,
    legend_lines,
    panels,
    paper,
    plain,
    rounded,
)
from fedlens.store.run_folder import RunFolder

SCREEN = 110  # dots per inch, for a screen


def live_png(folders: Sequence[RunFolder]) -> bytes:
    """The newest of these runs, as many as there are line styles, each up to its last record."""
    shown = list(folders)[-len(LOOKS) :]
    labels = _labels([folder.name for folder in shown])
    counted: set[str] = set()
    measured = 0
    with paper():
        below = 0.4 + LINE * legend_lines(labels, TEXT)
        figure, ((axes,),) = panels(1, 1, width=TEXT, height=2.4, bottom=below, top=0.15)
        handles = {}
        for folder, label, look in zip(shown, labels, LOOKS, strict=False):
            unit = (folder.manifest or {}).get("unit", "round")
            points = {
                record[unit]: 100 * record["validation"]["top1"]
                for record in folder.journal("metrics").read()
                if "validation" in record and unit in record
            }
            counted.add(unit)
            measured += len(points)
            (handles[label],) = axes.plot(
                list(points), list(points.values()), color=look.colour, marker=look.marker,
                linestyle=look.dash,
            )  # fmt: skip
        if not measured:
            axes.text(0.5, 0.5, "no validation yet", ha="center", transform=axes.transAxes,
                      color=GREY)  # fmt: skip
        axes.set(xlabel=" or ".join(sorted(counted)), ylabel="validation accuracy [%]")
        axes.xaxis.set_major_locator(rounded(8, integer=True))
        plain(axes, "y")
        legend_below(figure, handles)
        stream = io.BytesIO()
        figure.savefig(stream, format="png", dpi=SCREEN)
    return stream.getvalue()


def _labels(names: Sequence[str]) -> list[str]:
    """Names without their hashes and without the words that all of them share."""
    words = [name.split("_") for name in names]
    shared = set.intersection(*(set(one) for one in words)) if len(words) > 1 else set()
    short = [" ".join(w for w in one[:-1] or one if w not in shared) for one in words]
    return short if len(set(short)) == len(short) and all(short) else list(names)
