"""The clients of an experiment, wherever they are: in this process, or reached through an engine.

Head, masks and training loop are given `Clients` and do not ask where those are.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from fedlens.config.compose import row_of
from fedlens.config.schema import Config
from fedlens.data.partitions.partition import Partition
from fedlens.experiments import settings
from fedlens.experiments.build import Experiment
from fedlens.experiments.preparation.head import BIAS, WEIGHT, cached_statistics
from fedlens.experiments.preparation.local_data import LocalData, whole
from fedlens.experiments.preparation.masks import make_calibrator
from fedlens.federated.client import Trainer
from fedlens.federated.engines.vectorised import Vectorised
from fedlens.federated.host import Calibrator, ClientHost, LocalClients
from fedlens.federated.tasks import Clients, Engine, Stage
from fedlens.registry import Row
from fedlens.runtime.stop import StopRequest
from fedlens.sparse.masks import Masks

if TYPE_CHECKING:
    from flwr.serverapp import Grid


@dataclass(frozen=True)
class ClientSession:
    """The data of this process, and the clients of an experiment that was built on them."""

    data: LocalData
    clients: Callable[[Experiment], Clients]


@contextmanager
def open_session(
    config: Config, stop: StopRequest, grid: "Grid | None" = None
) -> Iterator[ClientSession]:
    """Opens the clients by the config's engine; `grid` is Flower's, inside a SuperLink."""
    row = row_of(config, "engine")
    if row.traits.get("remote"):
        with row.make(config, stop, grid, **config.engine.parameters) as session:
            yield session
    else:
        yield local_session(config, stop)


def local_session(config: Config, stop: StopRequest) -> ClientSession:
    """All clients in this process, whatever the config's engine."""

    def clients(experiment: Experiment) -> LocalClients:
        row = row_of(config, "engine")
        host = experiment_host(config, experiment, stop, None if row.traits.get("remote") else row)
        cache = partial(cached_statistics, experiment, stop.check)
        return LocalClients(host, shards(experiment).sizes.tolist(), cache)

    return ClientSession(whole(config), clients)


def shards(experiment: Experiment) -> Partition:
    """Who holds which training example; without clients, one client holds all of them."""
    if experiment.partition is not None:
        return experiment.partition
    count = len(experiment.train)
    return Partition(order=torch.arange(count), offsets=torch.tensor([0, count]))


def experiment_host(
    config: Config, experiment: Experiment, stop: StopRequest, engine: Row | None
) -> ClientHost:
    """A built experiment as the host of the clients whose data are here.

    `engine` carries out the tasks of a round; None: one client after another.
    """
    partition = shards(experiment)

    def make_engine(stage: Stage, masks: Masks) -> Engine:
        if stage == "head":
            training = settings.head_training(config, experiment.precision)
            return Vectorised(
                experiment.features.train,
                partition.shard,
                training.local,
                training.seed,
                torch.get_num_threads(),
                names=(WEIGHT, BIAS),
            )
        trainer = Trainer(
            experiment.model,
            experiment.train,
            partition.shard,
            settings.local_training(config, experiment.precision),
            config.seed,
            masks={name: mask for name, mask in masks.items() if mask.any()},
            compiled=config.train.compile,
            mode=experiment.model.batch_norm,
            statistic=settings.client_statistic(config),
        )
        return settings.make_engine(config, engine, trainer, len(partition))

    def calibrator() -> Calibrator:
        mask_settings = settings.masks(config, experiment)
        assert mask_settings is not None
        return make_calibrator(experiment.model, mask_settings, stop)

    return ClientHost(
        examples=experiment.train,
        shard=partition.shard,
        classes=experiment.classes,
        make_engine=make_engine,
        features=lambda: experiment.features.train,
        make_calibrator=calibrator,
    )
