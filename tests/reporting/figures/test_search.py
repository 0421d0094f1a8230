"""Pictures of a search say what its record says."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure

from fedlens.reporting.figures.search import draw, history_figure, importance_figure, slices_figure

SPACE = {
    "train.lr": {"kind": "log", "values": [1e-4, 1.0], "text": "log:0.0001:1.0"},
    "train.trainable": {
        "kind": "choices", "values": ["full", "last_blocks:2"], "text": "full,last_blocks:2",
    },
    "train.clip_norm": {"kind": "choices", "values": [None, 1.0], "text": "null,1.0"},
}  # fmt: skip


def trial(number: int, state: str, value: float | None, lr: float, what: str) -> dict[str, Any]:
    params = {"train.lr": lr, "train.trainable": what, "train.clip_norm": None}
    return {"number": number, "state": state, "value": value, "params": params, "curve": []}


@pytest.fixture
def record() -> dict[str, Any]:
    trials = [
        trial(1, "complete", 0.4, 1e-3, "full"),
        trial(2, "failed", None, 0.9, "full"),
        trial(3, "complete", 0.6, 1e-2, "last_blocks:2"),
        trial(4, "pruned", 0.1, 1e-4, "full"),
        trial(5, "complete", 0.5, 1e-1, "full"),
        trial(6, "pruned", None, 1e-4, "full"),
    ]
    return {
        "experiment": "quickstart", "space": SPACE, "best": 3, "trials": trials,
        "importance": {"train.lr": 0.7, "train.trainable": 0.1, "train.clip_norm": 0.2},
    }  # fmt: skip


def points(figure: Figure, panel: int = 0) -> dict[str, list[tuple[float, float]]]:
    axes = figure.axes[panel]
    return {
        str(drawn.get_label()): [(float(x), float(y)) for x, y in drawn.get_offsets()]
        for drawn in axes.collections
        if isinstance(drawn, PathCollection)
    }


def test_the_history_shows_every_measured_trial_and_the_best_so_far(record: Any) -> None:
    figure = history_figure(record)
    assert points(figure) == {
        "complete": [(1, 0.4), (3, 0.6), (5, 0.5)],
        "stopped early": [(4, 0.1)],
        "best": [(3, 0.6)],
    }
    best, *failed = figure.axes[0].lines
    assert list(best.get_xdata()) == [1, 3, 5, 6]
    assert list(best.get_ydata()) == [0.4, 0.6, 0.6, 0.6]
    assert [line.get_xdata()[0] for line in failed] == [2]


def test_a_slice_puts_choices_in_their_order_and_rates_on_a_logarithmic_axis(record: Any) -> None:
    figure = slices_figure(record)
    lr, what, clip = figure.axes
    assert (lr.get_xscale(), what.get_xscale()) == ("log", "linear")
    assert points(figure, 0)["complete"] == [(1e-3, 0.4), (1e-2, 0.6), (1e-1, 0.5)]
    assert points(figure, 1)["complete"] == [(0, 0.4), (1, 0.6), (0, 0.5)]
    assert [label.get_text() for label in what.get_xticklabels()] == ["full", "last_blocks:2"]
    assert [label.get_text() for label in clip.get_xticklabels()] == ["null", "1.0"]
    assert [axes.get_xlabel() for axes in figure.axes] == list(SPACE)


def test_what_mattered_most_is_at_the_top(record: Any) -> None:
    axes = importance_figure(record).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()][-1] == "train.lr"
    assert [bar.get_width() for bar in axes.patches] == [0.1, 0.2, 0.7]


@pytest.mark.slow
def test_the_files_are_there_and_importance_only_where_it_is_known(
    record: Any, tmp_path: Path
) -> None:
    draw({**record, "importance": None}, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"history.png", "slices.png"}
    draw(record, tmp_path)
    assert (tmp_path / "importance.png").stat().st_size > 0


def test_a_space_of_many_keys_takes_several_rows(record: Any) -> None:
    many = {f"key{place}": SPACE["train.lr"] for place in range(6)}
    trials = [
        {**one, "params": dict.fromkeys(many, one["params"]["train.lr"])}
        for one in record["trials"]
    ]
    figure = slices_figure({**record, "space": many, "trials": trials})
    assert [axes.get_visible() for axes in figure.axes] == [True] * 6 + [False] * 2
