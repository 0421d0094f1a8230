"""A host of clients: it builds the experiment on its own data, and answers for its clients.

Whatever it answers with is what the server itself would call, had it the data.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

import torch

from fedlens import params
from fedlens.config import compose
from fedlens.config.schema import AugmentConfig, Config, SparseConfig
from fedlens.data.examples import FeatureExamples
from fedlens.errors import FedlensError
from fedlens.experiments.build import build
from fedlens.experiments.calibration import Sources
from fedlens.experiments.engine import choose_engine
from fedlens.experiments.flower.setup import told_head, told_masks
from fedlens.experiments.head import client_statistics
from fedlens.experiments.local_data import Holding
from fedlens.experiments.masks import maskable_of, under
from fedlens.experiments.trained_head import head_rules, head_seed
from fedlens.federated.client import Task, Update, trained
from fedlens.federated.engines.serial import Engine
from fedlens.federated.engines.vectorised import NAMES, Vectorised
from fedlens.federated.tasks import Setup, Work
from fedlens.models.heads import Statistics
from fedlens.params import Params
from fedlens.runtime.allocator import keep_large_blocks
from fedlens.runtime.device import choose_device
from fedlens.runtime.stop import StopRequest
from fedlens.sparse.fisher import Sensitivity
from fedlens.sparse.masks import Preference
from fedlens.sparse.packing import Packing


class Desk:
    """An experiment as its host sees it, under one setup; loaded once, however many questions."""

    def __init__(self, setup: Setup, holding: Callable[[Config], Holding]) -> None:
        config = compose.from_yaml(setup.config, "The setup the server sent")
        head = told_head(setup)
        if head is None:  # not prepared yet, or trained with the rest
            config = replace(config, head=replace(config.head, name="linear"))
        self.config = config
        keep_large_blocks()
        self.threads = config.engine.threads_per_client or _own_threads()
        self.at_work()
        self.device = choose_device(config.device)
        self.stop = StopRequest()
        self.holding = holding(config)
        parts = build(config, self.device, self.stop, holding=self.holding, head=head)
        masks = told_masks(setup, dict(parts.model.named_parameters()))
        self.parts = under(masks, parts) if masks else parts
        self.engine = cache(self._engine)
        self.layout = cache(self._layout)

    def at_work(self) -> "Desk":
        """With its number of threads, which decides the last bits: a host may have many desks."""
        torch.set_num_threads(self.threads)
        return self

    def shard(self, client: int) -> torch.Tensor:
        partition = self.parts.partition
        if partition is None or client >= len(partition) or not len(partition.shard(client)):
            raise FedlensError(f"Client {client} does not live on this node.")
        return partition.shard(client)

    @cached_property
    def features(self) -> FeatureExamples:
        """Of the training images as they are, whatever is trained on them."""
        if isinstance(self.parts.train, FeatureExamples):
            return self.parts.train
        frozen = replace(
            self.config,
            head=replace(self.config.head, name="linear", freeze=False),
            train=replace(self.config.train, what="head"),
            augment=AugmentConfig(),
            sparse=SparseConfig(),
        )
        known = build(frozen, self.device, self.stop, holding=self.holding).train
        assert isinstance(known, FeatureExamples)
        return known

    @cached_property
    def sources(self) -> Sources:
        return Sources(self.config, self.parts, maskable_of(self.config, self.parts), self.stop)

    def _engine(self, stage: str) -> Engine:
        if stage == "head":
            rules = head_rules(self.config, self.parts.precision)
            seed = head_seed(self.config)
            return Vectorised(self.features, rules, seed, torch.get_num_threads())
        serial = replace(self.config, engine=replace(self.config.engine, name="serial"))
        return choose_engine(serial, self.parts)[0]

    def _layout(self, stage: str) -> Params:
        model = self.parts.model
        if stage == "head":
            return dict(zip(NAMES, (model.head.weight, model.head.bias), strict=True))
        if stage == "calibration":
            return self.sources.candidates
        return Packing(trained(model), self.parts.masks).layout


@cache
def _own_threads() -> int:
    """As many as the process began with."""
    return torch.get_num_threads()


class Node:
    """`crowd.Host` for some clients; `desk` gives the same desk to the same setup."""

    def __init__(
        self, clients: tuple[int, ...], identity: Any, desk: Callable[[Setup], Desk]
    ) -> None:
        self.clients = clients
        self.identity = identity
        self.desk = desk

    def introduction(self) -> dict[str, Any]:
        return {"clients": list(self.clients), "identity": self.identity}

    def layout(self, setup: Setup, stage: str) -> Params:
        return self._at(setup).layout(stage)

    def train(
        self, setup: Setup, work: Work, parameters: Params, correction: Params | None
    ) -> Update:
        desk = self._at(setup)
        shard = desk.shard(work.client)
        terms = _on(desk.device, correction) if correction else None
        task = Task(work.round, work.client, shard, work.steps, work.lr, terms)
        return next(iter(desk.engine(work.stage).updates(_on(desk.device, parameters), [task])))

    def statistics(self, setup: Setup, client: int) -> Statistics:
        desk = self._at(setup)
        desk.shard(client)
        assert desk.parts.partition is not None
        return client_statistics(desk.features, desk.parts.partition, desk.parts.classes, client)

    def sensitivity(
        self, setup: Setup, client: int, number: int, parameters: Params
    ) -> Sensitivity:
        desk = self._at(setup)
        desk.shard(client)
        sources = desk.sources
        before = params.copy(sources.candidates)
        params.assign(sources.candidates, parameters)
        try:
            return sources.client(client, number)
        finally:
            params.assign(sources.candidates, before)

    def ballot(self, setup: Setup, client: int) -> Preference:
        desk = self._at(setup)
        desk.shard(client)
        return desk.sources.ballot(client)

    def _at(self, setup: Setup) -> Desk:
        return self.desk(setup).at_work()


def _on(device: torch.device, tensors: Params) -> Params:
    return {name: value.to(device) for name, value in tensors.items()}
