"""Aggregators that limit how far a few bad clients can move the global model.

Norm clipping shortens long updates; the median and the trimmed mean go coordinate by coordinate,
hold all updates of a round in memory, and weight every client alike.
"""

from collections.abc import Callable
from typing import Annotated

import torch

from fedlens import params
from fedlens.federated.server.aggregation import Contribution, RunningSum
from fedlens.params import Params
from fedlens.registry import Range, aggregator
from fedlens.rng import Stream


@aggregator(
    label="norm clipping", paper="Sun et al., 2019, https://arxiv.org/abs/1911.07963", order=3
)
class ClippedMean:
    """The weighted mean of updates shortened to at most `clip_norm`."""

    def __init__(
        self,
        start: Params,
        stream: Stream,
        *,
        clip_norm: Annotated[float, Range("(0, inf)"), "longer updates are cut to this norm"] = 1.0,
    ) -> None:
        del stream
        self.running = RunningSum(start)
        self.limit = clip_norm
        self.weight = 0.0

    def add(self, one: Contribution) -> None:
        shortened = min(1.0, self.limit / one.norm) if one.norm else 1.0
        self.running.add(one.parameters, one.weight * shortened)
        self.weight += one.weight

    def change(self) -> dict[str, torch.Tensor]:
        return self.running.change(1 / self.weight)


@aggregator(label="median", paper="Yin et al., 2018, https://arxiv.org/abs/1803.01498", order=4)
class Median:
    """The median of the clients' values, coordinate by coordinate."""

    def __init__(self, start: Params, stream: Stream) -> None:
        del stream
        self.updates = _Stack(start)
        self.add = self.updates.add

    def change(self) -> dict[str, torch.Tensor]:
        count = len(self.updates.models)
        low, high = (count - 1) // 2, count // 2
        return self.updates.combine(lambda values: (values[low] + values[high]) / 2)


@aggregator(
    label="trimmed mean", paper="Yin et al., 2018, https://arxiv.org/abs/1803.01498", order=5
)
class TrimmedMean:
    """The mean without the ⌊trim · n⌋ smallest and largest values of each coordinate."""

    def __init__(
        self,
        start: Params,
        stream: Stream,
        *,
        trim: Annotated[
            float, Range("[0, 0.5)"), "share of clients left out at each end of every coordinate"
        ] = 0.1,
    ) -> None:
        del stream
        self.updates = _Stack(start)
        self.trim = trim
        self.add = self.updates.add

    def change(self) -> dict[str, torch.Tensor]:
        count = len(self.updates.models)
        cut = int(round(self.trim * count, 9))  # 0.29 · 100 is 29, whatever its last bit
        return self.updates.combine(lambda values: values[cut : count - cut].mean(0))


class _Stack:
    """All clients' models of a round."""

    def __init__(self, start: Params) -> None:
        self.start = start
        self.models: list[dict[str, torch.Tensor]] = []

    def add(self, one: Contribution) -> None:
        self.models.append(params.copy(one.parameters))

    def combine(self, rule: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        """`rule` maps the clients' values, float64 and sorted along the first axis, to one."""
        return {
            name: rule(torch.stack([one[name] for one in self.models]).double().sort(0).values)
            - value.double()
            for name, value in self.start.items()
        }
