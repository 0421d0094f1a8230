"""What central and federated training do between two epochs or rounds: record, evaluate, save.

Nothing is written before the last point at which a stop request can come through; a unit whose
closing was interrupted is kept in the checkpoint and closed by the next session.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch

from fedlens.config.schema import Config, unit
from fedlens.experiments.evaluation import Measure
from fedlens.store.checkpoints import Checkpoint
from fedlens.store.ledger import Ledger
from fedlens.store.tracking import Tracker
from fedlens.training.evaluate import Evaluation
from fedlens.training.step import Tally

log = logging.getLogger(__name__)

Watch = Callable[[int, float], None]  # (epoch or round, validation top-1); it may raise Abandoned


@dataclass
class Position:
    """Where training stands; all of it goes into the checkpoint."""

    done: int = 0  # epochs or rounds completed
    step: int = 0  # steps taken in the epoch under way
    tally: Tally = field(default_factory=Tally)  # of the epoch under way
    unit_seconds: float = 0.0  # spent training in it
    pending: dict[str, Any] | None = None  # the record of a unit that is trained but not closed
    begun: bool = False  # unit 0, the model before any step, is dealt with
    best: str | None = None  # the checkpoint with the highest validation accuracy
    best_score: float | None = None
    best_unit: int = 0
    stale: int = 0  # evaluations since then
    seconds: float = 0.0  # in all sessions


class Trainee(Protocol):
    """What learns: it knows all that must be remembered of it, besides the position."""

    def tensors(self) -> dict[str, torch.Tensor]: ...

    def state(self, checkpoint: str) -> dict[str, Any]:
        """What is not a tensor, as JSON; `checkpoint` is the name of the one it goes into."""
        ...

    def put_back(self, found: Checkpoint) -> None: ...


class Loop:
    def __init__(
        self,
        config: Config,
        measure: Measure,
        ledger: Ledger,
        tracker: Tracker,
        *,
        total: int,
        began: float,
        remarks: Callable[[Evaluation], dict[str, Any]] = lambda found: {},
        watch: Watch | None = None,
    ) -> None:
        """`began` is when this session's clock did; `remarks` go into a record with validation.

        `watch` is told of every validation once the unit is closed; a resumed run tells it anew of
        those before, so that it sees the whole curve.
        """
        self.config = config
        self.measure = measure
        self.ledger = ledger
        self.tracker = tracker
        self.unit = unit(config)
        self.total = total
        self.clock = began
        self.remarks = remarks
        self.watch = watch
        self.position = Position()
        self.test_curve: Callable[[int], None] | None = None
        if config.evaluate.test_curve:
            self.test_curve = measure.test_curve(lambda found: ledger.record("test_curve", found))

    def restore(self, trainee: Trainee) -> None:
        """Goes back to the newest checkpoint, if there is one."""
        found = self.ledger.restore()
        if found is None:
            return
        trainee.put_back(found)
        stored = found.state["position"]
        self.position = Position(**{**stored, "tally": Tally(**stored["tally"])})
        log.info("resuming from checkpoint %s", found.name)
        for record in self.ledger.folder.journal("metrics").read() if self.watch else []:
            self._tell(record)
        if self.position.pending:
            self.close(trainee, **self.position.pending)

    def open(self, trainee: Trainee, *, prepared: bool) -> None:
        """Unit 0: the model before any step, where there is something to say of it."""
        if not self.position.begun and (prepared or not self.total):
            self.close(trainee, {}, {})

    @property
    def finished(self) -> bool:
        return self.position.done >= self.total or self._exhausted()

    def close(self, trainee: Trainee, record: dict[str, Any], timing: dict[str, float]) -> None:
        """Ends a unit: evaluate, record, and save if it is time to."""
        position, began = self.position, time.monotonic()
        position.pending = {"record": record, "timing": timing}
        number = position.done + 1 if record else 0  # unit 0 has nothing to record but itself
        record = {self.unit: number, **record}
        score, better = None, False
        if number == self.total or number % self.config.evaluate.every == 0:
            validation = self.measure.validation() if number else self.measure.before_training()
            if self.test_curve:
                self.test_curve(number)
            if validation:
                record |= {"validation": validation.metrics(), **self.remarks(validation)}
                score = validation.top1
                better = position.best_score is None or score > position.best_score
        evaluating = {"evaluate_seconds": time.monotonic() - began}
        self.ledger.record("metrics", record)
        self.ledger.record("timings", {self.unit: number, **timing, **evaluating})
        self.tracker.log(number, _scalars(record))
        position.done, position.step, position.begun, position.pending = number, 0, True, None
        position.tally, position.unit_seconds = Tally(), 0.0
        if better:
            position.best, position.best_score, position.best_unit = self._name(), score, number
        position.stale = 0 if better else position.stale + (score is not None)
        if self.unit == "epoch" or score is not None:
            log.info("%s%s", self._sentence(record), " (best so far)" if better else "")
        ranks = score is not None and self.ledger.checkpoints.ranks(score)
        if self.finished or ranks or number % self.config.checkpoint.every == 0 or self.due:
            self.save(trainee, score=score)
        self._tell(record)

    @property
    def due(self) -> bool:
        """Whether more than checkpoint.minutes have passed since the last save."""
        return time.monotonic() - self.clock > 60 * self.config.checkpoint.minutes

    def save(self, trainee: Trainee, *, score: float | None = None) -> None:
        now = time.monotonic()
        self.position.seconds += now - self.clock
        self.clock = now
        name = self._name()
        self.ledger.save(
            name,
            trainee.tensors(),
            {**trainee.state(name), "position": asdict(self.position)},
            score=score,
            best=self.position.best,
        )

    def leave(self, trainee: Trainee) -> None:
        """Saves where training was interrupted, unless that very position is saved already."""
        if self._name() not in self.ledger.checkpoints.names():
            self.save(trainee)

    def _tell(self, record: dict[str, Any]) -> None:
        if self.watch and (found := record.get("validation")):
            self.watch(record[self.unit], found["top1"])

    def _name(self) -> str:
        position = self.position
        step = f"-step-{position.step:06d}" if position.step else ""
        return f"{self.unit}-{position.done:06d}{step}" + ("-trained" if position.pending else "")

    def _exhausted(self) -> bool:
        patience = self.config.train.early_stopping
        return patience is not None and self.position.stale >= patience

    def _sentence(self, record: dict[str, Any]) -> str:
        words = [f"{self.unit} {record[self.unit]} of {self.total}"]
        if train := record.get("train"):
            words.append(f"training loss {train['loss']:.3f}, accuracy {train['accuracy']:.2%}")
        if found := record.get("validation"):
            words.append(f"validation loss {found['loss']:.3f}, accuracy {found['top1']:.2%}")
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
