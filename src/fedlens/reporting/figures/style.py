"""What all figures share: colours, type sizes, layout in inches, and reproducible files.

The colours are Okabe and Ito's, which colour-blind readers can distinguish; markers and dashes
repeat them for prints in grey. A figure has its width in a paper.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from math import ceil
from pathlib import Path
from typing import Any, Literal, NamedTuple

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path
from matplotlib.ticker import MaxNLocator

from fedlens.errors import FedlensError
from fedlens.files import clear_partials, replacing

FORMATS = ("png", "svg", "pdf")
DPI = 240
COLUMN, TEXT = 3.4, 7.0  # inches: a column of a paper, and the whole width of its text

BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
SKY, AMBER, YELLOW, BLACK, GREY = "#56B4E9", "#E69F00", "#F0E442", "#000000", "#666666"
DARKER = "cividis_r"  # darker for more, and uniform for every kind of colour vision

SIZE, SMALL = 8.5, 7.0  # points, at the width of the figure in a paper
PAPER: dict[Any, Any] = {
    "font.size": SIZE,
    "axes.titlesize": SIZE,
    "axes.labelsize": SIZE,
    "figure.titlesize": SIZE,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.fontsize": SMALL,
    "legend.frameon": False,
    "legend.handlelength": 2.4,  # so that dashes can be seen
    "axes.linewidth": 0.6,
    "axes.titlepad": 4.0,
    "axes.labelpad": 2.5,
    "axes.axisbelow": True,
    "grid.color": "#E2E2E2",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.2,
    "lines.markersize": 4.0,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "text.parse_math": False,  # a label may hold a dollar
}
OUTPUT: dict[Any, Any] = {"svg.hashsalt": "fedlens", "pdf.fonttype": 42}
METADATA: dict[str, dict[str, None]] = {  # without date and version: equal figures, equal bytes
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
LINE = 0.155  # inches from one line of small type to the next
HANDLE = 0.5  # inches of a legend's entry beside its text


class Look(NamedTuple):
    """How a method is drawn, in every figure of a report."""

    colour: str
    marker: str
    dash: Any = "-"


LOOKS = (
    Look(BLUE, "o"),
    Look(ORANGE, "s", (0, (5, 1.5))),
    Look(GREEN, "^", (0, (1.3, 1.1))),
    Look(PURPLE, "D", (0, (5, 1.2, 1.3, 1.2))),
    Look(SKY, "v", (0, (3, 1))),
    Look(AMBER, "P", (0, (8, 1.5))),
    Look("#8A7B00", ">", (0, (1.3, 1.1, 1.3, 1.1, 5, 1.1))),
    Look("#7A4A1E", "<", (0, (2.5, 2.5))),
)


def paper() -> AbstractContextManager[None]:
    """A context in which figures are made and saved in the style of a report."""
    return rc_context(PAPER)


def figure_format(path: Path) -> str:
    """By the suffix; call it before long work, which would be lost with a wrong suffix."""
    form = path.suffix.lower().removeprefix(".")
    if form not in FORMATS:
        raise FedlensError(f"A figure must be a .png, .svg or .pdf file, not '{path.name}'.")
    return form


def save(figure: Figure, path: Path) -> None:
    form = figure_format(path)
    clear_partials(path.parent, of=path.name)  # of a process that was killed while it drew
    with replacing(path) as temporary:
        render(figure, temporary, form)


def render(figure: Figure, path: Path, form: str) -> None:
    """The same figure gives the same bytes."""
    with rc_context(OUTPUT):
        figure.savefig(path, format=form, dpi=DPI, metadata=METADATA[form])


def plain(axes: Axes, grid: Literal["x", "y", "both"] | None = None) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    if grid:
        axes.grid(axis=grid)


def rounded(most: int, *, integer: bool = False) -> MaxNLocator:
    """Ticks at round numbers."""
    return MaxNLocator(nbins=most, integer=integer, steps=[1, 2, 5, 10])


def panels(
    rows: int,
    columns: int,
    *,
    width: float,
    height: float,
    left: float = 0.5,
    right: float = 0.1,
    bottom: float = 0.37,
    top: float = 0.36,
    across: float = 0.2,
    down: float = 0.5,
    share: Literal["row", "all", "none"] = "none",
) -> tuple[Figure, list[list[Axes]]]:
    """A figure of `width` with panels of `height`, its margins and gaps in inches.

    matplotlib's layout solver would take longer than all the drawing. `share` is of y axes.
    """
    whole = top + bottom + rows * height + (rows - 1) * down
    each = (width - left - right - (columns - 1) * across) / columns
    figure = Figure(figsize=(width, whole))
    axes = figure.subplots(
        rows, columns, squeeze=False, sharey=share,
        gridspec_kw={
            "left": left / width, "right": 1 - right / width, "wspace": across / each,
            "bottom": bottom / whole, "top": 1 - top / whole, "hspace": down / height,
        },
    )  # fmt: skip
    return figure, [list(row) for row in axes]


def remark(figure: Figure, text: str) -> None:
    """In the upper right corner, on a line of its own."""
    width, height = figure.get_size_inches()
    figure.text(
        1 - 0.05 / width, 1 - 0.04 / height, text, ha="right", va="top", color=GREY, fontsize=SMALL
    )


def legend_lines(labels: Sequence[str], width: float) -> int:
    """The number of lines of a legend below a figure."""
    if not labels:
        return 0
    widest = max(text_width(label) for label in labels) + HANDLE
    return ceil(len(labels) / max(1, int((width - 0.1) // widest)))


def legend_below(figure: Figure, handles: Mapping[str, Artist]) -> None:
    """Along the lower edge, in a margin of `legend_lines` × LINE inches."""
    lines = legend_lines(list(handles), figure.get_figwidth())
    if lines:
        across = ceil(len(handles) / lines)
        # matplotlib fills columns, a reader reads lines
        order = [label for place in range(across) for label in list(handles)[place::across]]
        figure.legend(
            [handles[label] for label in order], order, loc="lower center",
            bbox_to_anchor=(0.5, 0), ncols=across, borderaxespad=0.2, labelspacing=0.3,
            columnspacing=1.0, handletextpad=0.5,
        )  # fmt: skip


def text_width(text: str, size: float = SMALL) -> float:
    """In inches, of the widest line."""
    font = FontProperties(size=size)
    widths = [
        text_to_path.get_text_width_height_descent(line, font, ismath=False)[0]
        for line in text.split("\n")
    ]
    return float(max(widths)) / 72
