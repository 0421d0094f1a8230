"""Many task vectors into one: each is thinned (row's `keep`), then all are joined (`combine`).

Weights enter as factors f_k = n·p_k, where Σ p_k = 1: equal weights make every factor 1, and then
each row is its paper's formula. All but task arithmetic, which sums, average in some way, so that
with λ = 1 they can take the mean's place on the server; but not with its length: TIES divides an
entry by those that agree on it, so vectors with little in common make a longer one than their mean.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from fedlens.arithmetic.task_vectors import same_space
from fedlens.errors import FedlensError, suggest
from fedlens.params import Params
from fedlens.rng import Stream


@dataclass(frozen=True)
class MergeSettings:
    scale: float = 1.0  # λ, on the merged vector
    density: float = 0.2  # the share of a vector's entries kept: TIES, DARE, Breadcrumbs
    outliers: float = 0.01  # Breadcrumbs: the share of a tensor's largest entries cut off
    agreement: int = 2  # consensus: entries are kept where so many tasks, or all, are active
    threshold: float = 0.4  # consensus: λ_t, how far a task must stand out to be active

    def __post_init__(self) -> None:
        for name, fine, where in [
            ("density", 0 < self.density <= 1, "in (0, 1]: it is the share kept"),
            ("outliers", 0 <= self.outliers < 1, "in [0, 1)"),
            ("agreement", self.agreement >= 1, "at 1 or above"),
            ("threshold", self.threshold >= 0, "at 0 or above"),
        ]:
            if not fine:
                raise FedlensError(f"Merging needs {name} {where}, not {getattr(self, name)}.")


Draw = Callable[[str], torch.Generator]  # of one vector, by the name of the tensor
Keep = Callable[[Params, MergeSettings, Draw], dict[str, torch.Tensor]]
Values = Sequence[torch.Tensor]  # one tensor of every vector
Combine = Callable[[Values, Sequence[float], MergeSettings], torch.Tensor]


@dataclass(frozen=True)
class Row:
    """`keep` marks a vector's entries that stay; `combine(values, factors, settings)` joins one
    tensor of all vectors, in float64."""

    combine: Combine
    paper: str
    about: str
    keep: Keep | None = None


def merge(
    method: str,
    vectors: Sequence[Params],
    weights: Sequence[float],
    settings: MergeSettings,
    stream: Stream,
    ids: Sequence[int],
) -> dict[str, torch.Tensor]:
    """The merged vector in float64; `ids` number the vectors' owners, such as clients.

    Vectors are taken in the order of their ids and draws belong to an id, so the order in which
    they are given does not matter, bit for bit. Shapes are free: a vector may hold just the trained
    entries, and `density` is then a share of those. Needs all vectors at once, a byte more for
    every entry in rows that thin, and one tensor of each vector in float64 at a time.
    """
    if method not in TABLE:
        raise FedlensError(f"The merging method {method} is unknown: {suggest(method, TABLE)}")
    if not 0 < len(vectors) == len(weights) == len(ids) == len(set(ids)):
        raise ValueError("every vector needs one weight and an id of its own, and one must exist")
    total = math.fsum(weights)
    if min(weights) < 0 or not 0 < total < math.inf:
        raise ValueError("weights must be finite, not negative and not all zero")
    same_space(*vectors)
    row = TABLE[method]
    order = sorted(range(len(ids)), key=ids.__getitem__)
    factors = [len(ids) * weights[place] / total for place in order]
    ordered = [vectors[place] for place in order]
    masks = [
        row.keep(vectors[place], settings, partial(stream.draw, "merge", ids[place]))
        for place in order
        if row.keep
    ]
    merged = {}
    for name in vectors[0]:
        values = [vector[name].detach().double() for vector in ordered]
        if masks:
            values = [value * mask[name] for value, mask in zip(values, masks, strict=True)]
        merged[name] = row.combine(values, factors, settings) * settings.scale
    return merged


def _largest(magnitudes: torch.Tensor, count: int) -> torch.Tensor:
    """Marks exactly `count` entries of a row, the largest; of equals those that come first."""
    if count == 0:
        return torch.zeros_like(magnitudes, dtype=torch.bool)
    place = magnitudes.numel() - count
    ranked = magnitudes.cpu().numpy().copy()
    ranked.partition(place)  # finds that place without sorting the rest
    least = float(ranked[place])
    marks = magnitudes > least
    level = (magnitudes == least).nonzero()
    marks[level[: count - int(marks.count_nonzero())]] = True
    return marks


def _keep_largest(vector: Params, settings: MergeSettings, draw: Draw) -> dict[str, torch.Tensor]:
    """The largest of the whole vector; the first by name and place where magnitudes are equal."""
    del draw
    names = sorted(vector)
    magnitudes = torch.cat([vector[name].detach().abs().reshape(-1) for name in names])
    marks = _largest(magnitudes, round(settings.density * magnitudes.numel()))
    parts = torch.split(marks, [vector[name].numel() for name in names])
    return {name: part.view_as(vector[name]) for name, part in zip(names, parts, strict=True)}


def _keep_random(vector: Params, settings: MergeSettings, draw: Draw) -> dict[str, torch.Tensor]:
    return {
        name: (
            torch.rand(value.shape, generator=draw(name), dtype=torch.float32) < settings.density
        ).to(value.device)
        for name, value in vector.items()
    }


def _keep_middle(vector: Params, settings: MergeSettings, draw: Draw) -> dict[str, torch.Tensor]:
    """In every tensor of m entries the largest round(outliers · m) go, the next largest
    round(density · m) stay, as many as there are, and the small rest goes."""
    del draw
    masks = {}
    for name, value in vector.items():
        magnitudes = value.detach().abs().reshape(-1)
        size = magnitudes.numel()
        cut = round(settings.outliers * size)
        last = min(size, cut + round(settings.density * size))
        masks[name] = (_largest(magnitudes, last) ^ _largest(magnitudes, cut)).view_as(value)
    return masks


def _sum(values: Values, factors: Sequence[float]) -> torch.Tensor:
    total = torch.zeros_like(values[0])
    for value, factor in zip(values, factors, strict=True):
        total.add_(value, alpha=factor)
    return total


def _mean(values: Values, factors: Sequence[float]) -> torch.Tensor:
    return _sum(values, factors) / len(values)


def _elected_mean(values: Values, factors: Sequence[float]) -> torch.Tensor:
    """The sign with more mass wins, and those who have it are averaged; equal mass gives 0."""
    elected = _sum(values, factors).sign()
    followed = [(value * elected).clamp_(min=0) for value in values]
    count = _sum([(part > 0).double() for part in followed], factors)
    return elected * _sum(followed, factors) / count.masked_fill(count == 0, 1.0)


def _consensus_mean(
    values: Values, factors: Sequence[float], *, threshold: float, agreement: int
) -> torch.Tensor:
    """Task k is active where |τ_k| ≥ λ_t |τ − τ_k|, τ = Σ f_k τ_k: where the sum serves it well."""
    total = _sum(values, factors)
    active = torch.zeros_like(total, dtype=torch.int64)
    for value in values:
        active += value.abs() >= threshold * (total - value).abs()
    return (total / len(values)).masked_fill(active < min(agreement, len(values)), 0.0)


TABLE: dict[str, Row] = {
    "average": Row(
        lambda v, f, s: _mean(v, f),
        "McMahan et al., 2017, https://arxiv.org/abs/1602.05629",
        "λ Σ p_k τ_k; FedAvg where λ = 1",
    ),
    "task_arithmetic": Row(
        lambda v, f, s: _sum(v, f),
        "Ilharco et al., 2023, https://arxiv.org/abs/2212.04089",
        "λ Σ n p_k τ_k, n times the average: λ is to be chosen, 0.3 to 0.5 for a few tasks",
    ),
    "ties": Row(
        lambda v, f, s: _elected_mean(v, f),
        "Yadav et al., 2023, https://arxiv.org/abs/2306.01708",
        "the largest entries of each vector; a sign elected by mass; the mean of those who agree",
        _keep_largest,
    ),
    "dare": Row(
        lambda v, f, s: _mean(v, f) / s.density,
        "Yu et al., 2024, https://arxiv.org/abs/2311.03099",
        "entries dropped by chance with probability 1 − density, the rest divided by density",
        _keep_random,
    ),
    "breadcrumbs": Row(
        lambda v, f, s: _mean(v, f),
        "Davari & Belilovsky, 2023, https://arxiv.org/abs/2312.06795",
        "per tensor, neither the largest entries (outliers) nor the small ones; then the average",
        _keep_middle,
    ),
    # Clients who all agree stand out from nobody: n equal vectors are active where λ_t(n − 1) ≤ 1.
    "consensus": Row(
        lambda v, f, s: _consensus_mean(v, f, threshold=s.threshold, agreement=s.agreement),
        "Wang et al., 2024, https://arxiv.org/abs/2405.07813",
        "the average, kept where at least `agreement` tasks are active by their TALL masks",
    ),
}
