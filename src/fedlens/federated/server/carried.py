"""Tensors that travel beside the trained parameters, and change by rules of their own.

BatchNorm's statistics are averaged. A head that is solved again changes between rounds only. The
weights under LoRA take up what averaging the factors loses: W ← W + s·(Σ p_k B_k A_k − B A), where
A and B are the new global factors, so that the global model is exactly the mean of the clients'
models (Singhal et al., 2024, https://arxiv.org/abs/2410.09432).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from fedlens import params
from fedlens.federated.server.aggregation import RunningSum
from fedlens.models.architectures import batch_norm
from fedlens.models.architectures.batch_norm import Mode
from fedlens.models.classifier import solved_again
from fedlens.models.trained_parts import lora
from fedlens.models.trained_parts.lora import FactorNames
from fedlens.params import Params


class CarriedRound(Protocol):
    """One round of a rule."""

    def add(self, parameters: Params, weight: float) -> None:
        """Takes in what one client sent."""
        ...

    def result(self, trained: Params) -> dict[str, torch.Tensor]:
        """The new values; `trained` are the new global parameters."""
        ...


class CarriedRule(Protocol):
    """How some carried tensors change in a round."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def returned(self) -> bool:
        """Whether clients send them back."""
        ...

    def begin(self, carried: Params) -> CarriedRound: ...


@dataclass(frozen=True)
class AveragedStatistics:
    """The mean of the clients' statistics, weighted as their updates are."""

    names: tuple[str, ...]
    returned: bool = True

    def begin(self, carried: Params) -> "_MeanStatistics":
        return _MeanStatistics({name: carried[name] for name in self.names})


class _MeanStatistics:
    def __init__(self, start: Params) -> None:
        self.start = start
        self.running = RunningSum(start)

    def add(self, parameters: Params, weight: float) -> None:
        self.running.add(parameters, weight)

    def result(self, trained: Params) -> dict[str, torch.Tensor]:
        del trained
        change = self.running.change(1 / self.running.total)
        return _moved(self.start, change)


@dataclass(frozen=True)
class ExactProducts:
    """The weights under LoRA, so that products of factors are averaged without a remainder."""

    factors: tuple[FactorNames, ...]
    returned: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(one.original for one in self.factors)

    def begin(self, carried: Params) -> "_MeanProducts":
        return _MeanProducts(self.factors, carried)


class _MeanProducts:
    def __init__(self, factors: Sequence[FactorNames], start: Params) -> None:
        self.factors = factors
        self.start = {one.original: start[one.original] for one in factors}
        self.sums = params.zeros_like(self.start, torch.float64)
        self.total = 0.0

    def add(self, parameters: Params, weight: float) -> None:
        for one in self.factors:
            self.sums[one.original].add_(_product(one, parameters), alpha=weight)
        self.total += weight

    def result(self, trained: Params) -> dict[str, torch.Tensor]:
        remainder = {
            one.original: self.sums[one.original] / self.total - _product(one, trained)
            for one in self.factors
        }
        return _moved(self.start, remainder)


@dataclass(frozen=True)
class Unchanged:
    """Tensors that no client changes: what the server sets, every client receives."""

    names: tuple[str, ...]
    returned: bool = False

    def begin(self, carried: Params) -> "_Same":
        return _Same({name: carried[name] for name in self.names})


@dataclass(frozen=True)
class _Same:
    values: dict[str, torch.Tensor]

    def add(self, parameters: Params, weight: float) -> None:
        del parameters, weight

    def result(self, trained: Params) -> dict[str, torch.Tensor]:
        del trained
        return self.values


def _product(one: FactorNames, parameters: Params) -> torch.Tensor:
    return one.scale * (parameters[one.b].double() @ parameters[one.a].double())


def _moved(start: Params, change: Params) -> dict[str, torch.Tensor]:
    return {name: (value.double() + change[name]).to(value) for name, value in start.items()}


def rules(model: nn.Module, mode: Mode) -> tuple[CarriedRule, ...]:
    """The rules of all tensors that `models.classifier.carried` names."""
    found: list[CarriedRule] = []
    if mode != "frozen" and (names := tuple(batch_norm.statistics(model))):
        found.append(AveragedStatistics(names))
    if factors := tuple(one for one in lora.names(model) if one.exact):
        found.append(ExactProducts(factors))
    if head := tuple(solved_again(model)):
        found.append(Unchanged(head))
    return tuple(found)


def returned(model: nn.Module, mode: Mode) -> set[str]:
    """The names of the carried tensors that clients send back."""
    return {name for rule in rules(model, mode) if rule.returned for name in rule.names}
