"""Learning curves: validation accuracy over rounds, local steps or megabytes, and clients' drift.

A set of curves belongs to a table: one side of it becomes panels, the other the lines in each.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, nan
from typing import Literal, TypeVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

from fedlens.reporting.figures.accuracy import over_seeds
from fedlens.reporting.figures.palette import Palette
from fedlens.reporting.figures.style import (
    COLUMN,
    LINE,
    TEXT,
    Look,
    legend_below,
    legend_lines,
    panels,
    plain,
    remark,
    rounded,
)
from fedlens.reporting.study.content import Curve, CurveSet, Grid, Observation, Question
from fedlens.reporting.study.curves import cell_label

Along = Literal["rounds", "steps", "bytes"]
Side = Literal["rows", "columns"]

ACCURACY = "validation accuracy [%]"
MOST = 8  # lines in a panel; a set with more has several figures
MARKED = 8  # markers on a line with more points
OBSERVED: dict[str, tuple[str, Callable[[Observation], list[float | None]]]] = {
    "drift": ("drift from the clients' mean", lambda o: o.drift),
    "cosine": ("cosine between clients", lambda o: o.cosine),
    "sign agreement": ("sign agreement", lambda o: o.sign_agreement),
}
T = TypeVar("T", bound=Curve | Observation)
Panels = Mapping[str, Mapping[str, T]]


@dataclass(frozen=True)
class Xs:
    """What the curves are drawn over."""

    label: str
    central: str  # its name where there are no clients
    of: Callable[[Curve], Sequence[float]]


ALONG: dict[Along, Xs] = {
    "rounds": Xs("round", "epoch", lambda curve: curve.unit),
    "steps": Xs("local steps", "steps", lambda curve: curve.steps),
    "bytes": Xs("megabytes sent", "", lambda curve: curve.megabytes),
}


def panel_side(question: Question, along: Along | None = None) -> Side:
    """Which side of the table becomes panels."""
    return question.panels_over_steps if along in ("steps", "bytes") else question.panels


def arranged(items: Sequence[T], grid: Grid, side: Side) -> dict[str, dict[str, T]]:
    """Panel → line → item, in the table's order; one panel if one side does not vary."""
    by_label = {item.label: item for item in items}
    places = {
        (row, column): by_label[label]
        for row in grid.rows
        for column in grid.columns
        if (label := cell_label(grid.rows, grid.columns, (row, column))) in by_label
    }
    rows, columns = {row for row, _ in places}, {column for _, column in places}
    sides = {"rows": grid.rows, "columns": grid.columns}
    if len(rows) <= 1 or len(columns) <= 1:
        return {"": {r if len(columns) <= 1 else c: item for (r, c), item in places.items()}}
    shown: dict[str, dict[str, T]] = {label: {} for label in sides[side]}
    for (row, column), item in places.items():
        panel, line = (row, column) if side == "rows" else (column, row)
        shown[panel][line] = item
    return {panel: lines for panel, lines in shown.items() if lines}


def comparable(shown: Panels[Curve], along: Along) -> dict[str, dict[str, Curve]]:
    """Without central training beside federated: its epochs are no rounds."""
    return {
        panel: {
            label: curve for label, curve in lines.items()
            if along != "rounds" or curve.megabytes or not any(c.megabytes for c in lines.values())
        }
        for panel, lines in shown.items()
    }  # fmt: skip


def parts(shown: Panels[T]) -> list[dict[str, dict[str, T]]]:
    """As many figures as keep each at MOST lines or fewer; the first line is in all of them."""
    if not any(shown.values()):
        return []
    lines = list(dict.fromkeys(line for panel in shown.values() for line in panel))
    if len(lines) <= MOST:
        return [{panel: dict(items) for panel, items in shown.items()}]
    first, others = lines[0], lines[1:]
    each = ceil(len(others) / ceil(len(others) / (MOST - 1)))
    chosen = [{first, *others[at : at + each]} for at in range(0, len(others), each)]
    return [
        {panel: {k: v for k, v in items.items() if k in some} for panel, items in shown.items()}
        for some in chosen
    ]


def drawable(curve_set: CurveSet, along: Along) -> list[Curve]:
    """Curves that have this axis; over steps or megabytes, only if methods differ in them."""
    curves = [curve for curve in curve_set.curves if ALONG[along].of(curve)]
    if along == "bytes":
        curves = [_sending(curve) for curve in curves if curve.megabytes[-1] > 0]
        ends = [curve.megabytes[-1] for curve in curves]
        return curves if ends and max(ends) > 1.01 * min(ends) else []
    if along == "steps":  # if all take the same steps per round, the figure over rounds is enough
        each = {curve.steps[-1] / curve.unit[-1] for curve in curves if curve.unit[-1]}
        return curves if len(each) > 1 else []
    return curves


def _sending(curve: Curve) -> Curve:
    """From the first message on: a logarithmic axis has no zero."""
    start = next(place for place, sent in enumerate(curve.megabytes) if sent > 0)
    later = {
        name: getattr(curve, name)[start:]
        for name in ("unit", "steps", "megabytes", "mean", "half")
    }  # fmt: skip
    return replace(curve, **later)


def curve_figure(
    shown: Panels[Curve], among: Sequence[str], along: Along, palette: Palette
) -> Figure:
    """`among` are all lines of the set, by which lines without a colour of their own get one."""
    labels = list(dict.fromkeys(line for panel in shown.values() for line in panel))
    figure, drawn = _panels(list(shown), labels)
    handles = {}
    for axes, (title, lines) in zip(drawn, shown.items(), strict=True):
        for label, curve in lines.items():
            look = palette.of(label, among)
            handles[label] = _curve(axes, ALONG[along].of(curve), curve, look, len(labels))
        central = not any(curve.megabytes for curve in lines.values())
        axes.set_title(title)
        axes.set_xlabel(ALONG[along].central if central else ALONG[along].label)
        _x_axis(axes, along)
        plain(axes, "both")
    low, high = _extent([curve for lines in shown.values() for curve in lines.values()])
    for axes in drawn:
        axes.set_ylim(low, high)
        axes.yaxis.set_major_locator(rounded(6))
    legend_below(figure, {label: handles[label] for label in labels})
    counts = [len(curve.runs) for lines in shown.values() for curve in lines.values()]
    remark(figure, over_seeds(counts, "without a band: 1 seed"))
    return figure


def observation_figure(
    shown: Panels[Observation], among: Sequence[str], palette: Palette
) -> Figure:
    """A row for each panel, a column for each measure that was taken."""
    labels = list(dict.fromkeys(line for panel in shown.values() for line in panel))
    measures = measured([o for lines in shown.values() for o in lines.values()])
    height = 1.4 if len(shown) == 1 else 1.1
    legend = LINE * legend_lines(labels, TEXT) + 0.06
    figure, drawn = panels(
        len(shown), len(measures), width=TEXT, height=height, left=0.7 if len(shown) > 1 else 0.45,
        across=0.45, down=0.28, bottom=0.37 + legend,
    )  # fmt: skip
    handles = {}
    for row, (title, lines) in zip(drawn, shown.items(), strict=True):
        for axes, name in zip(row, measures, strict=True):
            heading, values = OBSERVED[name]
            for label, one in lines.items():
                known = [nan if value is None else value for value in values(one)]
                handles[label] = _line(axes, one.round, known, palette.of(label, among))
            _x_axis(axes, "rounds")
            axes.yaxis.set_major_locator(rounded(4))
            plain(axes, "both")
            if row is drawn[0]:
                axes.set_title(heading)
            if row is drawn[-1]:
                axes.set_xlabel("round")
        row[0].set_ylabel(title)
    legend_below(figure, {label: handles[label] for label in labels})
    seeds = [len(one.runs) for lines in shown.values() for one in lines.values()]
    remark(figure, "1 seed" if max(seeds) == 1 else "mean over seeds")
    return figure


def measured(observations: Sequence[Observation]) -> list[str]:
    """The measures with at least one value."""
    return [
        name for name, (_, values) in OBSERVED.items()
        if any(value is not None for one in observations for value in values(one))
    ]  # fmt: skip


def _panels(titles: Sequence[str], labels: Sequence[str]) -> tuple[Figure, list[Axes]]:
    """One panel is as wide as a column, several as the text."""
    count = len(titles)
    across = count if count <= 3 else 2 if count == 4 else 3
    down = ceil(count / across)
    width = COLUMN if count == 1 else TEXT
    bottom = 0.37 + LINE * legend_lines(labels, width) + 0.06
    figure, drawn = panels(
        down, across, width=width, height=1.8 if count == 1 else 1.4, share="all",
        top=0.36 if any(titles) else 0.2, bottom=bottom, down=0.55,
    )  # fmt: skip
    for row in drawn:
        row[0].set_ylabel(ACCURACY)
    flat = [axes for row in drawn for axes in row]
    for axes in flat[count:]:
        axes.set_visible(False)
    return figure, flat[:count]


def _line(axes: Axes, xs: Sequence[float], ys: Sequence[float], look: Look) -> Line2D:
    (line,) = axes.plot(
        xs, ys, color=look.colour, linestyle=look.dash, marker=look.marker, markersize=3.2,
        markevery=max(1, ceil(len(xs) / MARKED)),
    )  # fmt: skip
    return line


def _curve(axes: Axes, xs: Sequence[float], curve: Curve, look: Look, lines: int) -> Line2D:
    """The line and its band, which is fainter if there are many."""
    band = [
        (x, mean - half, mean + half)
        for x, mean, half in zip(xs, curve.mean, curve.half, strict=True)
        if half is not None
    ]
    if band:
        at, low, high = zip(*band, strict=True)
        alpha = 0.15 if lines <= 3 else 0.08
        axes.fill_between(at, low, high, color=look.colour, alpha=alpha, linewidth=0)
    return _line(axes, xs, curve.mean, look)


def _extent(curves: Sequence[Curve]) -> tuple[float, float]:
    """All curves, and as much of their bands as keeps the curves readable."""
    means = [mean for curve in curves for mean in curve.mean]
    halves = [half or 0 for curve in curves for half in curve.half]
    beyond = 0.6 * (max(means) - min(means)) + 0.5
    low = min(mean - half for mean, half in zip(means, halves, strict=True))
    high = max(mean + half for mean, half in zip(means, halves, strict=True))
    low, high = max(low, min(means) - beyond), min(high, max(means) + beyond)
    room = 0.06 * (high - low) + 0.1
    return max(-1.0, low - room), min(101.0, high + room)


def _x_axis(axes: Axes, along: Along) -> None:
    if along != "bytes":
        axes.xaxis.set_major_locator(rounded(5, integer=True))
        return
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    subs = (1.0,) if high > 300 * low else (1.0, 3.0) if high > 20 * low else (1.0, 2.0, 5.0)
    axes.xaxis.set_major_locator(FixedLocator(LogLocator(subs=subs).tick_values(low, high)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.minorticks_off()
    axes.set_xlim(low, high)
