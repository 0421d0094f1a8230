"""FedNova: Δ = (Σ p_k a_k) · Σ p_k (w_k − w)/a_k, where a_k are client k's effective steps.

Clients that do more steps do not pull the model towards their own optimum.
Wang et al., 2020, https://arxiv.org/abs/2007.07481.
"""

import torch

from fedlens.errors import FedlensError
from fedlens.federated.server.aggregation import Contribution, RunningSum
from fedlens.params import Params
from fedlens.registry import aggregator
from fedlens.rng import Stream


@aggregator(
    label="FedNova",
    paper="Wang et al., 2020, https://arxiv.org/abs/2007.07481",
    order=2,
    name="fednova",
    needs_effective_steps=True,
)
class FedNova:
    """The mean update per effective step, times the mean number of effective steps."""

    def __init__(self, start: Params, stream: Stream) -> None:
        del stream
        self.running = RunningSum(start)
        self.weight = 0.0
        self.steps = 0.0

    def add(self, one: Contribution) -> None:
        if one.effective_steps is None:
            raise FedlensError(
                "FedNova divides updates by the optimizer's effective steps, which only SGD "
                "defines: train the clients with SGD, or use another aggregator."
            )
        self.running.add(one.parameters, one.weight / one.effective_steps)
        self.weight += one.weight
        self.steps += one.weight * one.effective_steps

    def change(self) -> dict[str, torch.Tensor]:
        return self.running.change(self.steps / self.weight**2)
