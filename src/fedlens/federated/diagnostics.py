"""What a round shows of its clients: norms, drift, and how far their updates pull one way.

All in one pass over each update and in memory that does not grow with the cohort: with unit
vectors u_k, Σ_{j≠k} u_j·u_k = ‖Σ u_k‖² − n, and the same with signs. Drift is the root mean square
distance of client models from their average: Σ p_k‖δ_k − δ̄‖² = Σ p_k‖δ_k‖² − ‖δ̄‖².
"""

import math
from collections.abc import Sequence

import torch

from fedlens import params
from fedlens.params import Params


class Observer:
    def __init__(self, start: Params) -> None:
        self.start = start
        self.delta = params.zeros_like(start)  # of the update in hand
        self.units = params.zeros_like(start)  # Σ δ / ‖δ‖
        self.signs = params.zeros_like(start)  # Σ sign(δ)
        self.norms: list[float] = []
        self.examples: list[int] = []
        self.moved = 0  # clients with an update that is not zero
        self.nonzero = 0  # coordinates of all of them that moved

    def measure(self, parameters: Params) -> float:
        """‖w_k − w‖; not finite if any of the parameters is not."""
        squares = 0.0
        for name, delta in self.delta.items():
            torch.sub(parameters[name], self.start[name], out=delta)
            squares += torch.linalg.vector_norm(delta, dtype=torch.float64).item() ** 2
        return math.sqrt(squares) if math.isfinite(squares) else squares

    def add(self, norm: float, examples: int) -> None:
        """Takes in the update measured last."""
        self.norms.append(norm)
        self.examples.append(examples)
        self.moved += norm > 0
        for name, delta in self.delta.items():
            if norm:
                self.units[name].add_(delta, alpha=1 / norm)
            self.nonzero += int(delta.count_nonzero())
            self.signs[name].add_(delta.sign_())

    def metrics(self, mean: Params) -> dict[str, float | list[float] | None]:
        """`mean` is δ̄, the mean update weighted by examples.

        `cosine` and `sign_agreement` are means over pairs of clients, None without a pair.

        Signs agree in a share of the coordinates, 1/2 by chance; a coordinate that did not move
        counts as half.
        """
        count, total = len(self.norms), sum(self.examples)
        found: dict[str, float | list[float] | None] = {"update_norms": self.norms}
        shares = [examples / total for examples in self.examples]
        spread = sum(p * norm**2 for p, norm in zip(shares, self.norms, strict=True))
        found["drift"] = math.sqrt(max(0.0, spread - _square(mean)))
        found["cosine"] = found["sign_agreement"] = None
        if self.moved > 1:
            pairs = self.moved * (self.moved - 1)
            found["cosine"] = (_square(self.units) - self.moved) / pairs
        if count > 1:
            size = sum(value.numel() for value in self.start.values())
            agreed = (_square(self.signs) - self.nonzero) / (count * (count - 1) * size)
            found["sign_agreement"] = (1 + agreed) / 2
        return found


def _square(values: Params) -> float:
    """‖values‖²"""
    norms = (torch.linalg.vector_norm(v, dtype=torch.float64) for v in values.values())
    return math.fsum(norm.item() ** 2 for norm in norms)


def client_accuracy(per_class: Sequence[float | None], held: torch.Tensor) -> dict[str, float]:
    """How well the global model serves each client, from held-out accuracy by class.

    `held[k, c]` is how many examples of class c client k has; a client's accuracy is the mean over
    its own mix of classes. The worst decile is the mean of the ⌈K/10⌉ clients served worst.
    """
    known = torch.tensor([accuracy is not None for accuracy in per_class])
    accuracy = torch.tensor([found or 0.0 for found in per_class], dtype=torch.float64)
    mix = held.double() * known
    served = mix.sum(1) > 0
    found = (mix @ accuracy)[served] / mix.sum(1)[served]
    worst = found.sort().values[: math.ceil(len(found) / 10)]
    return {"mean": found.mean().item(), "worst_decile": worst.mean().item()}
