"""What central and federated training do between two epochs or rounds: record, evaluate, save.

A unit is an epoch or a round. Nothing is written before the last point at which a stop request can
arrive; a unit that was trained but not yet evaluated is kept in the checkpoint and finished later.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from fedlens.experiments.loops.evaluation import Evaluator
from fedlens.store.checkpoints import Checkpoint, Journals
from fedlens.store.hashes import Hashes
from fedlens.store.tracking import Tracker
from fedlens.training.evaluate import Evaluation
from fedlens.training.step import Tally

log = logging.getLogger(__name__)

Watch = Callable[[int, float], None]  # (epoch or round, validation top-1); it may raise Abandoned


@dataclass(frozen=True)
class LoopSettings:
    unit: str  # "epoch" or "round"
    evaluate_every: int = 1  # units
    checkpoint_every: int = 1  # units
    checkpoint_minutes: float = 10.0
    early_stopping: int | None = None  # evaluations without a better validation accuracy
    test_curve: bool = False


@dataclass
class Position:
    """Where training stands; all of it goes into the checkpoint."""

    done: int = 0  # epochs or rounds completed
    step: int = 0  # steps taken in the epoch under way
    tally: Tally = field(default_factory=Tally)  # of the epoch under way
    unit_seconds: float = 0.0  # spent training in it
    pending: dict[str, Any] | None = None  # the record of a unit that is trained, not finished
    begun: bool = False  # unit 0, the model before any step, is recorded
    best: str | None = None  # the checkpoint with the highest validation accuracy
    best_score: float | None = None
    best_unit: int = 0
    stale: int = 0  # evaluations since then
    seconds: float = 0.0  # in all sessions


class Trainable(Protocol):
    """What is trained: its tensors and state, with the position, make a checkpoint."""

    def tensors(self) -> dict[str, torch.Tensor]: ...

    def state(self, checkpoint: str) -> dict[str, Any]:
        """What is not a tensor, as JSON, for the checkpoint of that name."""
        ...

    def files(self) -> Hashes:
        """The files of the run that the state refers to; `state` has written them."""
        ...

    def load_state(self, checkpoint: Checkpoint) -> None: ...


class Loop:
    def __init__(
        self,
        settings: LoopSettings,
        evaluator: Evaluator,
        journals: Journals,
        tracker: Tracker,
        *,
        total: int,
        began: float,
        more_metrics: Callable[[Evaluation], dict[str, Any]] = lambda evaluation: {},
        watch: Watch | None = None,
    ) -> None:
        """`total` units are trained; `began` is when this process's clock started.

        `more_metrics` are recorded with every validation. `watch` is called after every validation;
        a resumed run calls it again for those before, so that it sees the whole curve.
        """
        self.settings = settings
        self.evaluator = evaluator
        self.journals = journals
        self.tracker = tracker
        self.unit = settings.unit
        self.total = total
        self.clock = began
        self.more_metrics = more_metrics
        self.watch = watch
        self.position = Position()
        self.test_curve: Callable[[int], None] | None = None
        if settings.test_curve:
            self.test_curve = evaluator.test_curve(partial(journals.record, "test_curve"))

    def restore(self, trainable: Trainable) -> None:
        """Goes back to the newest checkpoint, if there is one."""
        checkpoint = self.journals.restore()
        if checkpoint is None:
            return
        trainable.load_state(checkpoint)
        stored = checkpoint.state["position"]
        self.position = Position(**{**stored, "tally": Tally(**stored["tally"])})
        log.info("resuming from checkpoint %s", checkpoint.name)
        for record in self.journals.folder.journal("metrics").read() if self.watch else []:
            self._notify(record)
        if self.position.pending:
            self.finish_unit(trainable, **self.position.pending)

    def evaluate_start(self, trainable: Trainable, *, head_is_fitted: bool) -> None:
        """Unit 0: the model before any step, where its head already classifies."""
        if not self.position.begun and (head_is_fitted or not self.total):
            self.finish_unit(trainable, {}, {})

    @property
    def finished(self) -> bool:
        return self.position.done >= self.total or self._exhausted()

    def finish_unit(
        self, trainable: Trainable, record: dict[str, Any], timing: dict[str, float]
    ) -> None:
        """Evaluates, records, and saves if it is time to."""
        position, began = self.position, time.monotonic()
        position.pending = {"record": record, "timing": timing}
        number = position.done + 1 if record else 0  # unit 0 has no record of training
        record = {self.unit: number, **record}
        score, better = None, False
        if number == self.total or number % self.settings.evaluate_every == 0:
            evaluate = self.evaluator.validation if number else self.evaluator.before_training
            validation = evaluate()
            if self.test_curve:
                self.test_curve(number)
            if validation:
                record |= {"validation": validation.metrics(), **self.more_metrics(validation)}
                score = validation.top1
                better = position.best_score is None or score > position.best_score
        evaluating = {"evaluate_seconds": time.monotonic() - began}
        self.journals.record("metrics", record)
        self.journals.record("timings", {self.unit: number, **timing, **evaluating})
        self.tracker.log(number, _scalars(record))
        position.done, position.step, position.begun, position.pending = number, 0, True, None
        position.tally, position.unit_seconds = Tally(), 0.0
        if better:
            position.best, position.best_score, position.best_unit = self._name(), score, number
        position.stale = 0 if better else position.stale + (score is not None)
        if self.unit == "epoch" or score is not None:
            log.info("%s%s", self._sentence(record), " (best so far)" if better else "")
        ranks = score is not None and self.journals.checkpoints.ranks(score)
        if self.finished or ranks or number % self.settings.checkpoint_every == 0 or self.due:
            self.save(trainable, score=score)
        self._notify(record)

    @property
    def due(self) -> bool:
        """Whether the last save is longer ago than `checkpoint_minutes`."""
        return time.monotonic() - self.clock > 60 * self.settings.checkpoint_minutes

    def save(self, trainable: Trainable, *, score: float | None = None) -> None:
        now = time.monotonic()
        self.position.seconds += now - self.clock
        self.clock = now
        name = self._name()
        self.journals.save(
            name,
            trainable.tensors(),
            {**trainable.state(name), "position": asdict(self.position)},
            score=score,
            best=self.position.best,
            files=trainable.files(),
        )

    def save_interrupted(self, trainable: Trainable) -> None:
        """Saves where training was interrupted, unless that very position is saved already."""
        if self._name() not in self.journals.checkpoints.names():
            self.save(trainable)

    def _notify(self, record: dict[str, Any]) -> None:
        if self.watch and (validation := record.get("validation")):
            self.watch(record[self.unit], validation["top1"])

    def _name(self) -> str:
        position = self.position
        step = f"-step-{position.step:06d}" if position.step else ""
        return f"{self.unit}-{position.done:06d}{step}" + ("-trained" if position.pending else "")

    def _exhausted(self) -> bool:
        patience = self.settings.early_stopping
        return patience is not None and self.position.stale >= patience

    def _sentence(self, record: dict[str, Any]) -> str:
        words = [f"{self.unit} {record[self.unit]} of {self.total}"]
        if train := record.get("train"):
            words.append(f"training loss {train['loss']:.3f}, accuracy {train['accuracy']:.2%}")
        if validation := record.get("validation"):
            loss, top1 = validation["loss"], validation["top1"]
            words.append(f"validation loss {loss:.3f}, accuracy {top1:.2%}")
        return " | ".join(words)


def _scalars(record: dict[str, Any]) -> dict[str, float]:
    """{'lr': 1, 'train': {'loss': 2}} → {'lr': 1, 'train/loss': 2}; lists are left out."""
    flat: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            flat |= {f"{name}/{key}": one for key, one in value.items() if _is_number(one)}
        elif _is_number(value):
            flat[name] = value
    return flat


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)
