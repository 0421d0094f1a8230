"""Figures of analyses: accuracy over α or λ, before and after an edit, interference."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import PercentFormatter

from fedlens.reporting.figures.alpha import along_figure, mark_choice
from fedlens.reporting.figures.style import (
    BLACK,
    BLUE,
    DARKER,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    TEXT,
    figure_format,
    panels,
    paper,
    plain,
    save,
)
from fedlens.reporting.study.analyses import candidate_label, different_rounds

DIVERGING = "PuOr_r"  # every kind of colour vision distinguishes purple and orange
# One line each: neither colours nor markers repeat, so either alone distinguishes the lines.
LINES = {
    "o": BLUE, "s": ORANGE, "^": GREEN, "D": PURPLE, "v": SKY, "P": BLACK,
}  # fmt: skip
SQUARE, APART = 1.45, 0.86  # inches: a matrix, and the gap to the next, with its colour bar
WRITTEN, TICKS = 7, 12  # rows up to which a matrix shows its numbers, and all its names


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Draws a record of any kind to a png, svg or pdf file."""
    figure_format(path)
    with paper():
        save(FIGURES[record["kind"]](record), path)


def alpha_figure(record: Mapping[str, Any]) -> Figure:
    """Accuracy and loss over α, of a run or of a composition."""
    ends = (record["base"], "run") if record["kind"] == "alpha" else ("θ", "composed")
    return along_figure(
        title=_alpha_title(record),
        alphas=_column(record, "alpha"),
        accuracy=_validation(record, "top1"),
        loss=_validation(record, "loss"),
        chosen=record["chosen"],
        test=record["test"]["top1"],
        base=ends[0],
        end=ends[1],
        barrier=record.get("barrier"),
    )


def merge_figure(record: Mapping[str, Any]) -> Figure:
    """Accuracy over λ, a line for each method."""
    figure = Figure(figsize=(TEXT, 3.0), layout="constrained")
    axes = figure.subplots()
    rows = record["candidates"]
    styles = list(LINES.items())
    for place, method in enumerate(dict.fromkeys(row["method"] for row in rows)):
        marker, colour = styles[place % len(styles)]
        own = [row for row in rows if row["method"] == method]
        scales, accuracy = _column_of(own, "scale"), [row["validation"]["top1"] for row in own]
        label = method.replace("_", " ")
        axes.plot(scales, accuracy, color=colour, marker=marker, linewidth=1.2, label=label)
    scales, row = _column(record, "scale"), rows[record["chosen"]]
    label = candidate_label(row)
    mark_choice(axes, row["scale"], row["validation"]["top1"], record["test"]["top1"], label)
    if min(scales) > 0 and max(scales) >= 10 * min(scales):
        axes.set_xscale("log")
        axes.set_xticks(sorted(set(scales)), [f"{scale:g}" for scale in sorted(set(scales))])
        axes.minorticks_off()
    count = len(record["clients"])
    axes.set_title(f"Updates of {count} clients in round {record['round']}, merged")
    axes.set(xlabel="λ", ylabel="accuracy (lines: validation)")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    _legend_beside(axes)
    plain(axes)
    return figure


def clients_figure(record: Mapping[str, Any]) -> Figure:
    """Target, control and overall accuracy before and after the edit."""
    before, after = record["candidates"]
    figure = Figure(figsize=(TEXT, 2.9), layout="constrained")
    edits = ", ".join(f"client {k} × {factor:g}" for k, factor in record["coefficients"].items())
    figure.suptitle(f"Clients recombined: {edits or 'none changed'}")
    panels = figure.subplots(1, 2, sharey=True)
    pairs = {
        "validation": [{**row, **row["validation"]} for row in (before, after)],
        "test": [record["as_trained"]["test"], record["test"]],
    }
    for axes, (split, (old, new)) in zip(panels, pairs.items(), strict=True):
        names = {"target": "target", "control": "control", "top1": "all classes"}
        known = [key for key in names if old[key] is not None and new[key] is not None]
        for shift, metrics, colour, hatch, label in [
            (-0.2, old, BLUE, None, "as trained"),
            (0.2, new, ORANGE, "//", "edited"),
        ]:
            bars = axes.bar(
                np.arange(len(known)) + shift, [metrics[key] for key in known],
                width=0.38, color=colour, hatch=hatch, edgecolor="white", label=label,
            )  # fmt: skip
            axes.bar_label(bars, fmt=lambda v: f"{v:.1%}", fontsize="small", padding=2)
        axes.set_xticks(range(len(known)), [names[key] for key in known])
        rounds = different_rounds(record) if split == "test" else None
        note = f" (as trained: round {rounds[0]}, edited: round {rounds[1]})" if rounds else ""
        axes.set_title(split + note, fontsize="medium")
        axes.margins(y=0.15)
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        plain(axes)
    panels[0].set_ylabel("accuracy")
    _legend_beside(panels[1])
    return figure


def forget_figure(record: Mapping[str, Any]) -> Figure:
    """Target and control over λ, with the lower bound of the control."""
    scales = _column(record, "scale")
    target, control = (_column(record, key) for key in ("target", "control"))
    chosen = record["chosen"]
    figure = Figure(figsize=(TEXT, 3.0), layout="constrained")
    axes = figure.subplots()
    client = record["client"]
    what = f"class {record['class']}" if client is None else f"the classes of client {client}"
    axes.plot(scales, control, color=BLUE, marker="o", label="control: all other classes")
    axes.plot(scales, target, color=ORANGE, marker="s", label=f"target: {what}")
    bound = record["keep"] * control[scales.index(0)]
    kept = f"{record['keep']:g} × control at λ = 0"
    axes.axhline(bound, color=BLUE, linestyle="--", linewidth=1, label=kept)
    axes.axvline(scales[chosen], color=GREY, linestyle=":", zorder=0)
    test = record["test"]
    for key, colour, marker in (("control", BLUE, "o"), ("target", ORANGE, "s")):
        if test[key] is not None:
            axes.plot(
                scales[chosen], test[key], color="white", marker=marker, markersize=9,
                markeredgecolor=colour, markeredgewidth=1.8, linestyle="none", zorder=5,
                label=f"test, {key}: {test[key]:.1%}",
            )  # fmt: skip
    axes.set_title(f"Forgetting {what}: chosen λ = {scales[chosen]:g}")
    axes.set(xlabel="λ", ylabel="accuracy (lines: validation)")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    _legend_beside(axes)
    plain(axes)
    return figure


def interference_figure(record: Mapping[str, Any]) -> Figure:
    """Cosines, sign conflicts, and the disentanglement error of two clients over (α₁, α₂)."""
    figure, [[cosines, signs, errors]] = panels(
        1, 3, width=TEXT, height=SQUARE, top=0.45, bottom=0.52, left=0.42,
        right=TEXT - 0.42 - 3 * SQUARE - 2 * APART, across=APART,
    )  # fmt: skip
    clients, (first, second) = record["clients"], record["pair"]
    spread = TwoSlopeNorm(0, -1, 1)
    _heat(cosines, record["cosine"], clients, DIVERGING, spread, "cosine of updates")
    half = TwoSlopeNorm(0.5, 0, 1)
    _heat(signs, record["sign_conflict"], clients, DIVERGING, half, "sign conflict")
    for axes in (cosines, signs):
        axes.set(xlabel="client", ylabel="client")
    alphas = [f"{alpha:g}" for alpha in record["alphas"]]
    error, scale = record["disentanglement_error"], Normalize(0, 1)
    _heat(errors, error, alphas, DARKER, scale, "disentanglement error")
    errors.invert_yaxis()
    mean = record["accuracy_normalised_mean"]
    accuracy = f"normalised accuracy at (1, 1): {'unknown' if mean is None else f'{mean:.1%}'}"
    errors.set_ylabel(f"α of client {first}")
    errors.set_xlabel(f"α of client {second}\n{accuracy}")
    _frame_unit_square(errors, record["alphas"])
    figure.suptitle(f"Interference between the clients of round {record['round']}", y=0.99)
    return figure


def _alpha_title(record: Mapping[str, Any]) -> str:
    if record["kind"] == "alpha":
        return f"base + α(run − base), base: {record['base']}"
    return "θ + α (" + " ".join(f"{c:+g}·{name}" for name, c in record["terms"].items()) + ")"


def _legend_beside(axes: Axes) -> None:
    axes.legend(
        frameon=False, fontsize="small", labelspacing=0.9, loc="center left",
        bbox_to_anchor=(1, 0.5),
    )  # fmt: skip


def _heat(
    axes: Axes,
    values: Sequence[Sequence[float | None]],
    names: Sequence[object],
    colours: str,
    scale: Normalize,
    title: str,
) -> None:
    """A matrix, with its numbers if there is room; unknown values are white."""
    matrix = np.ma.masked_invalid(np.array(values, dtype=float))
    image = axes.imshow(matrix, cmap=colours, norm=scale, interpolation="none")
    places = range(0, len(names), -(-len(names) // TICKS))
    axes.set_xticks(places, [str(names[place]) for place in places])
    axes.set_yticks(places, [str(names[place]) for place in places])
    axes.set_title(title, fontsize="medium")
    axes.figure.colorbar(image, cax=axes.inset_axes((1.04, 0, 0.05, 1)))
    if len(names) > WRITTEN:
        return
    for (row, column), value in np.ndenumerate(matrix):
        if not np.ma.is_masked(value):
            red, green, blue, _ = image.cmap(image.norm(value))
            dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
            axes.text(
                column, row, f"{value:.2f}", ha="center", va="center", fontsize="small",
                color="white" if dark else "black",
            )  # fmt: skip


def _frame_unit_square(axes: Axes, alphas: Sequence[float]) -> None:
    """Around all cells with both α in [0, 1], the usual range of merged models."""
    inside = [place for place, alpha in enumerate(alphas) if 0 <= alpha <= 1]
    if inside:
        corner, side = inside[0] - 0.5, len(inside)
        frame = Rectangle((corner, corner), side, side, fill=False, edgecolor=ORANGE, linewidth=2.5)
        axes.add_patch(frame)
        frame.set_clip_on(False)  # it may lie on the edge


def _column(record: Mapping[str, Any], key: str) -> list[float]:
    return _column_of(record["candidates"], key)


def _column_of(rows: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [row[key] for row in rows]


def _validation(record: Mapping[str, Any], key: str) -> list[float]:
    return [row["validation"][key] for row in record["candidates"]]


FIGURES = {
    "alpha": alpha_figure,
    "compose": alpha_figure,
    "merge": merge_figure,
    "clients": clients_figure,
    "forget": forget_figure,
    "interference": interference_figure,
}
