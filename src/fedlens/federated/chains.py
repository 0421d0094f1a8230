"""What passes from client to client along a chain, beside the model's parameters.

The momentum of SGD, v, which is 0 before the first client of a chain; and the global model that
began the round, towards which FedProx's term may pull: μ(w − w_round) instead of μ(w − w_start).
Their names begin with a prefix that no parameter's name has.
"""

from typing import Literal

import torch

from fedlens import params
from fedlens.params import Params

MOMENTUM, ROUND = "momentum/", "round/"
ProximalTo = Literal["start", "round"]
PROXIMAL_TO: tuple[ProximalTo, ...] = ("start", "round")


def beside(
    trained: Params, *, carry_momentum: bool, proximal_to: ProximalTo
) -> dict[str, torch.Tensor]:
    """What the first client of a chain receives beside `trained`, the global parameters.

    Examples:
        >>> sent = beside({"w": torch.ones(2)}, carry_momentum=True, proximal_to="round")
        >>> {name: value.tolist() for name, value in sent.items()}
        {'momentum/w': [0.0, 0.0], 'round/w': [1.0, 1.0]}
    """
    sent: dict[str, torch.Tensor] = {}
    if carry_momentum:
        sent |= prefixed(MOMENTUM, params.zeros_like(trained))
    if proximal_to == "round":
        sent |= prefixed(ROUND, trained)
    return sent


def prefixed(prefix: str, values: Params) -> dict[str, torch.Tensor]:
    return {prefix + name: value for name, value in values.items()}
