"""Central training: epochs of SGDM on pooled data, as one visible loop.

Everything random is addressed by (seed, epoch, step), so a checkpoint holds only parameters,
momentum and counters, and may be taken after any step.
"""

import time
from typing import Any

import torch

from fedlens.config.schema import Config
from fedlens.data.examples import shuffled
from fedlens.experiments.build import Parts, step_rules
from fedlens.experiments.loop import Loop, Position
from fedlens.rng import Stream
from fedlens.runtime.progress import bar
from fedlens.runtime.stop import Interrupted, StopRequest
from fedlens.sparse.sparse_sgd import sgdm
from fedlens.store import model_state
from fedlens.store.checkpoints import Checkpoint
from fedlens.training.step import Model, local_step, set_lr


def epoch_length(config: Config, examples: int) -> int:
    """Steps of an epoch: until every example was seen, or as told if that is sooner."""
    whole = -(-examples // config.train.batch_size)
    return min(whole, config.train.epoch_steps or whole)


class Central:
    """One central run: `run` is the loop, the rest are its parts in the order they are used."""

    def __init__(
        self, config: Config, parts: Parts, model: Model, loop: Loop, stop: StopRequest
    ) -> None:
        """`model` is `parts.model`, perhaps compiled."""
        self.config = config
        self.parts = parts
        self.model = model
        self.loop = loop
        self.stop = stop
        self.optimizer = self._optimizer()
        self.epoch_length = epoch_length(config, len(parts.train))

    def run(self) -> Position:
        """Trains to the end, or raises `Interrupted` once it has saved where it stopped."""
        loop = self.loop
        try:
            loop.restore(self)
            loop.open(self, prepared=self.parts.prepared)
            while not loop.finished:
                lr = self._train_epoch()
                tally = loop.position.tally.metrics()
                record = {"lr": lr, "steps": self.epoch_length, "train": tally}
                loop.close(self, record, self._timing())
        except Interrupted:
            loop.leave(self)
            raise
        return loop.position

    def tensors(self) -> dict[str, torch.Tensor]:
        return model_state.take(self.parts.model, self.optimizer)

    def state(self, checkpoint: str) -> dict[str, Any]:
        del checkpoint
        scaler = self.parts.precision.scaler
        return {"scaler": scaler.state_dict() if scaler else None}

    def put_back(self, found: Checkpoint) -> None:
        model_state.put_back(found.tensors, self.parts.model, self.optimizer)
        if self.parts.precision.scaler and found.state["scaler"]:
            self.parts.precision.scaler.load_state_dict(found.state["scaler"])

    def _optimizer(self) -> torch.optim.Optimizer | None:
        settings = self.config.train
        if not self.parts.trains:
            return None
        return sgdm(
            self.parts.model.named_parameters(),
            self.parts.masks,
            lr=settings.lr,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
            nesterov=settings.nesterov,
        )

    @torch.no_grad()
    def _leave_frozen_out(self) -> None:
        """Of the gradients, so that clipping sees the trained weights alone."""
        for name, mask in self.parts.masks.items():
            gradient = self.parts.model.get_parameter(name).grad
            if gradient is not None:
                gradient.masked_fill_(~mask.to(gradient.device), 0)

    def _train_epoch(self) -> float:
        """The rest of the epoch under way; returns its last learning rate."""
        position, settings, optimizer = self.loop.position, self.config.train, self.optimizer
        assert optimizer is not None
        rules = step_rules(self.config, self.parts.precision)
        total = self.loop.total * self.epoch_length
        adjust = self._leave_frozen_out if self.parts.masks and settings.clip_norm else None
        stream = Stream(self.config.seed, ("central", position.done))
        batches = shuffled(len(self.parts.train), settings.batch_size, stream.draw("order"))
        with bar(f"epoch {position.done + 1} of {self.loop.total}", self.stop) as update:
            for index in batches[position.step : self.epoch_length]:
                began = time.monotonic()
                done = position.done * self.epoch_length + position.step
                set_lr(optimizer, settings.lr * settings.schedule.factor(done, total))
                local_step(
                    self.model, optimizer, self.parts.train, index, rules, position.tally,
                    stream=stream, step=position.step, width=self.parts.model.head.in_features,
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
