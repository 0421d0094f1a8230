"""Optimizers of central training and of every client, one per row: w ← w − η · direction(∇L(w)).

A row's fields are its parameters; `make` builds the optimizer, sparse if there are masks.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from fedlens.errors import FedlensError
from fedlens.registry import Range, client_optimizer
from fedlens.sparse.optimizers.sparse_adamw import SparseAdamW
from fedlens.sparse.optimizers.sparse_sgd import SparseSGDM

Named = Iterable[tuple[str, nn.Parameter]]
Masks = Mapping[str, Tensor]


class ClientOptimizer(Protocol):
    """What a row of `client_optimizer` makes."""

    def make(self, named: Named, masks: Masks | None, *, lr: float) -> torch.optim.Optimizer:
        """An optimizer of the parameters that require gradients, on the entries of `masks`."""
        ...


@runtime_checkable
class CountsEffectiveSteps(Protocol):
    """An optimizer that FedNova can normalise; its row has the trait `effective_steps=True`."""

    def effective_steps(self, steps: int) -> float:
        """‖a‖₁: if all gradients of `steps` steps were g, they would move w by lr·‖a‖₁·g."""
        ...


@client_optimizer(label="SGD", order=1, effective_steps=True)
@dataclass(frozen=True, kw_only=True)
class Sgd:
    """Stochastic gradient descent with momentum."""

    momentum: Annotated[float, Range("[0, 1)"), "share of the last step that is repeated"] = 0.9
    weight_decay: Annotated[float, Range("[0, inf)"), "λ, adds λw to the gradient"] = 0.0
    nesterov: Annotated[bool, "Nesterov momentum, which needs momentum > 0"] = False

    def __post_init__(self) -> None:
        if self.nesterov and not self.momentum:
            raise FedlensError(
                "Nesterov momentum needs momentum > 0: set momentum, or nesterov to false."
            )

    def make(self, named: Named, masks: Masks | None, *, lr: float) -> torch.optim.Optimizer:
        settings = (lr, self.momentum, 0, self.weight_decay, self.nesterov)
        if masks:
            return SparseSGDM(named, *settings, masks=masks)
        return torch.optim.SGD(_trained(named), *settings)

    def effective_steps(self, steps: int) -> float:
        """‖a‖₁: if all J gradients of a client were g, it would move by lr·‖a‖₁·g.

        SGDM applies gradient t again at every later step: a_t = (1 − ρ^(J−t+1))/(1 − ρ); Nesterov's
        look-ahead gives 1 + ρ·a_t. Wang et al., 2020, https://arxiv.org/abs/2007.07481.
        """
        momentum = self.momentum
        heavy_ball = (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
        return steps + momentum * heavy_ball if self.nesterov else heavy_ball


@client_optimizer(
    label="AdamW",
    paper="Loshchilov & Hutter, 2019, https://arxiv.org/abs/1711.05101",
    name="adamw",
    order=2,
    effective_steps=False,
)
@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay; every client starts each round with empty moments."""

    beta1: Annotated[float, Range("[0, 1)"), "decay of the gradients' mean"] = 0.9
    beta2: Annotated[float, Range("[0, 1)"), "decay of the squared gradients' mean"] = 0.999
    eps: Annotated[float, Range("(0, inf)"), "added to the denominator"] = 1e-8
    weight_decay: Annotated[float, Range("[0, inf)"), "λ, shrinks w by 1 − lr·λ in a step"] = 0.01

    def make(self, named: Named, masks: Masks | None, *, lr: float) -> torch.optim.Optimizer:
        settings = (lr, (self.beta1, self.beta2), self.eps, self.weight_decay)
        if masks:
            return SparseAdamW(named, *settings, masks=masks)
        return torch.optim.AdamW(_trained(named), *settings)


def fuse(optimizer: torch.optim.Optimizer) -> bool:
    """Makes SGD, AdamW or SparseSGDM step by one pass over memory; whether that was possible.

    On the CPU in float32 only, and equal up to rounding.
    """
    if type(optimizer) not in (torch.optim.SGD, torch.optim.AdamW, SparseSGDM):
        return False
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(p.device.type != "cpu" or p.dtype != torch.float32 for p in parameters):
        return False
    for group in optimizer.param_groups:
        group["fused"] = True
    return True


def _trained(named: Named) -> list[nn.Parameter]:
    return [parameter for _, parameter in named if parameter.requires_grad]
