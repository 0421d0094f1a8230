"""Density by layer and kind, of one mask or of several side by side in the same colours."""

from collections.abc import Sequence
from math import ceil, nan
from textwrap import fill

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure

from fedlens.reporting.figures.masks import heat, scale, tick
from fedlens.reporting.figures.style import COLUMN, DARKER, SMALL, TEXT, panels, text_width
from fedlens.reporting.study.content import MaskMap

ACROSS = 3  # panels in a row
ROW = 0.19  # inches


def maps_figure(maps: Sequence[MaskMap]) -> Figure:
    """All of one model; the numbers are percentages of a cell's weights that are trained."""
    matrices = [_matrix(one) for one in maps]
    colours = scale(np.concatenate([matrix.ravel() for matrix in matrices]))
    across = min(len(maps), ACROSS)
    down = ceil(len(maps) / across)
    width = COLUMN if across == 1 else TEXT
    layers = maps[0].layers
    figure, drawn = panels(
        down, across, width=width, height=ROW * len(layers), top=0.32, bottom=0.22, down=0.55,
        left=max(map(text_width, layers)) + 0.14, right=0.75, across=0.12,
    )  # fmt: skip
    flat = [axes for row in drawn for axes in row]
    for place, (axes, one, matrix) in enumerate(zip(flat, maps, matrices, strict=False)):
        heat(axes, layers if place % across == 0 else [""] * len(layers), one.kinds, matrix,
             colours, digits=2)  # fmt: skip
        axes.set_title(fill(one.label, 42), fontsize=SMALL)
    for axes in flat[len(maps) :]:
        axes.set_visible(False)
    height = figure.get_figheight()
    bar = figure.add_axes((1 - 0.66 / width, 0.22 / height, 0.1 / width, 1 - 0.54 / height))
    figure.colorbar(ScalarMappable(colours, DARKER), cax=bar, format=tick)
    bar.set_ylabel("density", fontsize=SMALL)
    return figure


def _matrix(one: MaskMap) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.array([[nan if cell is None else cell for cell in row] for row in one.density])
