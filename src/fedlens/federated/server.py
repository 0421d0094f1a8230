"""The server's step: the aggregated change Δ as a pseudo-gradient for an optimizer of its own.

Averaging is w ← w + η·Δ with η = 1. The adaptive rows are those of Reddi et al., 2021,
https://arxiv.org/abs/2003.00295; momentum is Hsu et al., 2019, https://arxiv.org/abs/1909.06335.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from fedlens import params
from fedlens.params import Params

Moments = dict[str, dict[str, torch.Tensor]]  # of which kind → parameter name → values


@dataclass(frozen=True)
class ServerSettings:
    lr: float = 1.0
    momentum: float = 0.9  # of `momentum`; β₁ of the adaptive rows
    beta2: float = 0.99
    tau: float = 1e-3  # how adaptive: the smaller, the more


@dataclass(frozen=True)
class Row:
    """`direction(Δ, moments, settings)` updates one parameter's moments and says where to go."""

    direction: Callable[[torch.Tensor, dict[str, torch.Tensor], ServerSettings], torch.Tensor]
    moments: Mapping[str, Callable[[ServerSettings], float]]  # and what each of them starts from


def _adam(delta: torch.Tensor, m: dict[str, torch.Tensor], s: ServerSettings) -> torch.Tensor:
    m["second"].mul_(s.beta2).add_(delta.square(), alpha=1 - s.beta2)
    return _adaptive(delta, m, s)


def _yogi(delta: torch.Tensor, m: dict[str, torch.Tensor], s: ServerSettings) -> torch.Tensor:
    square = delta.square()
    m["second"].sub_(square * (m["second"] - square).sign(), alpha=1 - s.beta2)
    return _adaptive(delta, m, s)


def _adaptive(delta: torch.Tensor, m: dict[str, torch.Tensor], s: ServerSettings) -> torch.Tensor:
    first = m["first"].mul_(s.momentum).add_(delta, alpha=1 - s.momentum)
    return first / (m["second"].sqrt() + s.tau)


_ADAPTIVE = {"first": lambda s: 0.0, "second": lambda s: s.tau**2}

TABLE = {
    "average": Row(lambda d, m, s: d, {}),
    "momentum": Row(lambda d, m, s: m["first"].mul_(s.momentum).add_(d), {"first": lambda s: 0.0}),
    "adam": Row(_adam, _ADAPTIVE),
    "yogi": Row(_yogi, _ADAPTIVE),
}


class Server:
    """The global parameters and the server optimizer's moments, which resume needs."""

    def __init__(self, parameters: Params, row: Row, settings: ServerSettings) -> None:
        self.parameters = params.copy(parameters)
        self.row = row
        self.settings = settings
        self.moments: Moments = {
            kind: {
                name: torch.full_like(value, start(settings), dtype=torch.float64)
                for name, value in self.parameters.items()
            }
            for kind, start in row.moments.items()
        }

    def step(self, change: Params) -> None:
        for name, value in self.parameters.items():
            moments = {kind: values[name] for kind, values in self.moments.items()}
            direction = self.row.direction(change[name], moments, self.settings)
            value.copy_(value.double().add_(direction, alpha=self.settings.lr))
