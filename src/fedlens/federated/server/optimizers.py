"""The server's step: w ← w + η·d, where a server optimizer turns the change Δ into a direction d.

Pure: it returns new parameters and moments, and leaves those it is given alone.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from fedlens.params import Params
from fedlens.registry import Row, server_optimizer

Moments = Mapping[str, Params]  # kind of moment → parameter name → values


class ServerOptimizer(Protocol):
    """What a row of `server_optimizer` makes; moments are float64."""

    def init(self, parameters: Params) -> Moments:
        """The moments before the first round."""
        ...

    def direction(
        self, change: torch.Tensor, moments: Params
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Of one parameter: the direction to take, and its new moments."""
        ...


def make_server_optimizer(
    choice: str | Row, parameters: Mapping[str, Any] | None = None
) -> tuple[ServerOptimizer, float]:
    """The optimizer by name or row, and its learning rate.

    Examples:
        >>> make_server_optimizer("momentum", {"momentum": 0.5, "lr": 0.1})
        (FedAvgM(momentum=0.5), 0.1)
    """
    row = server_optimizer[choice] if isinstance(choice, str) else choice
    values = row.checked(parameters or {})
    lr = values.pop("lr")
    return row.make(**values), lr


def server_step(
    trained: Params, moments: Moments, change: Params, optimizer: ServerOptimizer, lr: float
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """The global parameters and the moments after the step; sums are float64."""
    stepped: dict[str, torch.Tensor] = {}
    kept: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in moments}
    for name, value in trained.items():
        own = {kind: values[name] for kind, values in moments.items()}
        direction, updated = optimizer.direction(change[name], own)
        stepped[name] = value.double().add(direction, alpha=lr).to(value.dtype)
        for kind, moment in updated.items():
            kept[kind][name] = moment
    return stepped, kept
