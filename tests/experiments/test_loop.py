"""The loop's bookkeeping, with scores from a script instead of a model."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlens.experiments.loops.loop import Loop, LoopSettings
from fedlens.runtime.stop import Interrupted
from fedlens.store.checkpoints import Checkpoint, Checkpoints, Journals
from fedlens.store.hashes import Hashes
from fedlens.store.run_folder import RunFolder
from fedlens.training.evaluate import Evaluation


class Counter:
    """Learns to count."""

    def __init__(self) -> None:
        self.value = torch.zeros(1)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"value": self.value}

    def state(self, checkpoint: str) -> dict[str, Any]:
        return {"saved as": checkpoint}

    def files(self) -> Hashes:
        return {}

    def load_state(self, checkpoint: Checkpoint) -> None:
        assert checkpoint.state["saved as"] == checkpoint.name
        self.value.copy_(checkpoint.tensors["value"])


class Scripted:
    """A validation split whose accuracies are known beforehand, by what the counter has reached."""

    def __init__(self, counter: Counter, scores: list[float] | None) -> None:
        self.counter = counter
        self.scores = scores
        self.stop_at: int | None = None

    def validation(self) -> Evaluation | None:
        if int(self.counter.value) == self.stop_at:
            raise Interrupted("SIGTERM")
        if self.scores is None:
            return None
        return Evaluation(1.0, self.scores[int(self.counter.value)], 1.0, [1.0], 10)

    before_training = validation

    def test_curve(self, sink: object) -> None:
        raise AssertionError("not asked for")


class RecordingTracker:
    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.logged.append((step, dict(metrics)))

    def close(self) -> None:
        pass


class CountingRun:
    def __init__(
        self,
        path: Path,
        scores: list[float] | None,
        total: int,
        *,
        unit: str = "round",
        keep_last: int = 2,
        **settings: Any,
    ) -> None:
        path.mkdir(exist_ok=True)
        self.folder = RunFolder(path)
        self.checkpoints = Checkpoints(self.folder.checkpoints, keep_best=1, keep_last=keep_last)
        self.counter = Counter()
        self.evaluator = Scripted(self.counter, scores)
        self.tracker = RecordingTracker()
        self.loop = Loop(
            LoopSettings(unit, **settings),
            self.evaluator,  # type: ignore[arg-type]
            Journals(self.folder, self.checkpoints),
            self.tracker,
            total=total,
            began=time.monotonic(),
            more_metrics=lambda evaluation: {"more": evaluation.top1},
        )

    def run(self, *, most: int = 1000) -> None:
        try:
            self.loop.restore(self.counter)
            self.loop.evaluate_start(self.counter, head_is_fitted=False)
            for _ in range(most):
                if self.loop.finished:
                    break
                self.counter.value += 1
                record = {"lr": 0.5, "train": {"loss": 1.0, "accuracy": 0.5}, "clients": [1]}
                self.loop.finish_unit(self.counter, record, {"train_seconds": 0.0})
        except Interrupted:
            self.loop.save_interrupted(self.counter)
            raise

    def records(self) -> list[dict[str, Any]]:
        return self.folder.journal("metrics").read()


def test_units_are_recorded_and_evaluated_now_and_then_and_at_the_end(tmp_path: Path) -> None:
    run = CountingRun(
        tmp_path, [0.1] * 8, 7, evaluate_every=3, checkpoint_every=5, checkpoint_minutes=60.0
    )
    run.run()
    assert [record["round"] for record in run.records()] == [1, 2, 3, 4, 5, 6, 7]
    evaluated = [record["round"] for record in run.records() if "validation" in record]
    assert evaluated == [3, 6, 7]
    assert all(("more" in record) == ("validation" in record) for record in run.records())
    assert [timing["round"] for timing in run.folder.journal("timings").read()] == [*range(1, 8)]
    assert run.tracker.logged[0] == (
        1,
        {"round": 1, "lr": 0.5, "train/loss": 1.0, "train/accuracy": 0.5},
    )
    assert run.tracker.logged[2][1]["validation/top1"] == 0.1


def test_checkpoints_are_saved_regularly_when_better_and_at_the_end(tmp_path: Path) -> None:
    scores = [0.0, 0.1, 0.1, 0.5, 0.2, 0.2, 0.2, 0.2]
    run = CountingRun(
        tmp_path, scores, 7, checkpoint_every=5, keep_last=100, checkpoint_minutes=60.0
    )
    run.run()
    names = [f"round-{number:06d}" for number in (1, 3, 5, 7)]
    assert run.checkpoints.names() == names
    position = run.loop.position
    assert (position.best, position.best_score, position.best_unit) == ("round-000003", 0.5, 3)
    assert torch.equal(run.checkpoints.load("round-000003").tensors["value"], torch.tensor([3.0]))


def test_the_best_is_the_first_of_equals_and_survives_pruning(tmp_path: Path) -> None:
    run = CountingRun(tmp_path, [0.0, 0.3, 0.9, 0.9, 0.1, 0.9, 0.2], 6, keep_last=1)
    run.run()
    assert run.checkpoints.names() == ["round-000002", "round-000006"]
    assert run.loop.position.best_unit == 2


@pytest.mark.parametrize("every", [1, 2])
def test_patience_is_counted_in_evaluations(tmp_path: Path, every: int) -> None:
    scores = [0.0, 0.1, 0.5, *[0.4] * 20]
    run = CountingRun(tmp_path, scores, 20, early_stopping=3, evaluate_every=every)
    run.run()
    assert run.loop.position.done == 2 + 3 * every
    assert run.loop.finished
    again = CountingRun(tmp_path, scores, 20, early_stopping=3, evaluate_every=every)
    again.run()  # a session after the end has nothing to do
    assert again.loop.position.done == 2 + 3 * every
    assert len(again.records()) == 2 + 3 * every


@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_unit_interrupted_while_evaluating_is_finished_by_the_next_session(
    tmp_path: Path, at: int
) -> None:
    scores = [0.0, 0.4, 0.2, 0.6, 0.1, 0.3, 0.5]
    whole = CountingRun(tmp_path / "whole", scores, 6, checkpoint_every=3)
    whole.run()
    cut = CountingRun(tmp_path / "cut", scores, 6, checkpoint_every=3)
    cut.evaluator.stop_at = at + 1
    with pytest.raises(Interrupted):
        cut.run()
    assert cut.checkpoints.names()[-1] == f"round-{at:06d}-trained"
    assert len(cut.records()) == at  # nothing of the unit is on record yet
    again = CountingRun(tmp_path / "cut", scores, 6, checkpoint_every=3)
    again.run()
    assert again.folder.journal("metrics").path.read_bytes() == (
        whole.folder.journal("metrics").path.read_bytes()
    )
    assert torch.equal(again.counter.value, torch.tensor([6.0]))
    assert again.loop.position.best_unit == whole.loop.position.best_unit == 3


def test_what_a_killed_session_did_after_its_last_checkpoint_is_done_again(tmp_path: Path) -> None:
    scores = [0.1] * 9
    killed = CountingRun(tmp_path, scores, 8, checkpoint_every=3, checkpoint_minutes=60.0)
    killed.run(most=5)  # rounds 4 and 5 are in no checkpoint
    assert len(killed.records()) == 5
    again = CountingRun(tmp_path, scores, 8, checkpoint_every=3, checkpoint_minutes=60.0)
    again.run()
    assert [record["round"] for record in again.records()] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert torch.equal(again.counter.value, torch.tensor([8.0]))


def test_a_run_of_nothing_has_a_unit_zero(tmp_path: Path) -> None:
    run = CountingRun(tmp_path, [0.25], 0)
    run.run()
    assert run.loop.finished
    (record,) = run.records()
    assert record == {"round": 0, "validation": {"loss": 1.0, "top1": 0.25, "top5": 1.0},
                      "more": 0.25}  # fmt: skip
    CountingRun(tmp_path, [0.25], 0).run()
    assert len(run.records()) == 1


def test_without_validation_nothing_is_best(tmp_path: Path) -> None:
    run = CountingRun(tmp_path, None, 3)
    run.run()
    assert run.loop.position.best is None
    assert not any("validation" in record for record in run.records())


def test_a_central_run_counts_epochs(tmp_path: Path) -> None:
    run = CountingRun(tmp_path, [0.1] * 4, 2, unit="epoch")
    run.run()
    assert [record["epoch"] for record in run.records()] == [1, 2]
    assert run.checkpoints.names() == ["epoch-000001", "epoch-000002"]
