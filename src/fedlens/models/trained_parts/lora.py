"""Low-rank factors on linear maps: W + (α/r)·B·A, with W frozen (torch's parametrizations).

Hu et al., 2022, https://arxiv.org/abs/2106.09685. A is drawn, B starts at 0, so the model does too.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from fedlens.errors import FedlensError
from fedlens.params import Params
from fedlens.rng import Stream

ORIGINAL = ".parametrizations.weight.original"  # torch's names below a parametrized linear map
FACTORS = ".parametrizations.weight.0."


class LowRank(nn.Module):
    """The parametrization of one weight: what is added to it is (α/r)·B·A."""

    def __init__(self, weight: torch.Tensor, a: torch.Tensor, scale: float, average: str) -> None:
        super().__init__()
        rank = len(a)
        self.a = nn.Parameter(a.to(weight), requires_grad=average != "frozen_a")
        self.b = nn.Parameter(weight.new_zeros(weight.shape[0], rank))
        self.scale = scale
        self.exact = average == "products"

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.scale * (self.b @ self.a)


@dataclass(frozen=True)
class FactorNames:
    """The names, in a model, of one parametrized weight and its factors."""

    plain: str  # of the weight, in the model without factors
    original: str
    a: str
    b: str
    scale: float
    exact: bool  # the server averages products, so the original moves too

    def merged(self, parameters: Params) -> torch.Tensor:
        a, b = parameters[self.a], parameters[self.b]
        return parameters[self.original] + self.scale * (b @ a)


def add(
    backbone: nn.Module, stream: Stream, *, rank: int, alpha: float, layers: str, average: str
) -> None:
    """Puts factors on the linear maps whose names contain `layers`, and freezes all else.

    Maps that are frozen already get none.
    """
    named = {
        name: module
        for name, module in backbone.named_modules()
        if isinstance(module, nn.Linear) and layers in name
    }
    maps = {name: module for name, module in named.items() if module.weight.requires_grad}
    backbone.requires_grad_(False)
    if named and not maps:
        raise FedlensError("All linear maps for LoRA are frozen: lower backbone.freeze_blocks.")
    if not maps:
        asked = f" whose name contains '{layers}'" if layers else ""
        raise FedlensError(
            f"{type(backbone).__name__} has no linear map{asked} to put LoRA on: "
            + ("change train.trainable.layers." if layers else "choose another train.trainable.")
        )
    for name, module in maps.items():
        bound = module.in_features**-0.5  # as in torch's own init of a linear map
        drawn = torch.rand(rank, module.in_features, generator=stream.draw("lora", name))
        factors = LowRank(module.weight, (2 * drawn - 1) * bound, alpha / rank, average)
        _parametrize(module, factors)


def names(model: nn.Module) -> Iterator[FactorNames]:
    """All factors of a model, in its order."""
    for name, module in model.named_modules():
        if (factors := _factors(module)) is not None:
            yield FactorNames(
                plain=f"{name}.weight",
                original=name + ORIGINAL,
                a=f"{name}{FACTORS}a",
                b=f"{name}{FACTORS}b",
                scale=factors.scale,
                exact=factors.exact,
            )


def plain(factors: Iterable[FactorNames], parameters: Params) -> dict[str, torch.Tensor]:
    """Parameters of a model with these factors as those of the model without, by plain names."""
    found = {one.original: one for one in factors}
    merged = {name for one in found.values() for name in (one.a, one.b)}
    return {
        found[name].plain if name in found else name: (
            found[name].merged(parameters) if name in found else value
        )
        for name, value in parameters.items()
        if name not in merged
    }


def merge(model: nn.Module) -> None:
    """Merges all factors into the weights, in place: the model has plain parameters again."""
    for module in list(model.modules()):
        if _factors(module) is not None:
            with torch.no_grad():
                parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)


def _factors(module: nn.Module) -> LowRank | None:
    if not parametrize.is_parametrized(module, "weight"):
        return None
    chain: Any = module.parametrizations["weight"]  # type: ignore[index]
    return chain[0] if isinstance(chain[0], LowRank) else None


def _parametrize(module: nn.Module, factors: LowRank) -> None:
    """Torch makes a class for the module, which does not pickle: worker processes need that."""
    parametrize.register_parametrization(module, "weight", factors)
    type(module).__reduce_ex__ = _reduce  # type: ignore[method-assign, assignment]


def _reduce(module: nn.Module, protocol: int) -> tuple[Any, ...]:
    del protocol
    assert isinstance(module, nn.Linear)
    chain: Any = module.parametrizations["weight"]  # type: ignore[index]
    return _restored, (chain.original, module.bias, chain[0], module.training)


def _restored(
    weight: nn.Parameter, bias: nn.Parameter | None, factors: LowRank, training: bool
) -> nn.Linear:
    rows, columns = weight.shape
    module = nn.Linear(columns, rows, bias=bias is not None, device="meta")
    module.weight, module.bias = weight, bias  # type: ignore[assignment]
    _parametrize(module.train(training), factors)
    return module
