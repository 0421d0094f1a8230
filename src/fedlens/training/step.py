"""The one training step, shared by central training and every client: θ ← SGDM(θ, ∇L(θ; batch)).

Order, augmentation and dropout are addressed draws, so any stretch of steps can be run again.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fedlens.data.images import Examples
from fedlens.errors import FedlensError
from fedlens.rng import Stream
from fedlens.training.precision import Precision

Model = Callable[..., torch.Tensor]  # a Classifier, or one compiled


Adjust = Callable[[], None]  # changes the gradients of a step before it is taken


class Diverged(FedlensError):
    """The loss is no longer a number."""

    def __init__(self, loss: float, step: int) -> None:
        super().__init__(
            f"The loss became {loss} at step {step}: lower train.lr, or set train.clip_norm; the "
            "checkpoints written before are intact."
        )


@dataclass(frozen=True)
class StepRules:
    """How a step is taken, whatever the batch."""

    precision: Precision
    label_smoothing: float = 0.0
    dropout: float = 0.0  # before the head
    clip_norm: float | None = None
    micro_batch: int | None = None


@dataclass
class Tally:
    """Sums over steps; they add, and a JSON round trip keeps every bit."""

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
    rules: StepRules,
    tally: Tally,
    *,
    stream: Stream,
    step: int,
    width: int,
    adjust: Adjust | None = None,
) -> None:
    """Step `step` of a stretch: draw the batch at `index`, train on it, add to the tally.

    `width` is the dimension of the features before the head, where dropout acts.
    """
    inputs = examples.batch(index, stream.draw("augment", step))
    labels = examples.labels[index].to(inputs.device)
    keep = None
    if rules.dropout:
        keep = dropout_mask(len(index), width, rules.dropout, stream.draw("dropout", step))
        keep = keep.to(inputs.device)
    loss, correct = train_step(model, optimizer, inputs, labels, rules, keep, adjust)
    if not math.isfinite(loss):
        raise Diverged(loss, step)
    tally.loss += loss
    tally.correct += correct
    tally.seen += len(index)


def train_step(
    model: Model,
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    rules: StepRules,
    keep: torch.Tensor | None = None,
    adjust: Adjust | None = None,
) -> tuple[float, int]:
    """One optimizer step; returns the batch's summed loss and number correct.

    Micro-batches give the same update as the whole batch: each loss is divided by the whole size.
    """
    count = len(labels)
    size = rules.micro_batch or count
    scaler = rules.precision.scaler
    losses, hits = [], []
    optimizer.zero_grad(set_to_none=True)
    for start in range(0, count, size):
        part = slice(start, start + size)
        with rules.precision.autocast():
            logits = model(inputs[part], None if keep is None else keep[part])
        loss = F.cross_entropy(
            logits.float(), labels[part], label_smoothing=rules.label_smoothing, reduction="sum"
        )
        mean = loss / count
        torch.autograd.backward(scaler.scale(mean) if scaler else mean)
        losses.append(loss.detach())
        hits.append((logits.detach().argmax(1) == labels[part]).sum())
    if scaler:
        scaler.unscale_(optimizer)
    if adjust:
        adjust()
    if rules.clip_norm is not None:
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(trained, rules.clip_norm)
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
