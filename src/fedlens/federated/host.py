"""Whoever holds clients' data does their work: training, statistics, sensitivities, rankings.

A `ClientHost` is this process or a Flower node; `LocalClients` are all clients in this process. An
answer is a function of the data, the model and the question alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import add
from typing import Any

import torch
from torch import nn

from fedlens import params
from fedlens.data.examples import Examples, FeatureExamples
from fedlens.federated.client import Shard
from fedlens.federated.tasks import ClientTask, ClientUpdate, Engine, Stage
from fedlens.models.heads import Statistics
from fedlens.params import Params
from fedlens.rng import Stream
from fedlens.sparse.calibration import Score, calibrate
from fedlens.sparse.masks import Masks, Ranking
from fedlens.sparse.sensitivity.fisher import Sensitivity, sensitivity
from fedlens.sparse.sensitivity.per_example_gradients import SquaredGradients

Progress = Callable[[int, int], None]  # (done, total)
ShowProgress = Callable[[str], AbstractContextManager[Progress | None]]  # by title


@dataclass(frozen=True)
class CalibrationSettings:
    """How masks are found from scores; the fields of `sparse.calibration` and `sparse.fisher`."""

    rule: str
    density: float
    rule_parameters: Mapping[str, Any] = field(default_factory=dict)
    scope: str = "global"
    method: str = "talos"
    rounds: int = 4
    shrink_factor: float = 0.1
    labels: str = "sampled"
    target: str = "logit"
    examples: int | None = None  # of each client, or of the validation split; None: all
    passes: int = 1
    micro_batch: int = 64


class Calibrator:
    """Scores weights on some examples, with one plan of gradients for all rounds and clients."""

    def __init__(
        self,
        model: nn.Module,
        candidates: Mapping[str, nn.Parameter],
        settings: CalibrationSettings,
        seed: int,
        *,
        show: ShowProgress = lambda title: nullcontext(),
    ) -> None:
        """`candidates` are the parameters of `model` that may be masked."""
        self.model = model
        self.candidates = candidates
        self.settings = settings
        self.seed = seed
        self.show = show
        self.squares: SquaredGradients | None = None

    def score(
        self, examples: Examples, index: torch.Tensor, round_: int, owner: int | str
    ) -> Sensitivity:
        """Of the model as it is; `owner` is a client's number, or "validation"."""
        settings = self.settings
        stream = Stream(self.seed, ("calibrate", owner, round_))
        if settings.examples is not None and settings.examples < len(index):
            chosen = torch.randperm(len(index), generator=stream.draw("examples"))
            index = index[chosen[: settings.examples]]
        client = f", client {owner}" if isinstance(owner, int) else ""
        with self.show(f"sensitivity, round {round_ + 1} of {settings.rounds}{client}") as progress:
            return sensitivity(
                self._squared_gradients(examples, index),
                examples,
                index=index,
                labels=settings.labels,
                target=settings.target,
                passes=settings.passes,
                stream=stream,
                micro_batch=settings.micro_batch,
                progress=progress,
            )

    def rank(self, score: Score, *owner: int) -> Ranking:
        """The weights ranked by `score`; ties are drawn for the clients `owner`, or for all."""
        settings = self.settings
        return calibrate(
            self.candidates,
            score,
            rule=settings.rule,
            density=settings.density,
            rounds=settings.rounds,
            method=settings.method,
            shrink_factor=settings.shrink_factor,
            scope=settings.scope,
            stream=Stream(self.seed, ("calibrate", *owner)),
            **settings.rule_parameters,
        )

    def _squared_gradients(self, examples: Examples, index: torch.Tensor) -> SquaredGradients:
        if self.squares is None:
            names, sample = list(self.candidates), examples.batch(index[:2])
            self.squares = SquaredGradients(self.model, names, sample)
        return self.squares


@dataclass
class ClientHost:
    """One model and the data of some clients.

    What a stage needs (a fitted head, masks) is known only when the stage begins, so engines and
    calibrator are made when they are first used.
    """

    examples: Examples
    shard: Shard
    classes: int
    make_engine: Callable[[Stage, Masks], Engine]
    features: Callable[[], FeatureExamples]  # of `examples`, before the head
    make_calibrator: Callable[[], Calibrator]
    masks: Masks = field(default_factory=dict)  # shared last
    _engines: dict[Stage, Engine] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def calibrator(self) -> Calibrator:
        return self.make_calibrator()

    def engine(self, stage: Stage) -> Engine:
        if stage not in self._engines:
            self._engines[stage] = self.make_engine(stage, self.masks)
        return self._engines[stage]

    def share(self, masks: Masks) -> None:
        """Engines that are made from now on train under these masks."""
        self.masks = masks
        self._engines.pop("rounds", None)

    def train(self, task: ClientTask, parameters: Params, stage: Stage = "rounds") -> ClientUpdate:
        return next(iter(self.engine(stage).updates(parameters, [task])))

    def statistics(self, client: int) -> Statistics:
        """XᵀX, XᵀY and class counts of the client's features."""
        features, shard = self.features(), self.shard(client)
        return Statistics.of(features.features[shard], features.labels[shard], self.classes)

    def sensitivity(self, client: int, round_: int, parameters: Params) -> Sensitivity:
        """One client's part in a calibration round, of the model with these parameters."""
        calibrator = self.calibrator
        if parameters is calibrator.candidates:  # in this process they are the model's own
            return self._score(client, round_)
        before = params.copy(calibrator.candidates)
        params.assign(calibrator.candidates, parameters)
        try:
            return self._score(client, round_)
        finally:
            params.assign(calibrator.candidates, before)

    def ranking(self, client: int) -> Ranking:
        """The weights ranked by one client's examples alone."""
        score: Score = lambda round_: self._score(client, round_).mean()  # noqa: E731
        return self.calibrator.rank(score, client)

    def _score(self, client: int, round_: int) -> Sensitivity:
        return self.calibrator.score(self.examples, self.shard(client), round_, client)


@dataclass(frozen=True)
class LocalClients:
    """All clients in this process: `tasks.Clients` over one host.

    `cache` may return the sum of all clients' statistics from an earlier run.
    """

    host: ClientHost
    sizes: Sequence[int]
    cache: Callable[[Callable[[], Statistics]], Statistics] = lambda compute: compute()

    @property
    def repeatable(self) -> bool:
        return True

    @property
    def left_out(self) -> Mapping[int, str]:
        return {}

    def engine(self, stage: Stage) -> Engine:
        return self.host.engine(stage)

    def statistics(self, known: torch.Tensor, classes: int) -> Statistics:
        del known, classes  # the host has features of its own
        clients = range(len(self.sizes))
        return self.cache(lambda: reduce(add, map(self.host.statistics, clients)))

    def sensitivities(
        self, clients: Sequence[int], round_: int, parameters: Params
    ) -> Iterator[Sensitivity]:
        return (self.host.sensitivity(client, round_, parameters) for client in clients)

    def rankings(self, clients: Sequence[int], like: Ranking) -> Iterator[Ranking]:
        del like
        return (self.host.ranking(client) for client in clients)

    def share(self, *, head: nn.Linear | None = None, masks: Masks | None = None) -> None:
        """Nothing is sent: the host's model has the head already."""
        del head
        if masks is not None:
            self.host.share(masks)
