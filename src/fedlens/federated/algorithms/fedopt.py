"""FedOpt: the aggregated change Δ is a pseudo-gradient for an optimizer on the server.

w ← w + η·d(Δ). FedAvgM is Hsu et al., 2019, https://arxiv.org/abs/1909.06335; FedAdam and FedYogi
are Reddi et al., 2021, https://arxiv.org/abs/2003.00295.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch

from fedlens.federated.server.optimizers import Moments
from fedlens.params import Params
from fedlens.registry import Range, server_optimizer


@server_optimizer(label="sgd", order=1, name="sgd")
@dataclass(frozen=True, kw_only=True)
class ServerSgd:
    """d = Δ: with a learning rate of 1, the server takes the aggregated model as it is."""

    def init(self, parameters: Params) -> Moments:
        del parameters
        return {}

    def direction(
        self, change: torch.Tensor, moments: Params
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        return change, moments


@server_optimizer(
    label="FedAvgM",
    paper="Hsu et al., 2019, https://arxiv.org/abs/1909.06335",
    order=2,
    name="momentum",
)
@dataclass(frozen=True, kw_only=True)
class FedAvgM:
    """m ← β·m + Δ; d = m."""

    momentum: Annotated[float, Range("[0, 1)"), "β, the share of earlier changes kept"] = 0.9

    def init(self, parameters: Params) -> Moments:
        return {"first": _filled(parameters, 0.0)}

    def direction(
        self, change: torch.Tensor, moments: Params
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        first = moments["first"].mul(self.momentum).add_(change)
        return first, {"first": first}


@server_optimizer(
    label="FedAdam",
    paper="Reddi et al., 2021, https://arxiv.org/abs/2003.00295",
    order=3,
    name="adam",
)
@dataclass(frozen=True, kw_only=True)
class FedAdam:
    """m ← β₁·m + (1 − β₁)Δ; v ← β₂·v + (1 − β₂)Δ²; d = m/(√v + τ).

    As in the paper, v starts at τ² and there is no bias correction. Flower's FedAdam differs: its v
    starts at 0, and it multiplies the learning rate in round t by √(1 − β₂^(t+1))/(1 − β₁^(t+1)).
    """

    momentum: Annotated[float, Range("[0, 1)"), "β₁"] = 0.9
    beta2: Annotated[float, Range("[0, 1)"), "β₂"] = 0.99
    tau: Annotated[float, Range("(0, inf)"), "τ; the smaller, the more adaptive"] = 1e-3

    def init(self, parameters: Params) -> Moments:
        return _adaptive_moments(parameters, self.tau)

    def direction(
        self, change: torch.Tensor, moments: Params
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        second = moments["second"].mul(self.beta2).add_(change.square(), alpha=1 - self.beta2)
        return _adaptive(change, moments["first"], second, self.momentum, self.tau)


@server_optimizer(
    label="FedYogi",
    paper="Reddi et al., 2021, https://arxiv.org/abs/2003.00295",
    order=4,
    name="yogi",
)
@dataclass(frozen=True, kw_only=True)
class FedYogi:
    """As FedAdam, but v ← v − (1 − β₂)Δ²·sign(v − Δ²), which shrinks more slowly.

    As in the paper, v starts at τ² and there is no bias correction; Flower's v starts at 0.
    """

    momentum: Annotated[float, Range("[0, 1)"), "β₁"] = 0.9
    beta2: Annotated[float, Range("[0, 1)"), "β₂"] = 0.99
    tau: Annotated[float, Range("(0, inf)"), "τ; the smaller, the more adaptive"] = 1e-3

    def init(self, parameters: Params) -> Moments:
        return _adaptive_moments(parameters, self.tau)

    def direction(
        self, change: torch.Tensor, moments: Params
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        square, second = change.square(), moments["second"]
        second = second.sub(square * (second - square).sign(), alpha=1 - self.beta2)
        return _adaptive(change, moments["first"], second, self.momentum, self.tau)


def _adaptive_moments(parameters: Params, tau: float) -> Moments:
    return {"first": _filled(parameters, 0.0), "second": _filled(parameters, tau**2)}


def _adaptive(
    change: torch.Tensor, first: torch.Tensor, second: torch.Tensor, beta1: float, tau: float
) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    first = first.mul(beta1).add_(change, alpha=1 - beta1)
    return first / (second.sqrt() + tau), {"first": first, "second": second}


def _filled(parameters: Params, value: float) -> dict[str, torch.Tensor]:
    return {
        name: torch.full_like(parameter, value, dtype=torch.float64, requires_grad=False)
        for name, parameter in parameters.items()
    }
