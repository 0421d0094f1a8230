"""A few dozen examples split over clients, and a round's tasks for them."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fedlens import params
from fedlens.data.examples import FeatureExamples
from fedlens.data.partitions.partition import Partition
from fedlens.federated.client import LocalTraining
from fedlens.federated.tasks import ClientTask, ClientUpdate, Engine
from fedlens.models import heads
from fedlens.models.classifier import Classifier
from fedlens.params import Params
from fedlens.rng import generator, scoped
from fedlens.training.optimizers import Sgd
from fedlens.training.precision import Precision
from fedlens.training.step import StepSettings, Tally

WIDTH, CLASSES = 6, 3
FP32 = Precision("fp32", "cpu")
SGD = ("momentum", "weight_decay", "nesterov")


def examples(count: int = 40) -> FeatureExamples:
    draw = generator(0, "world")
    features = torch.randn(count, WIDTH, generator=draw)
    return FeatureExamples(features, torch.randint(CLASSES, (count,), generator=draw))


def linear() -> Classifier:
    return Classifier(nn.Identity(), heads.linear(WIDTH, CLASSES, seed=0))


def network() -> Classifier:
    with scoped(generator(0, "network")):
        return Classifier(nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh()), nn.Linear(8, CLASSES))


def local_training(
    batch_size: int = 4, *, step: dict[str, Any] | None = None, **options: Any
) -> LocalTraining:
    """SGD without momentum unless `options` say otherwise."""
    sgd = {"momentum": 0.0, **{name: options.pop(name) for name in SGD if name in options}}
    return LocalTraining(StepSettings(FP32, **step or {}), batch_size, Sgd(**sgd), **options)


def shards(sizes: Iterable[int]) -> Partition:
    """Client k holds the next sizes[k] examples."""
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    return Partition(torch.arange(int(offsets[-1])), offsets)


def tasks(sizes: Sequence[int], *, steps: int | list[int] = 5, lr: float = 0.1) -> list[ClientTask]:
    each = steps if isinstance(steps, list) else [steps] * len(sizes)
    return [ClientTask(1, k, each[k], lr, size) for k, size in enumerate(sizes)]


def answers(
    engine: Engine, parameters: Params, asked: list[ClientTask]
) -> list[tuple[int, str, Tally | None, str | None]]:
    """Everything a round gives, with parameters as digests."""
    return [
        (one.task.client, params.digest(one.parameters), one.tally, one.fault)
        for one in engine.updates(parameters, asked)
    ]


def kept(engine: Engine, parameters: Params, asked: list[ClientTask]) -> list[ClientUpdate]:
    """A round's updates, out of the memory that was lent."""
    return [
        replace(one, parameters=params.copy(one.parameters))
        for one in engine.updates(parameters, asked)
    ]
