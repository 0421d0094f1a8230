"""A Flower node's clients: their experiment is built once, on the node's own data.

Answers come from the functions the server itself would call, had it the data.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from fedlens import params
from fedlens.config.schema import Config
from fedlens.experiments import settings
from fedlens.experiments.build import build
from fedlens.experiments.clients import experiment_host, shards
from fedlens.experiments.flower.setup import decode_head, decode_masks
from fedlens.experiments.preparation.head import BIAS, WEIGHT
from fedlens.experiments.preparation.local_data import LocalData
from fedlens.federated.client import trainable_parameters
from fedlens.federated.flower.refusals import Refusal, Refused
from fedlens.federated.flower.setup import Setup
from fedlens.federated.tasks import ClientTask, ClientUpdate, Stage
from fedlens.models.classifier import carried
from fedlens.models.heads import Statistics
from fedlens.params import Params
from fedlens.runtime.allocator import keep_large_blocks
from fedlens.runtime.device import choose_device
from fedlens.runtime.stop import StopRequest
from fedlens.sparse.masks import Masks, Ranking
from fedlens.sparse.packing import Packing
from fedlens.sparse.sensitivity.fisher import Sensitivity


class HostSession:
    """One experiment on this node: the model is built once, heads and masks are loaded into it."""

    def __init__(self, config: Config, local_data: Callable[[Config], LocalData]) -> None:
        self.config = config
        keep_large_blocks()
        self.threads = config.engine.threads_per_client or _own_threads()
        torch.set_num_threads(self.threads)
        self.device = choose_device(config.device)
        stop = StopRequest()
        self.experiment = build(config, self.device, stop, local_data(config))
        self.partition = shards(self.experiment)
        self.initial = {
            name: (value.detach().clone(), value.requires_grad)
            for name, value in self.experiment.model.named_parameters()
        }
        self.initial_buffers = params.copy(dict(self.experiment.model.named_buffers()))
        self.head = self.experiment.model.head
        self.masks: Masks = {}
        self.setup: str | None = None  # the digest of the one that is loaded
        self.host = experiment_host(config, self.experiment, stop, None)

    def load(self, setup: Setup) -> "HostSession":
        """Puts the model into the state a setup describes: as built, with its head and masks."""
        torch.set_num_threads(self.threads)  # it decides the last bits, and sessions may differ
        if setup.digest == self.setup:
            return self
        self.setup = None  # until all of it is loaded: a setup that is refused leaves a mixture
        experiment = self.experiment
        experiment.model.head = self.head
        with torch.no_grad():
            for name, value in experiment.model.named_parameters():
                before, trained = self.initial[name]
                value.copy_(before)
                value.requires_grad_(trained)
        params.assign(dict(experiment.model.named_buffers()), self.initial_buffers)
        if (head := decode_head(setup, experiment.classes)) is not None:
            experiment.with_head(head, {})
        self.masks = decode_masks(setup, dict(experiment.model.named_parameters()))
        if self.masks:
            experiment.with_masks(self.masks, {})
        self.host = experiment_host(self.config, experiment, StopRequest(), None)
        self.host.share(self.masks)
        self.setup = setup.digest
        return self

    def check_client(self, client: int) -> None:
        if not 0 <= client < len(self.partition) or not len(self.partition.shard(client)):
            raise Refused(Refusal.CLIENT, f"client {client}")

    def layout(self, stage: str) -> Params:
        model = self.experiment.model
        if stage == "head":
            return {WEIGHT: model.head.weight, BIAS: model.head.bias}
        if stage == "calibration":
            return self.host.calibrator.candidates
        kept = {name: mask for name, mask in self.masks.items() if mask.any()}
        trained = Packing(trainable_parameters(model), kept).layout
        if stage == "correction":
            return trained
        local = settings.local_training(self.config, self.experiment.precision)
        return {**trained, **carried(model, model.batch_norm), **local.beside(trained)}


@cache
def _own_threads() -> int:
    """As many as the process began with."""
    return torch.get_num_threads()


class FlowerHost:
    """The clients that live on this node; `session` gives the one of a setup's config."""

    def __init__(
        self, clients: tuple[int, ...], identity: Any, session: Callable[[Setup], HostSession]
    ) -> None:
        self.clients = clients
        self.identity = identity
        self.session = session

    def introduction(self) -> dict[str, Any]:
        return {"clients": list(self.clients), "identity": self.identity}

    def layout(self, setup: Setup, stage: str) -> Params:
        return self.session(setup).load(setup).layout(stage)

    def train(
        self, setup: Setup, stage: Stage, task: ClientTask, parameters: Params
    ) -> ClientUpdate:
        session = self._of(setup, task.client)
        correction = _on(session.device, task.correction) if task.correction else None
        examples = len(session.partition.shard(task.client))
        task = replace(task, examples=examples, correction=correction)
        return session.host.train(task, _on(session.device, parameters), stage)

    def statistics(self, setup: Setup, client: int) -> Statistics:
        return self._of(setup, client).host.statistics(client)

    def sensitivity(
        self, setup: Setup, client: int, round_: int, parameters: Params
    ) -> Sensitivity:
        return self._of(setup, client).host.sensitivity(client, round_, parameters)

    def ranking(self, setup: Setup, client: int) -> Ranking:
        return self._of(setup, client).host.ranking(client)

    def _of(self, setup: Setup, client: int) -> HostSession:
        session = self.session(setup).load(setup)
        session.check_client(client)
        return session


def _on(device: torch.device, tensors: Params) -> Params:
    return {name: value.to(device) for name, value in tensors.items()}
