"""Clients by Flower, as a config asks for them: in a simulation, or on the nodes of a SuperLink."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedlens.config.schema import Config
from fedlens.data import shards
from fedlens.data.shards import NodeShard, ServerShard
from fedlens.errors import FedlensError
from fedlens.experiments.local_data import Holding, of_server, world
from fedlens.federated.tasks import Crowd
from fedlens.runtime.device import choose_device
from fedlens.runtime.stop import StopRequest
from fedlens.runtime.threads import available

if TYPE_CHECKING:
    from flwr.serverapp import Grid

SERVER_SHARD = "FEDLENS_SERVER_SHARD"  # in a SuperLink's environment: the server's own data


def settled(config: Config) -> Config:
    """With the threads of a simulation's actors filled in: their number decides the last bits."""
    told = config.engine
    if told.name != "flower_simulation":
        return config
    return replace(config, engine=replace(told, threads_per_client=told.threads_per_client or 1))


@contextmanager
def opened_crowd(
    config: Config, stop: StopRequest, grid: "Grid | None"
) -> Iterator[tuple[Crowd | None, Holding | None]]:
    """The clients elsewhere and the data here; neither, where this process plays all clients."""
    if config.engine.name == "flower_simulation":
        with _simulation(config) as (found, healthy):

            def check() -> None:
                stop.check()
                healthy()

            yield _crowd(config, found, None, check), None
    elif config.engine.name == "flower":
        assert grid is not None
        shard = _server_shard(config)
        yield _crowd(config, grid, identity(shard), stop.check), of_server(shard)
    else:
        yield None, None


def identity(shard: NodeShard | ServerShard) -> dict[str, Any]:
    """What nodes and server must agree on: of which data they are, and who holds what."""
    return {"of": shard.of, "deal": shard.deal}


def _crowd(
    config: Config, grid: "Grid", expected: dict[str, Any] | None, check: Callable[[], None]
) -> Crowd:
    from fedlens.federated.flower.differential_privacy import CLIPPING_NORM
    from fedlens.federated.flower.engine import FlowerCrowd
    from fedlens.federated.flower.roster import Fleet
    from fedlens.federated.flower.secure_aggregation import SecureSettings

    assert config.federated.clients is not None
    fleet = Fleet(
        grid,
        clients=config.federated.clients,
        identity=expected,
        deadline=config.engine.deadline,
        check=check,
    )
    fleet.gather()
    told, extra, sealed = config.privacy, {}, None
    if told.name == "central":
        extra = {CLIPPING_NORM: told.clip_norm}
    if told.secure:
        if len(set(fleet.host.values())) < fleet.clients:
            raise FedlensError(
                "privacy.secure=true needs a node for every client: deal the data anew by `fedlens "
                f"flower partition … --nodes {fleet.clients}`."
            )
        heaviest = 1 if told.name == "central" else None
        sealed = SecureSettings(told.reach, deadline=config.engine.deadline, heaviest=heaviest)
    return FlowerCrowd(fleet, extra, sealed)


@contextmanager
def _simulation(config: Config) -> Iterator[tuple["Grid", Callable[[], None]]]:
    from fedlens.experiments.flower import apps
    from fedlens.federated.flower.simulation import simulated

    assert config.federated.clients is not None
    threads = settled(config).engine.threads_per_client or 1
    gpus = torch.cuda.device_count() if choose_device(config.device).type == "cuda" else 0
    actors = config.engine.workers or gpus or max(1, available() // threads)
    with simulated(
        apps.client,
        clients=config.federated.clients,
        actors=actors,
        threads=threads,
        gpus=min(1.0, gpus / actors),
    ) as found:
        yield found


def _server_shard(config: Config) -> ServerShard:
    if (folder := os.environ.get(SERVER_SHARD)) is None:
        raise FedlensError(
            "This SuperLink knows of no server's data: start it by `fedlens flower superlink`."
        )
    shard = shards.read_server(Path(folder))
    if shard.world != world(config):
        raise FedlensError(
            f"The data in {folder} were dealt for another experiment: deal them for this one by "
            "`fedlens flower partition`, or run the experiment they are for."
        )
    return shard
