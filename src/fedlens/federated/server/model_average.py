"""Averages of the global models of several rounds, for evaluation only.

Training continues from the raw model; validation, test and the exported parameters are those of
the average. Averages are taken in float64. Izmailov et al., 2018, https://arxiv.org/abs/1803.05407.
"""

from dataclasses import dataclass
from typing import Annotated, Protocol

import torch

from fedlens import params
from fedlens.federated.server.memory import Memory, last_models
from fedlens.params import Params
from fedlens.registry import Range, model_average

MEAN = "mean"


class ModelAverage(Protocol):
    """What a row of `model_average` makes."""

    def updated(self, memory: Memory, model: Params) -> Memory:
        """What is remembered once a round has given `model`; nothing before the first round."""
        ...

    def value(self, memory: Memory) -> Params:
        """The average, after at least one round."""
        ...


@model_average(label="no average", order=1, name="none")
def no_average() -> None:
    """The global model itself is evaluated."""


@model_average(
    label="exponential moving average, decay {decay}",
    paper="Tarvainen & Valpola, 2017, https://arxiv.org/abs/1703.01780",
    order=2,
    name="exponential",
)
@dataclass(frozen=True, kw_only=True)
class ExponentialAverage:
    """v ← β·v + (1 − β)·w after every round; v is the first round's model at first."""

    decay: Annotated[float, Range("[0, 1)"), "β, the share of earlier rounds"] = 0.9

    def updated(self, memory: Memory, model: Params) -> Memory:
        new = {name: value.double() for name, value in params.copy(model).items()}
        if not memory:
            return {MEAN: new}
        before = memory[MEAN]
        return {
            MEAN: {
                name: before[name] * self.decay + value * (1 - self.decay)
                for name, value in new.items()
            }
        }

    def value(self, memory: Memory) -> Params:
        return memory[MEAN]


@model_average(
    label="mean of the last models",
    paper="Caldarola et al., 2023, https://arxiv.org/abs/2310.01366",
    order=3,
    name="last",
)
@dataclass(frozen=True, kw_only=True)
class LastModels:
    """The mean of the last N rounds' models, as in WIMA; of all rounds, while they are fewer.

    The server keeps N models, also in checkpoints.
    """

    rounds: Annotated[
        int | None, Range("[1, inf)"), "N; null: as many rounds as visit all clients, 1/C"
    ] = None

    def updated(self, memory: Memory, model: Params) -> Memory:
        assert self.rounds is not None
        return last_models(memory, params.copy(model), self.rounds)

    def value(self, memory: Memory) -> Params:
        models = list(memory.values())
        return {
            name: torch.stack([one[name].double() for one in models]).mean(0) for name in models[0]
        }
