"""What all figures share: colours, formats, and a file that is whole or not there.

The colours are of Okabe and Ito, which colour-blind readers can tell apart.
"""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedlens.errors import FedlensError
from fedlens.files import replacing

FORMATS = ("png", "svg", "pdf")
BLUE, ORANGE = "#0072B2", "#D55E00"
DARKER = "cividis_r"  # the more, the darker; even for every kind of colour vision


def figure_format(path: Path) -> str:
    """By the suffix; asked before any work, so that nothing is computed in vain."""
    form = path.suffix.lower().removeprefix(".")
    if form not in FORMATS:
        raise FedlensError(f"A figure is a .png, .svg or .pdf file, not '{path.name}'.")
    return form


def save(figure: Figure, path: Path) -> None:
    form = figure_format(path)
    with replacing(path) as temporary:
        figure.savefig(temporary, format=form, dpi=150)


def plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
