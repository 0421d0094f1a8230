"""FedCM: clients mix each gradient with the direction of the last round, α·g + (1 − α)·Δ.

Δ = −(aggregated change)/(a·η) estimates the mean gradient of the last round's clients, with its
learning rate η and effective steps a (J without momentum); it is 0 in the first round.
Xu et al., 2021, https://arxiv.org/abs/2106.10874.
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

DIRECTION = "direction"


@correction(
    label="FedCM",
    paper="Xu et al., 2021, https://arxiv.org/abs/2106.10874",
    order=3,
    name="fedcm",
    needs_effective_steps=True,
)
@dataclass(frozen=True, kw_only=True)
class FedCM:
    """c = (1 − α)·Δ, added to α·g.

    The server's learning rate is not part of Δ. Where clients take unequal steps, a is the mean of
    their effective steps. With learning rate η/α it is GHBM with learning rate η, τ = 1 and
    β = 1 − α.
    """

    alpha: Annotated[float, Range("(0, 1]"), "α, the share of a client's own gradient"] = 0.1

    needs_effective_steps = True
    client_states = False
    along_chains = False
    returned = False
    proximal = 0.0

    @property
    def gradient_scale(self) -> float:
        return self.alpha

    def init(self, trained: Params) -> Memory:
        return {DIRECTION: params.zeros_like(trained, torch.float64)}

    def term(
        self, memory: Memory, trained: Params, own: Params | None, scale: float | None
    ) -> Params:
        del own, scale
        direction = memory[DIRECTION]
        return {
            name: (direction[name] * (1 - self.alpha)).to(value.dtype)
            for name, value in trained.items()
        }

    def begin(self, memory: Memory, trained: Params) -> "_Direction":
        del memory, trained
        return _Direction()


@dataclass
class _Direction:
    """How far a gradient moved each of the round's clients."""

    scales: list[float] = field(default_factory=list)

    def add(self, task: ClientTask, start: Params, end: Params, scale: float | None) -> None:
        del task, start, end
        assert scale is not None
        self.scales.append(scale)

    def result(self, change: Params, population: int) -> Corrected:
        del population
        scale = sum(self.scales) / len(self.scales)
        return Corrected(
            change, {DIRECTION: {name: value / -scale for name, value in change.items()}}
        )
