"""Figures of tables of accuracies: a dot for the mean, a bar for its interval; hollow: one seed.

Every figure states the number of seeds.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedlens.reporting.figures.palette import Palette
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
from fedlens.reporting.study.content import Cell, Grid, Question
from fedlens.reporting.study.labels import DENSE

ACCURACY = "test accuracy [%]"
ONE_PANEL = 16  # dots that share one panel at most
LABEL = 26  # letters of a row's label in one line
DASHED = (0, (4, 2))
BESIDE = 0.11  # inches between dots of one row
Points = Mapping[float, Cell]


def grid_figure(grid: Grid, question: Question, palette: Palette) -> Figure:
    """A table in the shape that its question names."""
    if question.figure == "lines":
        return lines(grid, question, palette)
    return SHAPES[question.figure](grid, palette)


def lines(grid: Grid, question: Question, palette: Palette) -> Figure:
    """Accuracy over the numbers in the labels of one side, a line for each label of the other."""
    if question.x == "columns":
        series = {
            row: _points(zip(grid.columns, cells, strict=True))
            for row, cells in zip(grid.rows, grid.cells, strict=True)
        }
        return _over(grid, question, palette, series, {})
    rows = [row for row in grid.rows if row not in grid.levels]
    series = {c: _points((r, _cell(grid, r, c)) for r in rows) for c in grid.columns}
    levels = {
        level: {c: cell for c in grid.columns if (cell := _cell(grid, level, c))}
        for level in grid.levels
    }
    return _over(grid, question, palette, series, levels)


def partitions(grid: Grid, palette: Palette) -> Figure:
    """A dot for each partition, from even to skewed."""
    figure, [[axes]] = panels(1, 1, width=COLUMN, height=1.7, top=0.22, bottom=0.3)
    for place, (row, cells) in enumerate(zip(grid.rows, grid.cells, strict=True)):
        for cell in filter(None, cells):
            _dot(axes, place, cell, palette.of(row, grid.rows), upright=True)
    axes.set_xticks(range(len(grid.rows)), grid.rows)
    axes.set_xlim(-0.5, len(grid.rows) - 0.5)
    _finish(axes)
    remark(figure, seeds_remark(_cells(grid)))
    return figure


def columns_in_panels(grid: Grid, palette: Palette) -> Figure:
    """A panel for each column; rows that are levels are lines of reference."""
    names = [row for row in grid.rows if row not in grid.levels] or grid.rows
    levels = [row for row in grid.rows if row not in names]
    figure, drawn = _lists(names, grid.columns, _legend_room(levels, TEXT))
    handles = {}
    for axes, column in zip(drawn, grid.columns, strict=True):
        for level in levels:
            if cell := _cell(grid, level, column):
                handles[level] = _level(axes, cell, palette.of(level), upright=True)
        for place, name in enumerate(names):
            if cell := _cell(grid, name, column):
                _dot(axes, place, cell, palette.of(name, grid.rows))
    legend_below(figure, {_level_label(level): handle for level, handle in handles.items()})
    remark(figure, seeds_remark(_cells(grid)))
    return figure


def dots(grid: Grid, palette: Palette) -> Figure:
    """Rows from top to bottom; columns in colours side by side or, if many, in panels."""
    several = len(grid.columns) > 1
    if several and len(grid.rows) * len(grid.columns) > ONE_PANEL:
        return columns_in_panels(grid, palette)
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
                look = palette.of(key, grid.columns if several else grid.rows)
                handles[column] = _dot(axes, down + shift, cell, look)
    if several:
        legend_below(figure, handles)
    remark(figure, seeds_remark(_cells(grid)))
    return figure


SHAPES: dict[str, Callable[[Grid, Palette], Figure]] = {
    "dots": dots,
    "panels": columns_in_panels,
    "partitions": partitions,
}


def seeds_remark(cells: Sequence[Cell]) -> str:
    """What dots and bars mean, and over how many seeds."""
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
    question: Question,
    palette: Palette,
    series: Mapping[str, Points],
    levels: Mapping[str, Mapping[str, Cell]],
) -> Figure:
    """Lines over a logarithmic axis, with intervals a little apart so that none covers another.

    A level is a dashed line in the colour of its series.
    """
    shown = [level for level, cells in levels.items() if cells.keys() & series.keys()]
    labels = [*series, *map(_level_label, shown)]
    bottom = 0.37 + _legend_room(labels, COLUMN)
    figure, [[axes]] = panels(1, 1, width=COLUMN, height=2.0, top=0.22, bottom=bottom)
    axes.set_xscale("log", base=question.x_base)
    places = sorted({x for points in series.values() for x in points})
    apart = (places[-1] / places[0]) ** (0.012 if len(places) > 1 else 0)
    handles = {}
    for number, (label, points) in enumerate(series.items()):
        look = palette.of(label, list(series))
        shift = apart ** (number - (len(series) - 1) / 2)
        line = sorted((x * shift, cell) for x, cell in points.items())
        axes.plot(
            [x for x, _ in line], [c.mean for _, c in line], color=look.colour, linestyle=look.dash
        )
        for x, cell in line:
            _dot(axes, x, cell, look, upright=True)
        handles[label] = _handle(look, look.dash)
        for level in shown:
            if label in levels[level]:
                _level(axes, levels[level][label], look._replace(dash=DASHED))
    for level in shown:
        handles[_level_label(level)] = Line2D([], [], color=GREY, linestyle=DASHED, linewidth=1)
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.minorticks_off()
    axes.margins(x=0.08)
    axes.set_xlabel(question.x_label)
    _finish(axes)
    legend_below(figure, {label: handles[label] for label in labels})
    remark(figure, seeds_remark(_cells(grid)))
    return figure


def _lists(
    names: Sequence[str],
    titles: Sequence[str],
    room: float,
    *,
    width: float = TEXT,
    row: float = 0.2,
) -> tuple[Figure, list[Axes]]:
    """Panels side by side with the same rows; only the first shows their labels."""
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
    dash = look.dash if look.dash != "-" else DASHED
    if upright and cell.half:
        span(cell.mean - cell.half, cell.mean + cell.half, color=look.colour, alpha=0.09, lw=0)
    return line(cell.mean, color=look.colour, linestyle=dash, linewidth=1, zorder=1)


def _level_label(level: str) -> str:
    return "dense training" if level == DENSE else level


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
    match = re.search(r"\d+(\.\d+)?(e[+-]?\d+)?", label)
    if match is None:
        raise ValueError(f"no number in '{label}'")
    return float(match[0])


def _cell(grid: Grid, row: str, column: str) -> Cell | None:
    return grid.cells[grid.rows.index(row)][grid.columns.index(column)]


def _cells(grid: Grid) -> list[Cell]:
    return [cell for row in grid.cells for cell in row if cell]
