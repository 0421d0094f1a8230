"""Masks found by scores: whose examples they come from, and how clients' preferences are merged."""

from collections.abc import Mapping
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import nn

from fedlens.config.schema import Config
from fedlens.data.images import Examples
from fedlens.experiments.build import Parts
from fedlens.federated import sampling, wire
from fedlens.federated.tasks import Crowd
from fedlens.params import Params
from fedlens.rng import Stream
from fedlens.runtime.progress import bar
from fedlens.runtime.stop import StopRequest
from fedlens.sparse import voting
from fedlens.sparse.calibration import Score, calibrate
from fedlens.sparse.fisher import Sensitivity, sensitivity
from fedlens.sparse.masks import RULES, Masks, Preference, undecided
from fedlens.sparse.per_example_gradients import Squares


def calibrated(
    config: Config,
    parts: Parts,
    candidates: Mapping[str, nn.Parameter],
    stop: StopRequest,
    *,
    crowd: Crowd | None = None,
) -> tuple[Masks, dict[str, Any]]:
    """The masks the config asks for, and what finding them sent over the network.

    A `crowd` is asked for scores or ballots, if the clients are elsewhere.
    """
    told = config.sparse
    assert told.density is not None
    stream = Stream(config.seed, ("calibrate",))
    sources = Sources(config, parts, candidates, stop, crowd=crowd)
    if told.voting is None or RULES[told.rule].by != "sensitivity":
        found = _preference(config, candidates, sources.pooled, stream)
        return found.masks(told.density), sources.facts()
    if crowd:
        like = undecided(candidates, told.rule, scope=told.scope, stream=stream)
        ballots = crowd.ballots(sources.clients, like)
    else:
        ballots = (sources.ballot(client) for client in sources.clients)
    found = voting.merge(ballots, told.voting, stream=stream)
    return found.masks(told.density), sources.facts()


def _preference(
    config: Config, candidates: Mapping[str, nn.Parameter], score: Score, whose: Stream
) -> Preference:
    told = config.sparse
    assert told.density is not None
    return calibrate(
        candidates,
        score,
        rule=told.rule,
        density=told.density,
        rounds=told.rounds,
        method=told.method,
        soft=told.soft,
        scope=told.scope,
        stream=whose,
    )


class Sources:
    """Whose examples the scores come from: the validation split, or the clients' own shards."""

    def __init__(
        self,
        config: Config,
        parts: Parts,
        candidates: Mapping[str, nn.Parameter],
        stop: StopRequest,
        *,
        crowd: Crowd | None = None,
    ) -> None:
        self.config = config
        self.parts = parts
        self.candidates = candidates
        self.stop = stop
        self.crowd = crowd
        self.squares: Squares | None = None
        self.asked = 0  # rounds of scores
        self.clients: list[int] = []
        scored = RULES[config.sparse.rule].by == "sensitivity"
        if scored and config.sparse.source == "clients" and parts.partition is not None:
            everyone = len(parts.partition)
            size = config.sparse.clients or everyone
            self.clients = sampling.cohort(config.seed, 0, clients=everyone, size=size)

    def pooled(self, number: int) -> Params:
        """The scores of one calibration round over everybody's examples."""
        self.asked += 1
        if not self.clients:
            assert self.parts.validation is not None
            examples = self.parts.validation
            title = f"sensitivity, round {number + 1} of {self.config.sparse.rounds}"
            return self._score(examples, None, number, "validation", title).mean()
        if self.crowd:
            parts = self.crowd.sensitivities(self.clients, number, self.candidates)
        else:
            parts = (self.client(client, number) for client in self.clients)
        return reduce(add, parts).mean()

    def ballot(self, client: int) -> Preference:
        """What one client would train, by its own examples alone."""
        stream = Stream(self.config.seed, ("calibrate", client))
        score: Score = lambda number: self.client(client, number).mean()  # noqa: E731
        return _preference(self.config, self.candidates, score, stream)

    def client(self, client: int, number: int) -> Sensitivity:
        """One client's part in a calibration round, of the model as it stands."""
        assert self.parts.partition is not None
        title = f"sensitivity, round {number + 1} of {self.config.sparse.rounds}, client {client}"
        shard = self.parts.partition.shard(client)
        return self._score(self.parts.train, shard, number, client, title)

    def _score(
        self,
        examples: Examples,
        index: torch.Tensor | None,
        number: int,
        whose: int | str,
        title: str,
    ) -> Sensitivity:
        told = self.config.sparse
        index = torch.arange(len(examples)) if index is None else index
        stream = Stream(self.config.seed, ("calibrate", whose, number))
        if told.examples is not None and told.examples < len(index):
            chosen = torch.randperm(len(index), generator=stream.draw("examples"))
            index = index[chosen[: told.examples]]
        with bar(title, self.stop) as progress:
            return sensitivity(
                self._squares(examples, index),
                examples,
                index=index,
                labels=told.labels,
                target=told.target,
                passes=told.passes,
                stream=stream,
                micro_batch=told.micro_batch,
                progress=progress,
            )

    def _squares(self, examples: Examples, index: torch.Tensor) -> Squares:
        """Planned once, for all rounds and clients."""
        if self.squares is None:
            names, some = list(self.candidates), examples.batch(index[:2])
            self.squares = Squares(self.parts.model, names, some)
        return self.squares

    def facts(self) -> dict[str, Any]:
        """What calibrating sent over the network, where clients did it."""
        if not self.clients:
            return {}
        if self.config.sparse.voting:  # each sends its ranks once
            ranks = {name: value.to("meta", torch.int32) for name, value in self.candidates.items()}
            return {"calibration_bytes_up": len(self.clients) * wire.size(ranks)}
        scores = {name: value.to("meta", torch.float64) for name, value in self.candidates.items()}
        return {"calibration_bytes_up": self.asked * len(self.clients) * wire.size(scores)}
