"""Evaluation of a model on examples: loss, top-1, top-5 and per-class accuracy; predictions."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fedlens.data.examples import Examples, in_order
from fedlens.errors import FedlensError
from fedlens.training.precision import Precision
from fedlens.training.step import Model


class NotFinite(FedlensError):
    """The loss on the evaluated examples is infinite or not a number."""


@dataclass(frozen=True)
class Evaluation:
    loss: float
    top1: float
    top5: float
    per_class: list[float | None]  # None where a class has no example
    count: int

    def metrics(self) -> dict[str, float]:
        """The scalars, without the accuracy of each class."""
        return {"loss": self.loss, "top1": self.top1, "top5": self.top5}


@torch.inference_mode()
def evaluate(
    model: Model,
    examples: Examples,
    *,
    classes: int,
    batch_size: int,
    precision: Precision,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    loss, top5 = 0.0, 0
    hits, totals = torch.zeros(classes), torch.zeros(classes)
    done = 0
    for index in in_order(len(examples), batch_size):
        inputs = examples.batch(index)
        labels = examples.labels[index].to(inputs.device)
        with precision.autocast():
            logits = model(inputs).float()
        loss += float(F.cross_entropy(logits, labels, reduction="sum"))
        ranked = logits.topk(min(5, classes), dim=1).indices == labels[:, None]
        top5 += int(ranked.sum())
        first = ranked[:, 0].cpu().float()
        hits.index_add_(0, labels.cpu(), first)
        totals += torch.bincount(labels.cpu(), minlength=classes)
        done += len(index)
        if progress:
            progress(done, len(examples))
    if not math.isfinite(loss):
        raise NotFinite(
            f"The loss on the evaluated examples is {loss}, so training diverged: lower the "
            "learning rate, or clip the gradients' norm."
        )
    return Evaluation(
        loss=loss / done,
        top1=float(hits.sum()) / done,
        top5=top5 / done,
        per_class=[
            float(hit / total) if total else None for hit, total in zip(hits, totals, strict=True)
        ],
        count=done,
    )


@torch.inference_mode()
def predictions(
    model: Model,
    examples: Examples,
    index: torch.Tensor,
    *,
    batch_size: int,
    precision: Precision,
) -> torch.Tensor:
    """The most likely class of every example at `index`, on the CPU."""
    labels = []
    for part in torch.split(index, batch_size):
        with precision.autocast():
            labels.append(model(examples.batch(part)).argmax(1).cpu())
    return torch.cat(labels)
