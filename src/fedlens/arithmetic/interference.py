"""Interference of task vectors: sign conflicts, cosines, disentanglement error, loss barriers.

Disentanglement error ξ: Ortiz-Jimenez et al., 2023, arXiv:2305.12827; sign conflict: Yadav et al.,
2023, arXiv:2306.01708; loss barrier above the chord: Entezari et al., 2021, arXiv:2110.06296.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fedlens.arithmetic.task_vectors import applied, composed, same_space
from fedlens.errors import FedlensError
from fedlens.params import Params, double

Matrix = list[list[float | None]]
Predict = Callable[[Params], tuple[torch.Tensor, torch.Tensor]]


def sign_conflict(vectors: Sequence[Params]) -> float | None:
    """The share of coordinates moved in both directions, of those that two or more vectors move.

    None if there is no such coordinate.
    """
    same_space(*vectors)
    shared = conflicts = 0
    for name in vectors[0]:
        signs = [vector[name].detach().sign() for vector in vectors]
        up = torch.stack([sign > 0 for sign in signs]).sum(0)
        down = torch.stack([sign < 0 for sign in signs]).sum(0)
        shared += int((up + down > 1).sum())
        conflicts += int(((up > 0) & (down > 0)).sum())
    return conflicts / shared if shared else None


def sign_conflict_matrix(vectors: Sequence[Params]) -> Matrix:
    """`sign_conflict` of every pair: with signs s, s·s' counts agreements less conflicts."""
    net = _products(vectors, torch.sign)
    shared = _products(vectors, lambda rows: rows.sign().abs())
    return [
        [(s - n) / (2 * s) if s else None for s, n in zip(*pair, strict=True)]
        for pair in zip(shared, net, strict=True)
    ]


def cosine_matrix(vectors: Sequence[Params]) -> Matrix:
    """None where a vector is zero."""
    dots = _products(vectors, lambda rows: rows)
    squares = [row[place] for place, row in enumerate(dots)]
    return [
        [
            max(-1.0, min(1.0, dot / math.sqrt(a * b))) if a and b else None
            for dot, b in zip(row, squares, strict=True)
        ]
        for row, a in zip(dots, squares, strict=True)
    ]


def _products(
    vectors: Sequence[Params], of: Callable[[torch.Tensor], torch.Tensor]
) -> list[list[float]]:
    """Dot products of all pairs of vectors, mapped by `of`, in float64, tensor by tensor."""
    same_space(*vectors)
    total = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
    for name in vectors[0]:
        rows = of(torch.stack([double(vector[name]).reshape(-1) for vector in vectors]))
        total += (rows @ rows.T).cpu()
    products: list[list[float]] = total.tolist()
    return products


@dataclass(frozen=True)
class Disentanglement:
    """Shares of predictions that differ, [α₁][α₂]: on each task's data, and the mean of both."""

    alphas: list[float]
    first: list[list[float]]
    second: list[list[float]]
    error: list[list[float]]  # half of the paper's ξ, which is a sum: from 0 to 1


def disentanglement(
    base: Params, first: Params, second: Params, alphas: Sequence[float], predict: Predict
) -> Disentanglement:
    """On task t's data, how often the predictions of θ₀ + α₁τ₁ + α₂τ₂ and θ₀ + α_tτ_t differ.

    `predict` gives the labels predicted on the first and on the second task's data. It is called
    once for every different model; only the labels of single-task models are kept.
    """

    def labels(one: float, two: float) -> tuple[torch.Tensor, torch.Tensor]:
        return predict(applied(base, composed([(one, first), (two, second)])))

    # With α = 0, merged models are single-task models, so these are reused for them.
    alone = [(alpha, 0.0) for alpha in alphas] + [(0.0, alpha) for alpha in alphas]
    single = {pair: labels(*pair) for pair in dict.fromkeys(alone)}
    errors: tuple[list[list[float]], list[list[float]]] = ([], [])
    for one in alphas:
        for part in errors:
            part.append([])
        for two in alphas:
            merged = single.get((one, two)) or labels(one, two)
            errors[0][-1].append(_differing(single[one, 0.0][0], merged[0]))
            errors[1][-1].append(_differing(single[0.0, two][1], merged[1]))
    mean = [[(a + b) / 2 for a, b in zip(*rows, strict=True)] for rows in zip(*errors, strict=True)]
    return Disentanglement(list(alphas), errors[0], errors[1], mean)


def _differing(labels: torch.Tensor, others: torch.Tensor) -> float:
    return (labels != others).double().mean().item()


def normalised(
    merged: Sequence[float], single: Sequence[float]
) -> tuple[list[float | None], float | None]:
    """Accuracy of the merged model divided by that of each task's own model, and their mean.

    None for a task whose own model has accuracy 0, which the mean leaves out.
    """
    ratios = [m / s if s else None for m, s in zip(merged, single, strict=True)]
    known = [ratio for ratio in ratios if ratio is not None]
    return ratios, math.fsum(known) / len(known) if known else None


def barrier(alphas: Sequence[float], losses: Sequence[float]) -> float:
    """The highest rise above the chord, max over α ∈ [0, 1] of L(α) − (1−α)L(0) − αL(1).

    0 if the two models are linearly connected (Frankle et al., 2020, arXiv:1912.05671); α outside
    [0, 1] is ignored.
    """
    at = dict(zip(alphas, losses, strict=True))
    if 0 not in at or 1 not in at:
        raise FedlensError("A loss barrier needs the loss at both ends: add α = 0 and α = 1.")
    return max(
        loss - ((1 - alpha) * at[0] + alpha * at[1])
        for alpha, loss in at.items()
        if 0 <= alpha <= 1
    )
