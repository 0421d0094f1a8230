"""Figures of a partition: the classes that each client holds, and statistics over clients."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedlens.reporting.figures.style import BLUE, DARKER, ORANGE, TEXT, paper, plain, save

DRAWN = 200  # clients; more would be thinner than a line of the picture
RULED = 1000  # cells up to which lines between them help

MEASURES = {  # of the statistics, in the order of the panels
    "sizes": "samples per client",
    "classes_per_client": "classes per client",
    "label_entropy": "label entropy [nats]",
    "emd": "EMD to the global labels",
}


def partition_figure(record: Mapping[str, Any], path: Path) -> None:
    """Draws {"name", "statistics", "histogram"?} to a png, svg or pdf file."""
    with paper():
        save(holdings_figure(record), path)


def holdings_figure(record: Mapping[str, Any]) -> Figure:
    """Up to 200 clients with a histogram: clients × classes. Else the distribution of each measure
    over clients; if the statistics have no lists (many clients), its range.
    """
    statistics, histogram = record["statistics"], record.get("histogram")
    drawn = histogram is not None and statistics["clients"] <= DRAWN
    height = 4.2 if drawn else 1.9 if "sizes" in statistics else 1.4
    figure = Figure(figsize=(TEXT, height))
    figure.suptitle(
        f"Partition '{record['name']}': K = {statistics['clients']:,} clients, "
        f"N = {statistics['samples']:,} training samples",
        y=1 - 0.05 / height, va="top",
    )  # fmt: skip
    low, tall = 0.38 / height, 1 - 0.8 / height
    edges = {"bottom": low, "top": low + tall, "right": 1 - 0.12 / TEXT}
    if drawn:
        legend = figure.add_axes((0.085, low, 0.012, tall))
        picture = figure.add_axes((0.165, low, 0.425, tall))
        _holdings(figure, picture, legend, np.asarray(histogram))
        _sizes(figure.add_axes((0.605, low, 0.115, tall), sharey=picture), statistics["sizes"])
        grid = figure.add_gridspec(3, 1, left=0.79, hspace=0.9, **edges)
        panels = [figure.add_subplot(grid[row]) for row in range(3)]
        names = [name for name in MEASURES if name != "sizes"]
    else:
        grid = figure.add_gridspec(1, len(MEASURES), left=0.06, wspace=0.3, **edges)
        panels = [figure.add_subplot(grid[column]) for column in range(len(MEASURES))]
        names = list(MEASURES)
    for place, (axes, name) in enumerate(zip(panels, names, strict=True)):
        if name in statistics:
            _distribution(axes, name, statistics[name])
            if drawn or place == 0:
                axes.set_ylabel("clients")
        else:
            _range(axes, statistics["summary"][name])
        axes.set_xlabel(MEASURES[name], fontsize="small")
    return figure


def _holdings(figure: Figure, axes: Axes, legend: Axes, counts: np.ndarray[Any, Any]) -> None:
    """Clients × classes, darker for more samples; a cell without any is white."""
    held = np.ma.masked_equal(counts, 0)
    # On a square-root scale small counts can be distinguished beside a few large ones.
    scale = PowerNorm(0.5, vmin=0, vmax=int(counts.max()))
    image = axes.imshow(held, aspect="auto", cmap=DARKER, norm=scale, interpolation="none")
    axes.set(xlabel="class", ylabel="client")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if counts.size <= RULED:
        axes.set_xticks(np.arange(1, counts.shape[1]) - 0.5, minor=True)
        axes.set_yticks(np.arange(1, counts.shape[0]) - 0.5, minor=True)
        axes.grid(which="minor", color="white")
        axes.tick_params(which="minor", length=0)
    bar = figure.colorbar(image, cax=legend, ticklocation="left")
    bar.set_label("samples of a class (white: none)")
    legend.yaxis.set_major_locator(MaxNLocator(integer=True))


def _sizes(axes: Axes, sizes: Sequence[int]) -> None:
    """Bars beside the picture, one per client, on the client's line."""
    height = 0.85 if len(sizes) <= 50 else 1.0  # thin gaps come out as stripes
    axes.barh(np.arange(len(sizes)), sizes, height=height, color=BLUE)
    axes.set_xlabel(MEASURES["sizes"], fontsize="small")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
    axes.tick_params(axis="y", which="both", left=False, labelleft=False)
    plain(axes)


def _distribution(axes: Axes, name: str, values: Sequence[float]) -> None:
    """How many clients have which value, with the mean."""
    low, top = min(values), 1.0 if name == "emd" else max(values)
    whole = all(isinstance(value, int) for value in values)
    if whole and top - low < 30:  # a bar for each number
        bins = np.arange(low, top + 2) - 0.5
        axes.set_xlim(low - 2.5, top + 2.5)
    else:
        bins = np.linspace(0, top or 1, 28)  # no edge at a round number, where many values lie
    axes.hist(values, bins=list(bins), color=BLUE, edgecolor="white", linewidth=0.5)
    mean = sum(values) / len(values)
    axes.axvline(mean, color=ORANGE, linestyle="--")
    axes.set_title(f"mean {_number(mean)}", color=ORANGE, fontsize="small")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=whole))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    plain(axes)


def _range(axes: Axes, summary: Mapping[str, float]) -> None:
    """From the smallest to the largest value, with the mean."""
    low, mean, top = (summary[word] for word in ("min", "mean", "max"))
    axes.plot([low, top], [0, 0], color=BLUE, linewidth=4, solid_capstyle="butt")
    axes.plot(mean, 0, color=ORANGE, marker="o", markersize=6, linestyle="none")
    axes.set_title(f"mean {_number(mean)}", color=ORANGE, fontsize="small")
    extent = " to ".join(dict.fromkeys([_number(low), _number(top)]))
    axes.text(
        0.5,
        0.2,
        f"all: {extent}",
        transform=axes.transAxes,
        ha="center",
        color=BLUE,
        fontsize="small",
    )
    axes.margins(x=0.15)
    axes.set_yticks([])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=3))
    plain(axes)
    axes.spines["left"].set_visible(False)


def _number(value: float) -> str:
    return f"{round(value, 6):,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
