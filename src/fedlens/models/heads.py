"""Linear heads, most of them in closed form from statistics that add up over clients.

Ridge with a free intercept: W = (S + λI)⁻¹ Xᵀ(Y − ȳ) and b = ȳ − W x̄, where S = Xᵀ(X − x̄).
Hoerl & Kennard, 1970; federated: Fanì et al., 2024, https://arxiv.org/abs/2406.01116.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from scipy.optimize import minimize_scalar
from torch import nn

from fedlens import rng
from fedlens.errors import FedlensError

GRID = tuple(10.0**power for power in range(-2, 7))
NEVER = -1e9  # the bias of a class nobody has seen: finite, and below any score


@dataclass(frozen=True)
class Statistics:
    """All that ridge and class means need of (X, y), in float64; sums of parts are the whole's."""

    xtx: torch.Tensor  # [D, D], Σ x xᵀ
    class_sums: torch.Tensor  # [C, D], Σ of x over each class: YᵀX
    counts: torch.Tensor  # [C]

    @classmethod
    def of(
        cls, features: torch.Tensor, labels: torch.Tensor, classes: int, *, chunk: int = 4096
    ) -> "Statistics":
        """`chunk` rows at a time, so that a big float32 matrix has no float64 twin."""
        dim = features.shape[1]
        xtx = torch.zeros(dim, dim, dtype=torch.float64)
        class_sums = torch.zeros(classes, dim, dtype=torch.float64)
        labels = labels.cpu()
        for start in range(0, len(labels), chunk):
            rows = slice(start, start + chunk)
            x = features[rows].detach().to("cpu", torch.float64)
            xtx.addmm_(x.T, x)
            class_sums.index_add_(0, labels[rows], x)
        counts = torch.bincount(labels, minlength=classes).double()
        return cls(xtx, class_sums, counts)

    def __add__(self, other: "Statistics") -> "Statistics":
        if self.class_sums.shape != other.class_sums.shape:
            raise ValueError(f"{self.class_sums.shape} and {other.class_sums.shape} do not add.")
        return Statistics(
            self.xtx + other.xtx, self.class_sums + other.class_sums, self.counts + other.counts
        )


def linear(dim: int, classes: int, seed: int) -> nn.Linear:
    """A head to be trained, its start addressed by `seed`."""
    with rng.scoped(rng.generator(seed, "head")):
        return nn.Linear(dim, classes)


def ridge(stats: Statistics, lam: float) -> nn.Linear:
    """The head that minimises Σ‖W x + b − onehot(y)‖² + λ‖W‖²."""
    return next(ridge_path(stats, [lam]))


def ridge_path(stats: Statistics, grid: Iterable[float]) -> Iterator[nn.Linear]:
    """Ridge heads for every λ of `grid`, in its order, from one eigendecomposition."""
    return (_as_linear(*solution) for solution in solve(stats, grid))


def solve(stats: Statistics, grid: Iterable[float]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(W [C, D], b [C]) in float64 for every λ: with S = QΛQᵀ, W = XᵀY_c · Q(Λ + λ)⁻¹Qᵀ."""
    if not stats.counts.sum() > 0:
        raise FedlensError("A ridge head needs at least one sample.")
    total = stats.counts.sum()
    mean, prior = stats.class_sums.sum(0) / total, stats.counts / total
    centred = stats.xtx - total * torch.outer(mean, mean)
    cross = stats.class_sums - torch.outer(stats.counts, mean)
    values, vectors = torch.linalg.eigh(centred)
    values = values.clamp(min=0)  # S is positive semi-definite but for rounding
    rotated = cross @ vectors
    for lam in grid:
        if not lam > 0:
            raise FedlensError(f"Ridge needs λ > 0, not {lam}.")
        weight = (rotated / (values + lam)) @ vectors.T
        yield weight, prior - weight @ mean


def choose_ridge(
    stats: Statistics,
    features: torch.Tensor,
    labels: torch.Tensor,
    grid: Iterable[float] = GRID,
) -> tuple[nn.Linear, float]:
    """The ridge head, and its λ, most accurate on validation data; of equals the larger λ."""
    lams = sorted(grid)
    best, chosen = -1, None
    for lam, head in zip(lams, ridge_path(stats, lams), strict=True):
        with torch.no_grad():
            correct = int((head.to(features.device)(features).argmax(1) == labels).sum())
        if correct >= best:
            best, chosen = correct, (head, lam)
    if chosen is None:
        raise FedlensError("The grid of λ is empty.")
    return chosen


def class_means(stats: Statistics) -> nn.Linear:
    """The nearest class mean as a linear head: argmin ‖x − μ‖² = argmax μ·x − ‖μ‖²/2.

    A class without samples has no mean; its weight is 0 and its bias so low that it never wins.
    """
    means = stats.class_sums / stats.counts.clamp(min=1)[:, None]
    bias = -means.square().sum(1) / 2
    return _as_linear(means, bias.masked_fill(stats.counts == 0, NEVER))


def temperature(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """The scale s > 0 that minimises the mean of −log softmax(s·logits)_y, which is convex in s.

    Searched over log s; logits that separate all samples would want s = ∞ and get the bound.
    """
    shifted = logits.detach().to("cpu", torch.float64)
    shifted = shifted - shifted.max(1, keepdim=True).values
    truth = shifted.gather(1, labels.cpu()[:, None])[:, 0]

    def loss(log_s: float) -> float:
        s = math.exp(log_s)
        return float((torch.logsumexp(s * shifted, 1) - s * truth).mean())

    bounds = (math.log(1e-4), math.log(1e4))
    return math.exp(minimize_scalar(loss, bounds=bounds, method="bounded").x)


def scaled(head: nn.Linear, s: float) -> nn.Linear:
    """A head whose logits are s times those of `head`: Guo et al., 2017, arXiv:1706.04599."""
    return _as_linear(head.weight.detach() * s, head.bias.detach() * s)


def _as_linear(weight: torch.Tensor, bias: torch.Tensor) -> nn.Linear:
    classes, dim = weight.shape
    head = nn.Linear(dim, classes, device="meta").to_empty(device=weight.device)  # draws nothing
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(bias)
    return head
