"""Central training: epochs of SGDM on pooled data, as one visible loop.

Everything random is addressed by (seed, epoch, step), so a checkpoint holds only parameters,
momentum and counters, and may be taken after any step.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from fedlens.data.batches import shuffled
from fedlens.experiments import snapshot
from fedlens.experiments.build import Parts
from fedlens.experiments.config import Config
from fedlens.experiments.ledger import Ledger
from fedlens.experiments.measure import Measure
from fedlens.experiments.progress import bar
from fedlens.experiments.signals import Interrupted, StopRequest
from fedlens.experiments.tracking import Tracker
from fedlens.rng import Stream
from fedlens.training.local import Model, StepRules, Tally, local_step, set_lr

log = logging.getLogger(__name__)


@dataclass
class Position:
    """Where training stands; all of it goes into the checkpoint."""

    epoch: int = 0  # epochs completed
    step: int = 0  # steps taken in the one under way
    tally: Tally = field(default_factory=Tally)  # of the one under way
    epoch_seconds: float = 0.0  # spent training in it
    begun: bool = False  # epoch 0, the model before any step, is dealt with
    best: str | None = None  # the checkpoint with the highest validation accuracy
    best_score: float | None = None
    best_epoch: int = 0
    stale: int = 0  # evaluations since then
    seconds: float = 0.0  # in all sessions

    @property
    def name(self) -> str:
        return f"epoch-{self.epoch:04d}" + (f"-step-{self.step:06d}" if self.step else "")


class Central:
    """One central run: `run` is the loop, the rest are its parts in the order they are used."""

    def __init__(
        self,
        config: Config,
        parts: Parts,
        model: Model,
        measure: Measure,
        ledger: Ledger,
        tracker: Tracker,
        stop: StopRequest,
        began: float,
    ) -> None:
        """`model` is `parts.model`, perhaps compiled; `began` is when this session's clock did."""
        self.settings = config.train
        self.config = config
        self.parts = parts
        self.model = model
        self.measure = measure
        self.ledger = ledger
        self.tracker = tracker
        self.stop = stop
        self.optimizer = self._optimizer()
        self.epochs = self.settings.epochs if self.optimizer else 0
        self.epoch_length = -(-len(parts.train) // self.settings.batch_size)
        self.test_curve: Callable[[int], None] | None = None
        if config.evaluate.test_curve:
            self.test_curve = measure.test_curve(lambda found: ledger.record("test_curve", found))
        self.position = Position()
        self.clock = began

    def run(self) -> Position:
        """Trains to the end, or raises `Interrupted` once it has saved where it stopped."""
        self._restore()
        try:
            if not self.position.begun and (self.parts.closed_form or not self.epochs):
                self._close({"epoch": 0})
            while self.position.epoch < self.epochs and not self._exhausted():
                lr = self._train_epoch()
                done = self.position.tally.metrics()
                self._close({"epoch": self.position.epoch + 1, "lr": lr, "train": done})
        except Interrupted:
            self._save()
            raise
        return self.position

    def _optimizer(self) -> torch.optim.Optimizer | None:
        trained = [p for p in self.parts.model.parameters() if p.requires_grad]
        if not trained:
            return None
        return torch.optim.SGD(
            trained,
            lr=self.settings.lr,
            momentum=self.settings.momentum,
            weight_decay=self.settings.weight_decay,
            nesterov=self.settings.nesterov,
        )

    def _restore(self) -> None:
        found = self.ledger.restore()
        if found is None:
            return
        snapshot.put_back(found.tensors, self.parts.model, self.optimizer)
        stored = found.state["position"]
        self.position = Position(**{**stored, "tally": Tally(**stored["tally"])})
        if self.parts.precision.scaler and found.state["scaler"]:
            self.parts.precision.scaler.load_state_dict(found.state["scaler"])
        log.info("resuming from checkpoint %s", found.name)

    def _train_epoch(self) -> float:
        """The rest of the epoch under way; returns its last learning rate."""
        position, settings, optimizer = self.position, self.settings, self.optimizer
        assert optimizer is not None
        rules = StepRules(
            precision=self.parts.precision,
            label_smoothing=settings.label_smoothing,
            dropout=self.config.head.dropout,
            clip_norm=settings.clip_norm,
            micro_batch=settings.micro_batch,
        )
        total = self.epochs * self.epoch_length
        stream = Stream(self.config.seed, ("central", position.epoch))
        batches = shuffled(len(self.parts.train), settings.batch_size, stream.draw("order"))
        with bar(f"epoch {position.epoch + 1} of {self.epochs}", self.stop) as update:
            for index in batches[position.step :]:
                began = time.monotonic()
                done = position.epoch * self.epoch_length + position.step
                set_lr(optimizer, settings.lr * settings.schedule.factor(done, total))
                local_step(
                    self.model, optimizer, self.parts.train, index, rules, position.tally,
                    stream=stream, step=position.step, width=self.parts.model.head.in_features,
                )  # fmt: skip
                position.step += 1
                position.epoch_seconds += time.monotonic() - began
                update(position.step, self.epoch_length)
                if time.monotonic() - self.clock > 60 * self.config.checkpoint.minutes:
                    self._save()
        done = (position.epoch + 1) * self.epoch_length - 1
        return settings.lr * settings.schedule.factor(done, total)

    def _close(self, record: dict[str, Any]) -> None:
        """Ends an epoch: evaluate, record, and save if it is time to.

        Nothing is written before the last point at which a stop request can come through.
        """
        position, number, began = self.position, record["epoch"], time.monotonic()
        score, better = None, False
        if number == self.epochs or number % self.config.evaluate.every == 0:
            validation = self.measure.validation()
            if self.test_curve:
                self.test_curve(number)
            if validation:
                record["validation"] = validation.metrics()
                score = validation.top1
                better = position.best_score is None or score > position.best_score
        self.ledger.record("metrics", record)
        self.ledger.record("timings", self._timing(number, time.monotonic() - began))
        self.tracker.log(number, _scalars(record))
        position.epoch, position.step, position.begun = number, 0, True
        position.tally, position.epoch_seconds = Tally(), 0.0
        if better:
            position.best, position.best_score, position.best_epoch = position.name, score, number
        position.stale = 0 if better else position.stale + (score is not None)
        log.info("%s%s", _sentence(record, self.epochs), " (best so far)" if better else "")
        ended = number == self.epochs or self._exhausted()
        ranks = score is not None and self.ledger.checkpoints.ranks(score)
        if ended or ranks or number % self.config.checkpoint.every == 0:
            self._save(score=score)

    def _timing(self, number: int, closing: float) -> dict[str, float]:
        seconds, images = self.position.epoch_seconds, self.position.tally.seen
        rate = images / seconds if seconds else 0.0
        return {"epoch": number, "train_seconds": seconds, "evaluate_seconds": closing,
                "images_per_second": rate}  # fmt: skip

    def _exhausted(self) -> bool:
        patience = self.settings.early_stopping
        return patience is not None and self.position.stale >= patience

    def _save(self, *, score: float | None = None) -> None:
        now = time.monotonic()
        self.position.seconds += now - self.clock
        self.clock = now
        scaler = self.parts.precision.scaler
        self.ledger.save(
            self.position.name,
            snapshot.take(self.parts.model, self.optimizer),
            {"position": asdict(self.position), "scaler": scaler.state_dict() if scaler else None},
            score=score,
            best=self.position.best,
        )


def _scalars(record: dict[str, Any]) -> dict[str, float]:
    """{'train': {'loss': 1}} → {'train/loss': 1}"""
    flat = {"lr": record["lr"]} if "lr" in record else {}
    for part in ("train", "validation"):
        flat |= {f"{part}/{name}": value for name, value in record.get(part, {}).items()}
    return flat


def _sentence(record: dict[str, Any], epochs: int) -> str:
    words = [f"epoch {record['epoch']} of {epochs}"]
    if train := record.get("train"):
        words.append(f"training loss {train['loss']:.3f}, accuracy {train['accuracy']:.2%}")
    if found := record.get("validation"):
        words.append(f"validation loss {found['loss']:.3f}, accuracy {found['top1']:.2%}")
    return " | ".join(words)
