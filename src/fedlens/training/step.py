"""The one training step of central training and of every client: θ ← optimizer(θ, ∇L(θ; batch)).

Augmentation and dropout are drawn by seed and step, so any range of steps can be repeated.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fedlens.data.examples import Examples
from fedlens.errors import FedlensError
from fedlens.rng import Stream
from fedlens.training.precision import Precision

# A module, or a compiled one: inputs → logits; with dropout before the head, (inputs, keep) →
# logits, where features are multiplied by `keep`.
Model = Callable[..., torch.Tensor]
Adjust = Callable[[], None]  # changes the gradients before the optimizer's step


class Diverged(FedlensError):
    """The loss is infinite or not a number."""

    def __init__(self, loss: float, step: int) -> None:
        super().__init__(
            f"The loss became {loss} at step {step}: lower the learning rate, or clip the "
            "gradients' norm."
        )


@dataclass(frozen=True)
class StepSettings:
    """How every step is taken."""

    precision: Precision
    label_smoothing: float = 0.0
    dropout: float = 0.0  # on the features before the head; needs a model that takes `keep`
    clip_norm: float | None = None
    micro_batch: int | None = None


@dataclass
class Tally:
    """Sums over steps; they add up, and a JSON round trip keeps every bit."""

    loss: float = 0.0
    correct: int = 0
    seen: int = 0

    def __iadd__(self, other: "Tally") -> "Tally":
        self.loss += other.loss
        self.correct += other.correct
        self.seen += other.seen
        return self

    def metrics(self) -> dict[str, float]:
        return {"loss": self.loss / self.seen, "accuracy": self.correct / self.seen}


def local_step(
    model: Model,
    optimizer: torch.optim.Optimizer,
    examples: Examples,
    index: torch.Tensor,
    settings: StepSettings,
    tally: Tally,
    *,
    stream: Stream,
    step: int,
    width: int | None = None,
    adjust: Adjust | None = None,
) -> None:
    """Trains on the examples at `index` and adds their loss and accuracy to the tally.

    `step` numbers the draws of augmentation and dropout. `width` is the dimension of the features
    before the head; only dropout needs it.
    """
    inputs = examples.batch(index, stream.draw("augment", step))
    labels = examples.labels[index].to(inputs.device)
    keep = None
    if settings.dropout:
        if width is None:
            raise ValueError("dropout needs the width of the features before the head")
        keep = dropout_mask(len(index), width, settings.dropout, stream.draw("dropout", step))
        keep = keep.to(inputs.device)
    loss, correct = train_step(model, optimizer, inputs, labels, settings, keep, adjust)
    if not math.isfinite(loss):
        raise Diverged(loss, step)
    tally.loss += loss
    tally.correct += correct
    tally.seen += len(index)


def _check_range(labels: torch.Tensor, logits: torch.Tensor) -> None:
    """Refuses a label that is no output's number; only on the CPU, where looking costs nothing."""
    if labels.device.type == "cpu" and len(labels) and int(labels.max()) >= logits.shape[1]:
        raise FedlensError(
            f"The label {int(labels.max())} is out of range: the model has {logits.shape[1]} "
            f"outputs, so labels go from 0 to {logits.shape[1] - 1}."
        )


def train_step(
    model: Model,
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    settings: StepSettings,
    keep: torch.Tensor | None = None,
    adjust: Adjust | None = None,
) -> tuple[float, int]:
    """One optimizer step; returns the batch's summed loss and the number of correct predictions.

    Micro-batches give the same update as the whole batch: each loss is divided by the batch size.
    """
    count = len(labels)
    size = settings.micro_batch or count
    scaler = settings.precision.scaler
    losses, hits = [], []
    optimizer.zero_grad(set_to_none=True)
    for start in range(0, count, size):
        part = slice(start, start + size)
        with settings.precision.autocast():
            logits = model(inputs[part]) if keep is None else model(inputs[part], keep[part])
        _check_range(labels[part], logits)
        loss = F.cross_entropy(
            logits if logits.dtype == torch.float64 else logits.float(),  # never less than float32
            labels[part],
            label_smoothing=settings.label_smoothing,
            reduction="sum",
        )
        mean = loss / count
        torch.autograd.backward(scaler.scale(mean) if scaler else mean)
        losses.append(loss.detach())
        hits.append((logits.detach().argmax(1) == labels[part]).sum())
    if scaler:
        scaler.unscale_(optimizer)
    if adjust:
        adjust()
    if settings.clip_norm is not None:
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(trained, settings.clip_norm)
    if scaler:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    return sum(float(loss) for loss in losses), sum(int(hit) for hit in hits)


def dropout_mask(count: int, width: int, rate: float, draw: torch.Generator) -> torch.Tensor:
    """0 with probability `rate`, else 1/(1 − rate)."""
    kept = torch.rand(count, width, generator=draw) >= rate
    return kept.float() / (1 - rate)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
