"""Task vectors, τ = θ_tuned − θ_base, and the arithmetic that edits models with them: θ_base + ατ.

Ilharco et al., 2023, https://arxiv.org/abs/2212.04089. Vectors are float64, whatever the models
are, so that a float32 base plus τ, rounded once, is the tuned model bit by bit.
"""

import math
from collections.abc import Iterable

import torch
from torch import nn

from fedlens import params
from fedlens.errors import FedlensError
from fedlens.params import Params

Vector = dict[str, torch.Tensor]


def task_vector(base: nn.Module | Params, tuned: nn.Module | Params) -> Vector:
    """τ = tuned − base, in float64; either side may be a module or a map of parameters.

    Two modules are compared by all their parameters. Beside a map, a module is read at the map's
    names, which may be a few of its parameters, or buffers. Two maps must have the same names.

    Args:
        base: The model before fine-tuning.
        tuned: The model after it.

    Examples:
        >>> import torch
        >>> import fedlens as fl
        >>> model = torch.nn.Linear(2, 1)
        >>> tuned = {"bias": model.bias.detach() + 0.5}
        >>> fl.task_vector(model, tuned)
        {'bias': tensor([0.5000], dtype=torch.float64)}
    """
    base, tuned = _parameters(base, like=tuned), _parameters(tuned, like=base)
    same_space(base, tuned)
    return {name: params.double(tuned[name]) - params.double(value) for name, value in base.items()}


def apply_task_vector(model: nn.Module, vector: Params, *, scale: float = 1.0) -> None:
    """Adds `scale` times the vector to the model's parameters, in place.

    Parameters that are not in the vector stay as they are, as do entries where it is zero.

    Args:
        model: The model to edit.
        vector: A task vector of the model, or of some of its parameters.
        scale: α, the factor of the vector; a negative one moves away from its task.

    Examples:
        >>> import torch
        >>> import fedlens as fl
        >>> model = torch.nn.Linear(1, 1)
        >>> _ = torch.nn.init.zeros_(model.bias)
        >>> fl.apply_task_vector(model, {"bias": torch.tensor([2.0])}, scale=0.5)
        >>> model.bias.tolist()
        [1.0]
    """
    target = _parameters(model, like=vector)
    params.assign(target, applied(target, vector, scale))


def _parameters(source: nn.Module | Params, like: nn.Module | Params) -> Params:
    """A module's parameters, those (or buffers) named in `like` if that is a map."""
    if not isinstance(source, nn.Module):
        return source
    parameters = dict(source.named_parameters())
    if isinstance(like, nn.Module):
        return parameters
    known = {**dict(source.named_buffers()), **parameters}
    if missing := [name for name in like if name not in known]:
        raise FedlensError(
            f"The model has no parameter {', '.join(missing[:3])}: use a vector made of a model "
            "with the same architecture."
        )
    return {name: known[name] for name in known if name in like}


def scaled(vector: Params, alpha: float) -> Vector:
    return {name: params.double(value) * alpha for name, value in vector.items()}


def negated(vector: Params) -> Vector:
    """The direction away from a task: a model plus this vector forgets the task."""
    return scaled(vector, -1.0)


def added(*vectors: Params) -> Vector:
    return composed((1.0, vector) for vector in vectors)


def composed(terms: Iterable[tuple[float, Params]]) -> Vector:
    """Σ α_t τ_t of at least one term; keeps one running sum, so terms may come from a generator."""
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
        start, step = params.double(value), params.double(vector[name]) * alpha
        moved = (start + step).to(value.dtype)
        edited[name] = torch.where(
            step == 0, start.to(value.dtype), moved
        )  # −0.0 + 0.0 would lose its sign
    return edited


def lerp(base: Params, tuned: Params, alpha: float) -> Vector:
    """base + α(tuned − base), the straight line through both models and beyond, exact at both."""
    same_space(base, tuned)
    return {
        name: torch.lerp(params.double(value), params.double(tuned[name]), alpha).to(value.dtype)
        for name, value in base.items()
    }


def flat(vector: Params) -> torch.Tensor:
    """All entries in one row, tensors in the order of their names."""
    return torch.cat([params.double(vector[name]).reshape(-1) for name in sorted(vector)])


def dot(first: Params, second: Params) -> float:
    same_space(first, second)
    return math.fsum(
        torch.dot(params.double(value).reshape(-1), params.double(second[name]).reshape(-1)).item()
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
