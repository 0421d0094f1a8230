"""Central training: epochs on pooled data, as one visible loop.

Everything random is addressed by (seed, epoch, step), so a checkpoint holds only parameters,
optimizer state and counters, and may be taken after any step.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch

from fedlens.data.examples import shuffled
from fedlens.experiments.build import Experiment
from fedlens.experiments.loops.loop import Loop, Position
from fedlens.models.architectures.batch_norm import updating
from fedlens.rng import Stream
from fedlens.runtime.progress import progress_bar
from fedlens.runtime.stop import Interrupted, StopRequest
from fedlens.store import model_state
from fedlens.store.checkpoints import Checkpoint
from fedlens.store.hashes import Hashes
from fedlens.training.optimizers import ClientOptimizer
from fedlens.training.schedules import Schedule
from fedlens.training.step import Model, StepSettings, local_step, set_lr


@dataclass(frozen=True)
class CentralSettings:
    lr: float
    schedule: Schedule
    batch_size: int
    steps_per_epoch: int | None  # None: as many as it takes to see every example once
    step: StepSettings
    optimizer: ClientOptimizer
    seed: int

    def epoch_length(self, examples: int) -> int:
        """Steps of an epoch: until every example was seen, or as many as are set."""
        whole = -(-examples // self.batch_size)
        return min(whole, self.steps_per_epoch or whole)


class CentralLoop:
    """One central run: `run` is the loop, the rest are its parts in the order they are used."""

    def __init__(
        self,
        settings: CentralSettings,
        experiment: Experiment,
        model: Model,
        loop: Loop,
        stop: StopRequest,
    ) -> None:
        """`model` is `experiment.model`, perhaps compiled."""
        self.settings = settings
        self.experiment = experiment
        self.model = model
        self.loop = loop
        self.stop = stop
        self.optimizer = self._optimizer()
        self.epoch_length = settings.epoch_length(len(experiment.train))

    def run(self) -> Position:
        """Trains to the end, or raises `Interrupted` once it has saved where it stopped."""
        loop = self.loop
        try:
            loop.restore(self)
            loop.evaluate_start(self, head_is_fitted=self.experiment.head_is_fitted)
            while not loop.finished:
                lr = self._train_epoch()
                tally = loop.position.tally.metrics()
                record = {"lr": lr, "steps": self.epoch_length, "train": tally}
                loop.finish_unit(self, record, self._timing())
        except Interrupted:
            loop.save_interrupted(self)
            raise
        return loop.position

    def tensors(self) -> dict[str, torch.Tensor]:
        return model_state.state_tensors(self.experiment.model, self.optimizer)

    def state(self, checkpoint: str) -> dict[str, Any]:
        del checkpoint
        scaler = self.experiment.precision.scaler
        return {"scaler": scaler.state_dict() if scaler else None}

    def files(self) -> Hashes:
        return {}

    def load_state(self, checkpoint: Checkpoint) -> None:
        model_state.load_state(checkpoint.tensors, self.experiment.model, self.optimizer)
        if self.experiment.precision.scaler and checkpoint.state["scaler"]:
            self.experiment.precision.scaler.load_state_dict(checkpoint.state["scaler"])

    def _optimizer(self) -> torch.optim.Optimizer | None:
        if not self.experiment.trains:
            return None
        named, masks = self.experiment.model.named_parameters(), self.experiment.masks
        return self.settings.optimizer.make(named, masks, lr=self.settings.lr)

    @torch.no_grad()
    def _zero_frozen_gradients(self) -> None:
        """So that clipping sees the gradients of trained weights alone."""
        for name, mask in self.experiment.masks.items():
            gradient = self.experiment.model.get_parameter(name).grad
            if gradient is not None:
                gradient.masked_fill_(~mask.to(gradient.device), 0)

    def _train_epoch(self) -> float:
        """The rest of the epoch under way; returns its last learning rate."""
        position, settings, optimizer = self.loop.position, self.settings, self.optimizer
        assert optimizer is not None
        experiment = self.experiment
        total = self.loop.total * self.epoch_length
        adjust = (
            self._zero_frozen_gradients
            if self.experiment.masks and settings.step.clip_norm
            else None
        )
        stream = Stream(settings.seed, ("central", position.done))
        batches = shuffled(len(self.experiment.train), settings.batch_size, stream.draw("order"))
        title = f"epoch {position.done + 1} of {self.loop.total}, steps"
        with (
            progress_bar(title, self.stop) as update,
            updating(experiment.model, experiment.model.batch_norm),
        ):
            for index in batches[position.step : self.epoch_length]:
                began = time.monotonic()
                done = position.done * self.epoch_length + position.step
                set_lr(optimizer, settings.lr * settings.schedule.factor(done, total))
                local_step(
                    self.model, optimizer, experiment.train, index, settings.step, position.tally,
                    stream=stream, step=position.step, width=experiment.model.head.in_features,
                    adjust=adjust,
                )  # fmt: skip
                position.step += 1
                position.unit_seconds += time.monotonic() - began
                update(position.step, self.epoch_length)
                if self.loop.due:
                    self.loop.save(self)
        done = (position.done + 1) * self.epoch_length - 1
        return settings.lr * settings.schedule.factor(done, total)

    def _timing(self) -> dict[str, float]:
        seconds, images = self.loop.position.unit_seconds, self.loop.position.tally.seen
        rate = images / seconds if seconds else 0.0
        return {"train_seconds": seconds, "images_per_second": rate}
