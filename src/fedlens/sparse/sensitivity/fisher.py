"""Diagonal Fisher sensitivity of every weight: F_w = E_x E_{y∼p(·|x)} (∂t_y(x)/∂w)², per example.

With t = log p it is the Fisher information's diagonal (Martens, 2020, arXiv:1412.1193); with t the
raw logit of y it is the score of TaLoS (Iurada et al., ICLR 2025). Sums of clients add up.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fedlens import params, rng
from fedlens.data.examples import Examples
from fedlens.errors import FedlensError, suggest
from fedlens.sparse.sensitivity.per_example_gradients import SquaredGradients

Weighted = list[tuple[torch.Tensor, torch.Tensor]]  # classes [B], and weights of their targets [B]


@dataclass(frozen=True)
class Sensitivity:
    """Sums are float64 on the CPU, so that those of many clients add up without loss."""

    sums: dict[str, torch.Tensor]  # Σ over examples and passes of squared gradients
    count: int  # examples × passes

    def __add__(self, other: "Sensitivity") -> "Sensitivity":
        if fault := params.mismatch(self.sums, other.sums):
            raise ValueError(fault)
        sums = {name: value + other.sums[name] for name, value in self.sums.items()}
        return Sensitivity(sums, self.count + other.count)

    def mean(self) -> dict[str, torch.Tensor]:
        return {name: value / self.count for name, value in self.sums.items()}


def _drawn(p: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The class whose interval of the cumulative probabilities contains the uniform number."""
    reached = p.cumsum(1)
    below = reached <= uniform[:, None] * reached[:, -1:]
    return below.sum(1).clamp_(max=p.shape[1] - 1)


LABELS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Weighted]] = {
    # One draw from the model's own softmax: the true Fisher.
    "sampled": lambda p, truth, uniform: [(_drawn(p, uniform), torch.ones(len(p)))],
    # The examples' own labels: the empirical Fisher.
    "data": lambda p, truth, uniform: [(truth, torch.ones(len(p)))],
    # The exact expectation: a target times √p has its squared gradient times p.
    "expected": lambda p, truth, uniform: [
        (torch.full((len(p),), c), p[:, c].sqrt()) for c in range(p.shape[1])
    ],
}
TARGETS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "logit": lambda logits: logits,
    "log_prob": lambda logits: F.log_softmax(logits, 1),
}


def sensitivity(
    squares: SquaredGradients,
    examples: Examples,
    *,
    index: torch.Tensor | None = None,
    labels: str = "sampled",
    target: str = "logit",
    passes: int = 1,
    stream: rng.Stream,
    micro_batch: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> Sensitivity:
    """Sensitivity of the parameters of `squares` over the examples at `index` (all if None).

    The classes drawn depend only on the stream, the pass and the position in `index`: the size of
    micro-batches changes rounding only. `progress` is called with the number of examples done and
    the number in all.
    """
    if labels not in LABELS:
        raise FedlensError(f"There is no label rule '{labels}': {suggest(labels, LABELS)}")
    if target not in TARGETS:
        raise FedlensError(f"There is no target '{target}': {suggest(target, TARGETS)}")
    if index is None:
        index = torch.arange(len(examples))
    if not len(index) or passes < 1:
        raise ValueError("sensitivity needs at least one example and one pass")
    truth = examples.labels.cpu()[index.cpu()]
    uniform = torch.stack(
        [
            torch.rand(len(index), generator=stream.draw("fisher", number), dtype=torch.float64)
            for number in range(passes)
        ]
    )
    squares.clear()
    for start in range(0, len(index), micro_batch):
        part = slice(start, start + micro_batch)

        def targets(logits: torch.Tensor, part: slice = part) -> list[torch.Tensor]:
            scores = TARGETS[target](logits)
            p = logits.detach().cpu().double().softmax(1)
            return [
                scores.gather(1, classes[:, None].to(scores.device))[:, 0]
                * weights.to(scores.dtype).to(scores.device)
                for drawn in uniform
                for classes, weights in LABELS[labels](p, truth[part], drawn[part])
            ]

        squares.add(examples.batch(index[part]), targets)
        if progress is not None:
            progress(min(start + micro_batch, len(index)), len(index))
    sums = {name: total.cpu().double() for name, total in squares.sums.items()}
    for name, total in sums.items():
        if not total.isfinite().all():
            raise FedlensError(
                f"The sensitivity of {name} is not finite: check the model's weights and inputs."
            )
    return Sensitivity(sums, len(index) * passes)
