"""From client updates to one change of the global model, in a stream: Δ = Σ p_k (w_k − w).

Rows that must compare clients hold them all; every other holds one running sum in float64, whatever
the size of the cohort. Its result depends on the clients' order by rounding in float64 alone, about
1e-15 of the parameters, and not at all for a fixed order. Merges are those of task vectors.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from fedlens import params
from fedlens.arithmetic import merging
from fedlens.arithmetic.merging import MergeSettings
from fedlens.arithmetic.task_vectors import task_vector
from fedlens.params import Params
from fedlens.rng import Stream


@dataclass(frozen=True)
class Contribution:
    """One client's valid parameters, and what rows may weigh them by."""

    client: int
    parameters: Params
    examples: int
    effective_steps: float
    norm: float  # ‖w_k − w‖


@dataclass(frozen=True)
class AggregatorSettings:
    trim: float = 0.1  # trimmed mean: the share of clients cut off at each end of every coordinate
    clip_norm: float = 1.0  # clipped mean: updates longer than this are shortened to it
    merge: MergeSettings = field(default_factory=MergeSettings)
    stream: Stream = Stream(0, ("merge",))  # noqa: RUF009  (it is frozen)


class Aggregator(Protocol):
    def add(self, one: Contribution) -> None: ...

    def change(self) -> dict[str, torch.Tensor]:
        """The aggregated change of the global parameters, in float64."""
        ...


@dataclass
class RunningSum:
    """Σ c_k w_k and Σ c_k: all that a linear rule needs, and Σ c_k (w_k − w) from them."""

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


class Mean:
    """Weighted by examples: McMahan et al., 2017, https://arxiv.org/abs/1602.05629."""

    def __init__(self, start: Params, settings: AggregatorSettings) -> None:
        del settings
        self.running = RunningSum(start)

    def add(self, one: Contribution) -> None:
        self.running.add(one.parameters, one.examples)

    def change(self) -> dict[str, torch.Tensor]:
        return self.running.change(1 / self.running.total)


class ClippedMean:
    """The mean of updates shortened to at most `clip_norm`: Sun et al., 2019, arXiv:1911.07963."""

    def __init__(self, start: Params, settings: AggregatorSettings) -> None:
        self.running = RunningSum(start)
        self.limit = settings.clip_norm
        self.examples = 0

    def add(self, one: Contribution) -> None:
        shortened = min(1.0, self.limit / one.norm) if one.norm else 1.0
        self.running.add(one.parameters, one.examples * shortened)
        self.examples += one.examples

    def change(self) -> dict[str, torch.Tensor]:
        return self.running.change(1 / self.examples)


class NormalisedMean:
    """FedNova: updates per effective step, times the mean number of effective steps.

    Wang et al., 2020, https://arxiv.org/abs/2007.07481.
    """

    def __init__(self, start: Params, settings: AggregatorSettings) -> None:
        del settings
        self.running = RunningSum(start)
        self.examples = 0
        self.steps = 0.0

    def add(self, one: Contribution) -> None:
        self.running.add(one.parameters, one.examples / one.effective_steps)
        self.examples += one.examples
        self.steps += one.examples * one.effective_steps

    def change(self) -> dict[str, torch.Tensor]:
        return self.running.change(self.steps / self.examples**2)


class _Compared:
    """Rows that need all updates at once, and so hold them; clients count alike."""

    def __init__(self, start: Params) -> None:
        self.start = start
        self.held: list[dict[str, torch.Tensor]] = []

    def add(self, one: Contribution) -> None:
        self.held.append(params.copy(one.parameters))

    def combine(self, rule: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        """`rule` maps the clients' values, float64 and sorted along the first axis, to one."""
        return {
            name: rule(torch.stack([one[name] for one in self.held]).double().sort(0).values)
            - value.double()
            for name, value in self.start.items()
        }


class Median:
    """Coordinate by coordinate: Yin et al., 2018, https://arxiv.org/abs/1803.01498."""

    def __init__(self, start: Params, settings: AggregatorSettings) -> None:
        del settings
        self.compared = _Compared(start)
        self.add = self.compared.add

    def change(self) -> dict[str, torch.Tensor]:
        count = len(self.compared.held)
        low, high = (count - 1) // 2, count // 2
        return self.compared.combine(lambda values: (values[low] + values[high]) / 2)


class TrimmedMean:
    """The mean of what is left when ⌊trim · n⌋ values are cut off at each end: Yin et al., 2018."""

    def __init__(self, start: Params, settings: AggregatorSettings) -> None:
        self.compared = _Compared(start)
        self.trim = settings.trim
        self.add = self.compared.add

    def change(self) -> dict[str, torch.Tensor]:
        count = len(self.compared.held)
        cut = int(round(self.trim * count, 9))  # 0.29 · 100 is 29, whatever its last bit
        return self.compared.combine(lambda values: values[cut : count - cut].mean(0))


class Merged:
    """The updates as task vectors, merged by a row of `merging.TABLE`."""

    def __init__(self, start: Params, settings: AggregatorSettings, *, method: str) -> None:
        self.start = start
        self.settings = settings
        self.method = method
        self.vectors: dict[int, dict[str, torch.Tensor]] = {}
        self.examples: list[float] = []

    def add(self, one: Contribution) -> None:
        self.vectors[one.client] = task_vector(self.start, one.parameters)
        self.examples.append(one.examples)

    def change(self) -> dict[str, torch.Tensor]:
        return merging.merge(
            self.method,
            list(self.vectors.values()),
            self.examples,
            settings=self.settings.merge,
            ids=list(self.vectors),
            stream=self.settings.stream,
        )


TABLE: dict[str, Callable[[Params, AggregatorSettings], Aggregator]] = {
    "mean": Mean,
    "clipped_mean": ClippedMean,
    "normalised_mean": NormalisedMean,
    "median": Median,
    "trimmed_mean": TrimmedMean,
    **{
        method: partial(Merged, method=method) for method in merging.TABLE if method != "average"
    },  # the average is the mean
}
