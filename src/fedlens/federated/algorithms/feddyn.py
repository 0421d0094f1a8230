"""FedDyn: each client's loss has a linear and a quadratic term that make optima agree.

Clients step by g − λ_i + α(w − w_global), and then λ_i ← λ_i − α(w_i − w_global), which estimates
the gradient of client i's own loss. The server keeps h, the mean of all λ_i (0 at first), and the
new global model is the mean of the clients' models minus h/α.
Acar et al., 2021, https://arxiv.org/abs/2111.04263.
"""

from dataclasses import dataclass, field
from typing import Annotated

import torch

from fedlens import params
from fedlens.federated.server.correction import Corrected
from fedlens.federated.server.memory import Memory
from fedlens.federated.tasks import ClientTask
from fedlens.params import Params
from fedlens.registry import Range, correction

MEAN = "h"


@correction(
    label="FedDyn",
    paper="Acar et al., 2021, https://arxiv.org/abs/2111.04263",
    order=4,
    name="feddyn",
    client_states=True,
    moves_model=True,
)
@dataclass(frozen=True, kw_only=True)
class FedDyn:
    """c = −λ_i, and the quadratic term as FedProx's with μ = α.

    In the paper clients keep λ_i; here the run does, and sends it. Clients' models are averaged
    by their numbers of examples, as everywhere here; h counts clients alike, as in the paper. The
    limit α → 0 is not FedAvg, since h/α does not depend on α: α must be positive.
    """

    alpha: Annotated[float, Range("(0, inf)"), "α, how strongly clients are regularised"] = 0.01

    needs_effective_steps = False
    client_states = True
    along_chains = False
    returned = False
    gradient_scale = 1.0

    @property
    def proximal(self) -> float:
        return self.alpha

    def init(self, trained: Params) -> Memory:
        return {MEAN: params.zeros_like(trained, torch.float64)}

    def term(
        self, memory: Memory, trained: Params, own: Params | None, scale: float | None
    ) -> Params:
        del memory, scale
        own = own or params.zeros_like(trained)
        return {name: -own[name] for name in trained}

    def begin(self, memory: Memory, trained: Params) -> "_Duals":
        del trained
        return _Duals(self.alpha, memory[MEAN])


@dataclass
class _Duals:
    """Σ (w_i − w) of the clients of one round, and their new λ_i."""

    alpha: float
    mean: Params
    sums: dict[str, torch.Tensor] = field(init=False)
    clients: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sums = params.zeros_like(self.mean, torch.float64)

    def add(self, task: ClientTask, start: Params, end: Params, scale: float | None) -> None:
        del scale
        assert task.correction is not None
        own: dict[str, torch.Tensor] = {}
        for name, term in task.correction.items():
            moved = end[name] - start[name]
            self.sums[name].add_(moved)
            own[name] = -term.to(moved.device) - self.alpha * moved
        self.clients[task.client] = own

    def result(self, change: Params, population: int) -> Corrected:
        mean = {
            name: value - self.sums[name] * (self.alpha / population)
            for name, value in self.mean.items()
        }
        moved = {name: value - mean[name] / self.alpha for name, value in change.items()}
        return Corrected(moved, {MEAN: mean}, self.clients)
