"""From client updates to one change of the global model, in a stream: Δ = Σ p_k (w_k − w).

A linear rule holds one running sum in float64, whatever the size of the cohort. Its result depends
on the order of clients by float64 rounding only, about 1e-15 of the parameters.
"""

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from fedlens import params
from fedlens.params import Params
from fedlens.rng import Stream
from fedlens.sparse.packing import Packing


@dataclass(frozen=True)
class Contribution:
    """One client's valid parameters, and what aggregators may weight them by."""

    client: int
    parameters: Params  # lent: copy what must outlive `add`
    weight: float  # the number of examples, or 1
    effective_steps: float | None  # None: the client optimizer does not define them
    norm: float  # ‖w_k − w‖
    statistics: Params = field(default_factory=dict)  # of rows with the trait `needs`; lent too


class Aggregator(Protocol):
    """Made for each round as `Row(start, stream, **parameters)`; draws come from `stream`."""

    def add(self, one: Contribution) -> None: ...

    def change(self) -> dict[str, torch.Tensor]:
        """The aggregated change of the global parameters, in float64."""
        ...


@runtime_checkable
class UnpacksUpdates(Protocol):
    """An aggregator that needs to know which entries of whole tensors it is given."""

    def unpack_with(self, packing: Packing, whole: Params) -> None:
        """Called before the first `add`; `whole` has the whole tensors' names and shapes."""
        ...


@dataclass
class RunningSum:
    """Σ c_k w_k and Σ c_k: all that a linear rule needs to give Σ c_k (w_k − w)."""

    start: Params
    sums: dict[str, torch.Tensor] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.sums = params.zeros_like(self.start, torch.float64)

    def add(self, parameters: Params, coefficient: float) -> None:
        for name, running in self.sums.items():
            running.add_(parameters[name], alpha=coefficient)
        self.total += coefficient

    def change(self, factor: float) -> dict[str, torch.Tensor]:
        """factor · Σ c_k (w_k − w)"""
        return {
            name: (running - self.start[name].double() * self.total) * factor
            for name, running in self.sums.items()
        }


class WeightedMean:
    """Σ n_k (w_k − w) / Σ n_k: FedAvg's aggregation, and what client drift is measured from."""

    def __init__(self, start: Params, stream: Stream) -> None:
        del stream
        self.running = RunningSum(start)

    def add(self, one: Contribution) -> None:
        self.running.add(one.parameters, one.weight)

    def change(self) -> dict[str, torch.Tensor]:
        return self.running.change(1 / self.running.total)
