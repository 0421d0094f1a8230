"""Figures of masks: density by layer and kind, and the overlap of masks."""

import re
from collections.abc import Mapping, Sequence
from math import ceil, isnan, nan, sqrt
from pathlib import Path
from textwrap import TextWrapper, fill
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator

from fedlens.reporting.figures import style
from fedlens.reporting.figures.style import BLUE, DARKER, ORANGE, TEXT, paper, plain, save
from fedlens.reporting.study.content import MaskMap
from fedlens.reporting.study.labels import NONE

Record = Mapping[str, Any]
Matrix = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

ROW = 0.27  # inches
ACROSS, MAP_ROW = 3, 0.19  # of a report's maps: panels side by side, inches per layer
COLUMNS = {2: 0.42, 3: 0.58}  # inches for a number of so many digits
PAIR = 0.75  # inches for an overlap
BARS = (1.4, 1.0)  # inches: width of the bars by layer, height of those by kind
WIDE = 10.0  # largest over smallest density above which colours follow the square root
SMALL = "small"
SHORT = {"embedding": "emb."}  # the only kind whose name is wider than its column
LITERAL = {"parse_math": False}  # a file's name may hold a dollar


def mask_figure(records: Sequence[Record], path: Path, *, overlap: Record | None = None) -> None:
    """Draws {"label", "all", "layers", "kinds", "table"} of each mask to a png, svg or pdf file.

    One mask: layers × kinds, and the density of each. Several masks of one model: a panel for each,
    in the same colours, and their `overlap` {"labels", "jaccard", "by_chance"}.
    """
    with paper():
        save(_one(records[0]) if overlap is None else _several(records, overlap), path)


def maps_figure(maps: Sequence[MaskMap]) -> Figure:
    """Masks of one model side by side; numbers are percentages of trained weights."""
    matrices = [
        np.array([[nan if cell is None else cell for cell in row] for row in one.density])
        for one in maps
    ]
    colours = scale(np.concatenate([matrix.ravel() for matrix in matrices]))
    across = min(len(maps), ACROSS)
    down = ceil(len(maps) / across)
    width = style.COLUMN if across == 1 else TEXT
    layers = maps[0].layers
    figure, drawn = style.panels(
        down, across, width=width, height=MAP_ROW * len(layers), top=0.32, bottom=0.22, down=0.55,
        left=max(map(style.text_width, layers)) + 0.14, right=0.75, across=0.12,
    )  # fmt: skip
    flat = [axes for row in drawn for axes in row]
    for place, (axes, one, matrix) in enumerate(zip(flat, maps, matrices, strict=False)):
        heat(axes, layers if place % across == 0 else [""] * len(layers), one.kinds, matrix,
             colours, digits=2)  # fmt: skip
        axes.set_title(fill(one.label, 42), fontsize=style.SMALL)
    for axes in flat[len(maps) :]:
        axes.set_visible(False)
    height = figure.get_figheight()
    bar = figure.add_axes((1 - 0.66 / width, 0.22 / height, 0.1 / width, 1 - 0.54 / height))
    figure.colorbar(ScalarMappable(colours, DARKER), cax=bar, format=tick)
    bar.set_ylabel("density", fontsize=style.SMALL)
    return figure


def _one(record: Record) -> Figure:
    width, height = len(record["kinds"]) * COLUMNS[3], len(record["layers"]) * ROW
    title = _wrapped(record["label"], 60)
    size = max(width + BARS[0] + 2.0, 6), height + BARS[1] + 1.2 + 0.17 * title.count("\n")
    figure = Figure(figsize=size, layout="constrained")
    whole = record["all"]
    figure.suptitle(
        f"{title}\n{whole['trained']:,} of {whole['total']:,} weights trained",
        fontsize="medium",
        **LITERAL,
    )
    grid = figure.add_gridspec(2, 2, width_ratios=(width, BARS[0]), height_ratios=(BARS[1], height))
    picture = figure.add_subplot(grid[1, 0])
    image = heat(picture, *_table(record), _scale([record]), digits=3)
    bar = figure.colorbar(image, ax=picture, location="left", aspect=30, pad=0.02, format=tick)
    bar.set_label("density", fontsize=SMALL)
    bar.ax.tick_params(labelsize=SMALL)
    _bars_by_kind(figure.add_subplot(grid[0, 0], sharex=picture), record)
    _bars_by_layer(figure.add_subplot(grid[1, 1], sharey=picture), record)
    return figure


def _bars_by_kind(axes: Axes, record: Record) -> None:
    densities, overall = _densities(record["kinds"]), record["all"]["density"]
    top = (max(densities) or 1.0) * 1.3
    axes.bar(range(len(densities)), densities, width=0.8, color=BLUE)
    for place, density in enumerate(densities):  # above all bars, clear of the dashed line
        axes.text(place, top, _percent(density, 3), ha="center", va="top", fontsize=SMALL)
    axes.axhline(overall, color=ORANGE, linestyle="--")
    axes.annotate(
        f" all: {_percent(overall, 3)}%", (1, overall), xycoords=("axes fraction", "data"),
        va="center", color=ORANGE, fontsize=SMALL, in_layout=False,
    )  # fmt: skip
    axes.set(ylabel="by kind", ylim=(0, top))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=3))
    axes.yaxis.set_major_formatter(tick)
    axes.tick_params(axis="y", labelsize=SMALL)
    axes.tick_params(axis="x", which="both", bottom=False, labelbottom=False)
    plain(axes)


def _bars_by_layer(axes: Axes, record: Record) -> None:
    densities = _densities(record["layers"])
    end = (max(densities) or 1.0) * 1.5
    axes.barh(range(len(densities)), densities, height=0.8, color=BLUE)
    for place, density in enumerate(densities):
        axes.text(end, place, _percent(density, 3), ha="right", va="center", fontsize=SMALL)
    axes.axvline(record["all"]["density"], color=ORANGE, linestyle="--")
    axes.set(xlabel="by layer", xlim=(0, end))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=3))
    axes.xaxis.set_major_formatter(tick)
    axes.tick_params(axis="x", labelsize=SMALL)
    axes.tick_params(axis="y", which="both", left=False, labelleft=False)
    plain(axes)


def _several(records: Sequence[Record], overlap: Record) -> Figure:
    across = ceil(sqrt(len(records)))
    down = ceil(len(records) / across)
    panel = max(len(records[0]["kinds"]) * COLUMNS[2], 2.2)
    titles = [_numbered(i, r["label"], int(panel * 12)) for i, r in enumerate(records)]
    labels = [_numbered(i, label, 34) for i, label in enumerate(overlap["labels"])]
    heights = (
        down * (len(records[0]["layers"]) * ROW + 0.4 + 0.17 * _lines(titles)),
        len(labels) * max(0.4, 0.17 * _lines(labels)) + 0.8,
    )
    width = max(across * panel + 1.7, 6.5)
    figure = Figure(figsize=(width, sum(heights)), layout="constrained")
    grid = figure.add_gridspec(2, 1, height_ratios=heights)
    upper, lower = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
    panels = list(upper.subplots(down, across, squeeze=False, sharey=True).flat)
    colours = _scale(records)
    for axes, record, title in zip(panels, records, titles, strict=False):
        heat(axes, *_table(record), colours, digits=2)
        axes.set_title(title, fontsize=SMALL, loc="left", **LITERAL)
    for axes in panels[len(records) :]:
        axes.set_axis_off()
    bar = upper.colorbar(ScalarMappable(colours, DARKER), ax=panels, aspect=30, format=tick)
    bar.set_label("density", fontsize=SMALL)
    bar.ax.tick_params(labelsize=SMALL)
    matrix = PAIR * len(labels)  # the rest of the width stays empty
    rest = max(width - matrix - 0.09 * max(map(len, "\n".join(labels).split("\n"))), 0.01)
    beside = lower.add_gridspec(1, 2, width_ratios=(matrix, rest))
    _jaccard(lower.add_subplot(beside[0]), overlap, labels)
    return figure


def _jaccard(axes: Axes, overlap: Record, labels: Sequence[str]) -> None:
    """In another colour than densities, from no weight in common to all."""
    shared = np.asarray(overlap["jaccard"], dtype=float)
    image = axes.imshow(
        shared, aspect="auto", cmap="Blues", norm=PowerNorm(0.5, 0, 1), interpolation="none"
    )
    for (row, column), value in np.ndenumerate(shared):
        chance = overlap["by_chance"][row][column]
        text = "1" if row == column else f"{value:.3f}\n({chance:.3f})"
        _write(axes, image, row, column, value, text)
    places = range(len(labels))
    axes.set_xticks(places, [str(place + 1) for place in places], fontsize=SMALL)
    axes.set_yticks(places, labels, fontsize=SMALL, **LITERAL)
    axes.set_title("Jaccard overlap (in parentheses: by chance)", fontsize=SMALL, loc="left")
    _ruled(axes, shared.shape)


def heat(
    axes: Axes,
    layers: Sequence[str],
    kinds: Sequence[str],
    density: Matrix,
    colours: Normalize,
    *,
    digits: int,
) -> AxesImage:
    """Layers × kinds, darker if denser, with the density of each in %."""
    image = axes.imshow(density, aspect="auto", cmap=DARKER, norm=colours, interpolation="none")
    for (row, column), value in np.ndenumerate(density):
        _write(axes, image, row, column, value, _percent(value, digits))
    axes.set_xticks(range(len(kinds)), [SHORT.get(kind, kind) for kind in kinds], fontsize=SMALL)
    axes.set_yticks(range(len(layers)), layers, fontsize=SMALL)
    _ruled(axes, density.shape)
    return image


def _table(record: Record) -> tuple[list[str], list[str], Matrix]:
    layers, kinds = list(record["layers"]), list(record["kinds"])
    density = np.full((len(layers), len(kinds)), np.nan)
    for row, layer in enumerate(layers):
        for column, kind in enumerate(kinds):
            if tally := record["table"].get(layer, {}).get(kind):
                density[row, column] = tally["density"]
    return layers, kinds, density


def _write(axes: Axes, image: AxesImage, row: int, column: int, value: float, text: str) -> None:
    """In black or white, whichever is readable on the cell's colour."""
    red, green, blue, painted = image.to_rgba(np.array([value]))[0]
    dark = painted and 0.3 * red + 0.59 * green + 0.11 * blue < 0.47
    axes.text(
        column, row, text, ha="center", va="center", fontsize=SMALL, linespacing=1.0,
        color="white" if dark else "black",
    )  # fmt: skip


def _ruled(axes: Axes, shape: tuple[int, ...]) -> None:
    """White lines between the cells; no ticks, no frame."""
    axes.set_xticks(np.arange(1, shape[1]) - 0.5, minor=True)
    axes.set_yticks(np.arange(1, shape[0]) - 0.5, minor=True)
    axes.grid(which="minor", color="white")
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)


def scale(cells: Matrix) -> Normalize:
    """From zero to the densest cell; by the square root if cells differ much."""
    top = np.nanmax(cells) or 1.0
    wide = top > WIDE * np.nanmin(cells)
    return PowerNorm(0.5, vmin=0, vmax=top) if wide else Normalize(vmin=0, vmax=top)


def _scale(records: Sequence[Record]) -> Normalize:
    return scale(np.concatenate([_table(record)[2].ravel() for record in records]))


def _percent(density: float, digits: int) -> str:
    """So many significant digits, at most two decimals; a density above 0 is not shown as 0."""
    if isnan(density):
        return NONE
    value = float(f"{100 * density:.{digits}g}")
    if value < 0.005:
        return "<0.01" if value else "0"
    whole = len(str(int(value))) if value >= 1 else 0
    return f"{value:.{min(2, max(0, digits - whole))}f}"


def tick(value: float, _: float | None = None) -> str:
    return f"{100 * value:.4g}%"


def _densities(tallies: Mapping[str, Record]) -> list[float]:
    return [tally["density"] for tally in tallies.values()]


class _Wrapper(TextWrapper):
    wordsep_re = re.compile(r"(\s+)|(?<=[_/])")  # names of runs have no spaces


def _wrapped(label: str, width: int) -> str:
    return _Wrapper(width).fill(label)


def _numbered(place: int, label: str, width: int) -> str:
    return _wrapped(f"{place + 1}  {label}", width)


def _lines(texts: Sequence[str]) -> int:
    return max(text.count("\n") for text in texts) + 1
