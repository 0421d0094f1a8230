"""What a round shows of its clients: update norms, drift, and how far the updates agree.

All in one pass over each update and in memory that does not grow with the cohort: with unit
vectors u_k, Σ_{j≠k} u_j·u_k = ‖Σ u_k‖² − n, and the same with signs.
"""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from fedlens import params
from fedlens.params import Params
from fedlens.registry import diagnostic


class Diagnostic(Protocol):
    """Made for each round as `Row(start)`, with the parameters the clients start from."""

    def add(self, delta: Params, norm: float, weight: float) -> None:
        """Takes in one update δ_k = w_k − w of length `norm`; `delta` must not be changed."""
        ...

    def result(self, mean: Params) -> float | list[float] | None:
        """For the record; `mean` is δ̄, the weighted mean of the updates."""
        ...


MakeDiagnostic = Callable[[Params], Diagnostic]


def make_diagnostics(names: Sequence[str]) -> dict[str, MakeDiagnostic]:
    """The rows of these names, in their order."""
    return {name: diagnostic[name].make for name in names}


class Delta:
    """δ_k = w_k − w of one update after another, in one buffer."""

    def __init__(self, start: Params) -> None:
        self.start = start
        self.values = params.zeros_like(start)

    def measure(self, parameters: Params, start: Params | None = None) -> float:
        """‖w_k − w‖; not finite if any of the parameters is not. `start` takes the place of w."""
        squares = 0.0
        start = self.start if start is None else start
        for name, delta in self.values.items():
            torch.sub(parameters[name], start[name], out=delta)
            squares += torch.linalg.vector_norm(delta, dtype=torch.float64).item() ** 2
        return math.sqrt(squares) if math.isfinite(squares) else squares


@diagnostic(label="update norms", order=1)
class UpdateNorms:
    """‖δ_k‖ of every client."""

    def __init__(self, start: Params) -> None:
        del start
        self.norms: list[float] = []

    def add(self, delta: Params, norm: float, weight: float) -> None:
        del delta, weight
        self.norms.append(norm)

    def result(self, mean: Params) -> list[float]:
        del mean
        return self.norms


@diagnostic(label="client drift", order=2)
class Drift:
    """The root mean square distance of client models from their average.

    Σ p_k‖δ_k − δ̄‖² = Σ p_k‖δ_k‖² − ‖δ̄‖².
    """

    def __init__(self, start: Params) -> None:
        del start
        self.norms: list[float] = []
        self.weights: list[float] = []

    def add(self, delta: Params, norm: float, weight: float) -> None:
        del delta
        self.norms.append(norm)
        self.weights.append(weight)

    def result(self, mean: Params) -> float:
        total = sum(self.weights)
        shares = [weight / total for weight in self.weights]
        spread = sum(p * norm**2 for p, norm in zip(shares, self.norms, strict=True))
        return math.sqrt(max(0.0, spread - _square(mean)))


@diagnostic(label="cosine of updates", order=3)
class Cosine:
    """The mean cosine over pairs of updates that are not zero; None without a pair."""

    def __init__(self, start: Params) -> None:
        self.units = params.zeros_like(start)  # Σ δ / ‖δ‖
        self.moved = 0  # clients with an update that is not zero

    def add(self, delta: Params, norm: float, weight: float) -> None:
        del weight
        if not norm:
            return
        self.moved += 1
        for name, value in delta.items():
            self.units[name].add_(value, alpha=1 / norm)

    def result(self, mean: Params) -> float | None:
        del mean
        if self.moved < 2:
            return None
        return (_square(self.units) - self.moved) / (self.moved * (self.moved - 1))


@diagnostic(label="sign agreement", order=4)
class SignAgreement:
    """The share of coordinates whose signs agree, a mean over pairs of clients: 1/2 by chance.

    A coordinate that did not move counts as half; None without a pair.
    """

    def __init__(self, start: Params) -> None:
        self.signs = params.zeros_like(start)  # Σ sign(δ)
        self.count = 0
        self.nonzero = 0  # coordinates that moved, of all clients

    def add(self, delta: Params, norm: float, weight: float) -> None:
        del norm, weight
        self.count += 1
        for name, value in delta.items():
            self.nonzero += int(value.count_nonzero())
            self.signs[name].add_(value.sign())

    def result(self, mean: Params) -> float | None:
        del mean
        if self.count < 2:
            return None
        size = sum(value.numel() for value in self.signs.values())
        pairs = self.count * (self.count - 1)
        return (1 + (_square(self.signs) - self.nonzero) / (pairs * size)) / 2


def _square(values: Params) -> float:
    """‖values‖²"""
    norms = (torch.linalg.vector_norm(v, dtype=torch.float64) for v in values.values())
    return math.fsum(norm.item() ** 2 for norm in norms)


def client_accuracy(
    per_class: Sequence[float | None], class_counts: torch.Tensor
) -> dict[str, float]:
    """How accurate the global model is for each client, from held-out accuracy by class.

    `class_counts[k, c]` is how many examples of class c client k has; a client's accuracy is the
    mean over its own mix of classes. The worst decile is the mean of the ⌈K/10⌉ lowest.
    """
    known = torch.tensor([accuracy is not None for accuracy in per_class])
    accuracy = torch.tensor([value or 0.0 for value in per_class], dtype=torch.float64)
    mix = class_counts.double() * known
    measured = mix.sum(1) > 0
    by_client = (mix @ accuracy)[measured] / mix.sum(1)[measured]
    worst = by_client.sort().values[: math.ceil(len(by_client) / 10)]
    return {"mean": by_client.mean().item(), "worst_decile": worst.mean().item()}
