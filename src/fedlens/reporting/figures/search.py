"""Figures of a search, from trials.json: its history, a slice and the importance per parameter."""

from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from fedlens.reporting.figures.style import BLUE, GREY, ORANGE, plain, save

Record = Mapping[str, Any]

PANEL = 3.0  # inches
ACROSS = 4  # panels in a row


def draw(record: Record, folder: Path) -> None:
    """history.png, slices.png and, if it could be computed, importance.png."""
    save(history_figure(record), folder / "history.png")
    save(slices_figure(record), folder / "slices.png")
    if record["importance"]:
        save(importance_figure(record), folder / "importance.png")


def history_figure(record: Record) -> Figure:
    """Validation accuracy over trials, and the best so far."""
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    complete = _of(record, "complete")
    numbers = [trial["number"] for trial in complete]
    best = list(accumulate((trial["value"] for trial in complete), max))
    end = len(record["trials"])
    axes.step(
        [*numbers, end],
        [*best, best[-1]],
        where="post",
        color=BLUE,
        linewidth=1,
        label="best so far",
    )
    _points(axes, record, "number")
    for place, trial in enumerate(_of(record, "failed")):
        axes.axvline(
            trial["number"], color=GREY, linestyle=":", label="failed" if place == 0 else None
        )
    axes.set(xlabel="trial", title=_title(record))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _finish(axes)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize="small")
    return figure


def slices_figure(record: Record) -> Figure:
    """Validation accuracy over each parameter."""
    keys = list(record["space"])
    rows, columns = -(-len(keys) // ACROSS), min(len(keys), ACROSS)
    size = (PANEL * columns + 2.0, PANEL * rows + 0.4)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(_title(record), fontsize="medium")
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
    for axes, key in zip(panels, keys, strict=False):
        dimension = record["space"][key]
        if dimension["kind"] == "log":
            axes.set_xscale("log")
        if dimension["kind"] == "choices":
            _name_choices(axes, dimension["text"].split(","))
        _points(axes, record, key)
        axes.set_xlabel(key)
        _finish(axes)
    for axes in panels[len(keys) :]:
        axes.set_visible(False)
    for place, axes in enumerate(panels):
        axes.set_ylabel("validation accuracy" if place % columns == 0 else "")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize="small")
    return figure


def importance_figure(record: Record) -> Figure:
    """How much each parameter distinguishes the best trials from the others."""
    shares = sorted(record["importance"].items(), key=lambda item: item[1])
    figure = Figure(figsize=(6.5, 0.45 * len(shares) + 1.2), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh([key for key, _ in shares], [share for _, share in shares], color=BLUE)
    axes.bar_label(bars, fmt=lambda share: f"{share:.0%}", padding=3, fontsize="small")
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xlim(0, max(share for _, share in shares) * 1.12)
    axes.set_title("What distinguishes the best trials", fontsize="medium")
    axes.set_xlabel(f"importance (PED-ANOVA over {len(_of(record, 'complete'))} complete trials)")
    plain(axes)
    return figure


def _points(axes: Axes, record: Record, key: str) -> None:
    """One per trial with a validation; the best has another colour."""
    best = [trial for trial in record["trials"] if trial["number"] == record["best"]]
    for trials, marker, face, edge, label in [
        (_of(record, "complete"), "o", BLUE, BLUE, "complete"),
        (_of(record, "pruned"), "x", GREY, None, "stopped early"),
        (best, "*", ORANGE, "black", "best"),
    ]:
        if trials:
            axes.scatter(
                [_place(record, trial, key) for trial in trials],
                [trial["value"] for trial in trials],
                s=130 if marker == "*" else 28, marker=marker, c=face, edgecolors=edge,
                linewidths=0.7 if marker == "*" else None, label=label, zorder=3,
            )  # fmt: skip


def _place(record: Record, trial: Record, key: str) -> float:
    """The place on the axis: a number itself, or the index of a choice."""
    if key == "number":
        return float(trial["number"])
    dimension, value = record["space"][key], trial["params"][key]
    return float(dimension["values"].index(value) if dimension["kind"] == "choices" else value)


def _name_choices(axes: Axes, words: list[str]) -> None:
    crowded = sum(map(len, words)) > 20
    axes.set_xticks(
        range(len(words)), words, rotation=40 if crowded else 0, ha="right" if crowded else "center"
    )
    axes.set_xlim(-0.6, len(words) - 0.4)


def _finish(axes: Axes) -> None:
    axes.set_ylabel("validation accuracy")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.margins(y=0.1)
    plain(axes)


def _of(record: Record, state: str) -> list[Record]:
    """Trials of a state with a value; failed ones may have none."""
    trials = [trial for trial in record["trials"] if trial["state"] == state]
    return trials if state == "failed" else [t for t in trials if t["value"] is not None]


def _title(record: Record) -> str:
    return f"{record['experiment']}: {len(record['trials'])} trials, chosen on validation"
