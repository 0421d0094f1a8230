"""Tables of accuracies as pictures: a dot for the mean, a bar for its interval; hollow: one seed.

Every figure says over how many seeds it is.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedlens.reporting.figures.palette import Looks
from fedlens.reporting.figures.style import (
    COLUMN,
    GREY,
    LINE,
    TEXT,
    Look,
    legend_below,
    legend_lines,
    panels,
    plain,
    remark,
    rounded,
    text_width,
)
from fedlens.reporting.study.content import Cell, Grid

ACCURACY = "test accuracy [%]"
LEVELS = ("dense", "ridge head alone")  # drawn as lines that the rules stand against
DODGED = 16  # up to so many dots share one panel
LABEL = 26  # letters of a row's name in one line
BESIDE = 0.11  # inches between dots of one row
Points = Mapping[float, Cell]


def grid_figure(grid: Grid, looks: Looks) -> Figure:
    """By the question the table answers; what has no shape of its own is a list of dots."""
    return SHAPES.get(grid.chapter, dots)(grid, looks)


def over_local_steps(grid: Grid, looks: Looks) -> Figure:
    """Accuracy over J, a line for each partition."""
    series = {
        row: _points(zip(grid.columns, cells, strict=True))
        for row, cells in zip(grid.rows, grid.cells, strict=True)
    }
    return _over(grid, looks, series, "local steps J", base=2)


def over_density(grid: Grid, looks: Looks) -> Figure:
    """Accuracy over density, a line for each partition; dense training as a level."""
    sparse = [row for row in grid.rows if row != "dense"]
    series = {c: _points((r, _cell(grid, r, c)) for r in sparse) for c in grid.columns}
    levels = {}
    if "dense" in grid.rows:
        levels = {c: cell for c in grid.columns if (cell := _cell(grid, "dense", c))}
    return _over(grid, looks, series, "density (fraction trained)", base=10, levels=levels)


def over_calibration(grid: Grid, looks: Looks) -> Figure:
    """Accuracy over the rounds of calibration, a line for each partition."""
    series = {c: _points((r, _cell(grid, r, c)) for r in grid.rows) for c in grid.columns}
    return _over(grid, looks, series, "rounds of calibration", base=2)


def over_partitions(grid: Grid, looks: Looks) -> Figure:
    """A dot for each partition, from even to skewed."""
    figure, [[axes]] = panels(1, 1, width=COLUMN, height=1.7, top=0.22, bottom=0.3)
    for place, (row, cells) in enumerate(zip(grid.rows, grid.cells, strict=True)):
        for cell in filter(None, cells):
            _dot(axes, place, cell, looks.of(row, grid.rows), upright=True)
    axes.set_xticks(range(len(grid.rows)), grid.rows)
    axes.set_xlim(-0.5, len(grid.rows) - 0.5)
    _finish(axes)
    remark(figure, told(_cells(grid)))
    return figure


def rules(grid: Grid, looks: Looks) -> Figure:
    """A panel for each partition; dense training and the head alone are lines to compare with."""
    names = [row for row in grid.rows if row not in LEVELS] or grid.rows
    levels = [row for row in grid.rows if row not in names]
    figure, drawn = _lists(names, grid.columns, _legend_room(levels, TEXT))
    handles = {}
    for axes, column in zip(drawn, grid.columns, strict=True):
        for level in levels:
            if cell := _cell(grid, level, column):
                handles[level] = _level(axes, cell, looks.of(level), upright=True)
        for place, name in enumerate(names):
            if cell := _cell(grid, name, column):
                _dot(axes, place, cell, looks.of(name, grid.rows))
    legend_below(figure, {_level_words(level): handle for level, handle in handles.items()})
    remark(figure, told(_cells(grid)))
    return figure


def dots(grid: Grid, looks: Looks) -> Figure:
    """Rows from top to bottom; columns in colours side by side or, if many, in panels."""
    several = len(grid.columns) > 1
    if several and len(grid.rows) * len(grid.columns) > DODGED:
        return rules(grid, looks)
    legend = grid.columns if several else []
    spread = BESIDE * (len(grid.columns) - 1)
    row = max(0.2, spread + 0.16)
    room = _legend_room(legend, COLUMN)
    figure, [axes] = _lists(grid.rows, [""], room, width=COLUMN, row=row)
    handles = {}
    for place, column in enumerate(grid.columns):
        shift = (BESIDE * place - spread / 2) / row
        for down, name in enumerate(grid.rows):
            if cell := _cell(grid, name, column):
                key = column if several else name
                look = looks.of(key, grid.columns if several else grid.rows)
                handles[column] = _dot(axes, down + shift, cell, look)
    if several:
        legend_below(figure, handles)
    remark(figure, told(_cells(grid)))
    return figure


SHAPES: dict[str, Callable[[Grid, Looks], Figure]] = {
    "local_steps": over_local_steps,
    "heterogeneity": over_partitions,
    "mask_rules": rules,
    "sparsity": over_density,
    "calibration_rounds": over_calibration,
}


def told(cells: Sequence[Cell]) -> str:
    """What dots and bars are, and over how many seeds."""
    return over_seeds([len(cell.seeds) for cell in cells], "hollow: 1 seed")


def over_seeds(counts: Sequence[int], single: str) -> str:
    several = sorted({count for count in counts if count > 1})
    if not several:
        return "1 seed"
    span = "–".join(dict.fromkeys([str(several[0]), str(several[-1])]))
    mixed = f"; {single}" if 1 in counts else ""
    return f"mean and 95 % interval of {span} seeds{mixed}"


def _over(
    grid: Grid,
    looks: Looks,
    series: Mapping[str, Points],
    xlabel: str,
    *,
    base: int,
    levels: Mapping[str, Cell] | None = None,
) -> Figure:
    """Lines over a logarithmic axis; intervals stand a little apart so as not to cover others."""
    labels = [*series, *(["dense"] if levels else [])]
    bottom = 0.37 + _legend_room(labels, COLUMN)
    figure, [[axes]] = panels(1, 1, width=COLUMN, height=2.0, top=0.22, bottom=bottom)
    axes.set_xscale("log", base=base)
    places = sorted({x for points in series.values() for x in points})
    apart = (places[-1] / places[0]) ** (0.012 if len(places) > 1 else 0)
    handles = {}
    for number, (label, points) in enumerate(series.items()):
        look = looks.of(label, list(series))
        shift = apart ** (number - (len(series) - 1) / 2)
        line = sorted((x * shift, cell) for x, cell in points.items())
        axes.plot(
            [x for x, _ in line], [c.mean for _, c in line], color=look.colour, linestyle=look.dash
        )
        for x, cell in line:
            _dot(axes, x, cell, look, upright=True)
        handles[label] = _handle(look, look.dash)
        if levels and label in levels:
            _level(axes, levels[label], look._replace(dash=(0, (4, 2))))
            handles["dense"] = Line2D([], [], color=GREY, linestyle=(0, (4, 2)), linewidth=1)
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.minorticks_off()
    axes.margins(x=0.08)
    axes.set_xlabel(xlabel)
    _finish(axes)
    legend_below(figure, {label: handles[label] for label in labels})
    remark(figure, told(_cells(grid)))
    return figure


def _lists(
    names: Sequence[str],
    titles: Sequence[str],
    room: float,
    *,
    width: float = TEXT,
    row: float = 0.2,
) -> tuple[Figure, list[Axes]]:
    """Panels side by side with the same rows; only the first says their names."""
    labels = [fill(name, LABEL) for name in names]
    lines = max(label.count("\n") for label in labels) + 1
    figure, [drawn] = panels(
        1, len(titles), width=width, height=max(row, lines * LINE) * len(names) + 0.1,
        left=max(map(text_width, labels)) + 0.12, top=0.36 if any(titles) else 0.2,
        bottom=0.37 + room, right=0.12,
    )  # fmt: skip
    for number, (axes, title) in enumerate(zip(drawn, titles, strict=True)):
        axes.set_title(title)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_yticks(range(len(names)), labels if number == 0 else [""] * len(names))
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel(ACCURACY)
        axes.xaxis.set_major_locator(rounded(max(4, int(1.6 * width / len(titles)))))
        axes.margins(x=0.08)
        plain(axes, "both")
    return figure, drawn


def _dot(axes: Axes, place: float, cell: Cell, look: Look, *, upright: bool = False) -> Line2D:
    x, y = (place, cell.mean) if upright else (cell.mean, place)
    face = "white" if cell.half is None else look.colour
    axes.errorbar(
        x, y, xerr=None if upright else cell.half, yerr=cell.half if upright else None,
        fmt=look.marker, color=look.colour, markerfacecolor=face, capsize=2, elinewidth=1, zorder=3,
    )  # fmt: skip
    return _handle(look, "none")


def _level(axes: Axes, cell: Cell, look: Look, *, upright: bool = False) -> Line2D:
    (line, span) = (axes.axvline, axes.axvspan) if upright else (axes.axhline, axes.axhspan)
    dash = look.dash if look.dash != "-" else (0, (4, 2))
    if upright and cell.half:
        span(cell.mean - cell.half, cell.mean + cell.half, color=look.colour, alpha=0.09, lw=0)
    return line(cell.mean, color=look.colour, linestyle=dash, linewidth=1, zorder=1)


def _level_words(level: str) -> str:
    return "dense training" if level == "dense" else level


def _handle(look: Look, dash: object) -> Line2D:
    return Line2D([], [], color=look.colour, marker=look.marker, linestyle=dash)  # type: ignore[arg-type]


def _finish(axes: Axes) -> None:
    axes.set_ylabel(ACCURACY)
    axes.margins(y=0.1)
    axes.yaxis.set_major_locator(rounded(6))
    plain(axes, "y")


def _legend_room(labels: Sequence[str], width: float) -> float:
    return LINE * legend_lines(labels, width) + (0.06 if labels else 0)


def _points(cells: Iterable[tuple[str, Cell | None]]) -> Points:
    return {_number(label): cell for label, cell in cells if cell}


def _number(label: str) -> float:
    """The first number in 'J=8', 'density 0.1', '4 rounds'."""
    found = re.search(r"\d+(\.\d+)?(e[+-]?\d+)?", label)
    if found is None:
        raise ValueError(f"no number in '{label}'")
    return float(found[0])


def _cell(grid: Grid, row: str, column: str) -> Cell | None:
    return grid.cells[grid.rows.index(row)][grid.columns.index(column)]


def _cells(grid: Grid) -> list[Cell]:
    return [cell for row in grid.cells for cell in row if cell]
