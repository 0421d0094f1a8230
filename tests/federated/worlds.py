"""Worlds of a few dozen examples, and a round's tasks in them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fedlens import params
from fedlens.data.examples import FeatureExamples
from fedlens.federated.client import LocalRules, Task, Update
from fedlens.federated.engines.serial import Engine
from fedlens.models import heads
from fedlens.models.classifier import Classifier
from fedlens.params import Params
from fedlens.rng import generator, scoped
from fedlens.training.precision import Precision
from fedlens.training.step import StepRules, Tally

WIDTH, CLASSES = 6, 3
FP32 = Precision("fp32", "cpu")


def world(count: int = 40) -> FeatureExamples:
    draw = generator(0, "world")
    features = torch.randn(count, WIDTH, generator=draw)
    return FeatureExamples(features, torch.randint(CLASSES, (count,), generator=draw))


def linear() -> Classifier:
    return Classifier(nn.Identity(), heads.linear(WIDTH, CLASSES, seed=0))


def network() -> Classifier:
    with scoped(generator(0, "network")):
        return Classifier(nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh()), nn.Linear(8, CLASSES))


def rules(batch_size: int = 4, *, step: dict[str, Any] | None = None, **options: Any) -> LocalRules:
    return LocalRules(StepRules(FP32, **step or {}), batch_size, **options)


def tasks(sizes: Iterable[int], *, steps: int | list[int] = 5, lr: float = 0.1) -> list[Task]:
    """Client k holds the next sizes[k] examples."""
    sizes = list(sizes)
    shards = torch.arange(sum(sizes)).split(sizes)
    each = steps if isinstance(steps, list) else [steps] * len(sizes)
    return [Task(1, k, shard, each[k], lr) for k, shard in enumerate(shards)]


def answers(
    engine: Engine, parameters: Params, asked: list[Task]
) -> list[tuple[int, str, Tally, str | None]]:
    """Everything a round gives, with parameters as digests."""
    return [
        (one.task.client, params.digest(one.parameters), one.tally, one.fault)
        for one in engine.updates(parameters, asked)
    ]


def kept(engine: Engine, parameters: Params, asked: list[Task]) -> list[Update]:
    """A round's updates, out of the memory that was lent."""
    return [
        Update(one.task, params.copy(one.parameters), one.tally, one.fault)
        for one in engine.updates(parameters, asked)
    ]
