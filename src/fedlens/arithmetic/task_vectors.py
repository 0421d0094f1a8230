"""Task vectors, τ = θ_tuned − θ_base, and the arithmetic that edits models with them: θ_base + ατ.

Ilharco et al., 2023, https://arxiv.org/abs/2212.04089. Vectors are float64, whatever the models
are, so that adding τ to a float32 base and rounding once gives the tuned model back bit by bit.
"""

import math
from collections.abc import Iterable

import torch

from fedlens import params
from fedlens.params import Params

Vector = dict[str, torch.Tensor]


def task_vector(base: Params, tuned: Params) -> Vector:
    """τ = tuned − base"""
    same_space(base, tuned)
    return {name: _double(tuned[name]) - _double(value) for name, value in base.items()}


def scaled(vector: Params, alpha: float) -> Vector:
    return {name: _double(value) * alpha for name, value in vector.items()}


def negated(vector: Params) -> Vector:
    """The direction away from a task: added to a model, it forgets."""
    return scaled(vector, -1.0)


def added(*vectors: Params) -> Vector:
    return composed((1.0, vector) for vector in vectors)


def composed(terms: Iterable[tuple[float, Params]]) -> Vector:
    """Σ α_t τ_t of at least one term; holds one running sum, so terms may be made on the way."""
    total: Vector = {}
    for alpha, vector in terms:
        total = total or params.zeros_like(vector, torch.float64)
        same_space(total, vector)
        for name, running in total.items():
            running.add_(vector[name].detach(), alpha=alpha)
    if not total:
        raise ValueError("a composition needs at least one vector")
    return total


def applied(base: Params, vector: Params, alpha: float = 1.0) -> Vector:
    """θ = base + ατ in the types of `base`; an entry that does not move keeps its bits.

    With α = 1 and τ = tuned − base in float32 this is `tuned` exactly, unless an entry shrank to
    less than about 2⁻²⁸ of its base.
    """
    same_space(base, vector)
    edited = {}
    for name, value in base.items():
        start, step = value.detach(), _double(vector[name]) * alpha
        moved = (start.double() + step).to(value.dtype)
        edited[name] = torch.where(step == 0, start, moved)  # −0.0 + 0.0 would lose its sign
    return edited


def lerp(base: Params, tuned: Params, alpha: float) -> Vector:
    """base + α(tuned − base), the straight line through both models and beyond, exact at both."""
    same_space(base, tuned)
    return {
        name: torch.lerp(_double(value), _double(tuned[name]), alpha).to(value.dtype)
        for name, value in base.items()
    }


def flat(vector: Params) -> torch.Tensor:
    """All entries in one row, tensors in the order of their names."""
    return torch.cat([_double(vector[name]).reshape(-1) for name in sorted(vector)])


def dot(first: Params, second: Params) -> float:
    same_space(first, second)
    return math.fsum(
        torch.dot(_double(value).reshape(-1), _double(second[name]).reshape(-1)).item()
        for name, value in first.items()
    )


def norm(vector: Params) -> float:
    return math.sqrt(dot(vector, vector))


def cosine(first: Params, second: Params) -> float | None:
    """None where a vector is zero."""
    lengths = norm(first) * norm(second)
    return max(-1.0, min(1.0, dot(first, second) / lengths)) if lengths else None


def same_space(first: Params, *others: Params) -> None:
    """Refuses maps that differ in names or shapes."""
    for other in others:
        if fault := params.mismatch(first, other):
            raise ValueError(fault)


def _double(value: torch.Tensor) -> torch.Tensor:
    return value.detach().double()
