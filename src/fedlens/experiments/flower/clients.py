"""Clients reached through Flower: in a simulation, or on the nodes of a SuperLink."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch

from fedlens import plugins
from fedlens.config.schema import Config
from fedlens.data.partitions import shards
from fedlens.data.partitions.shards import NodeShard, ServerShard
from fedlens.errors import FedlensError
from fedlens.experiments.build import Experiment
from fedlens.experiments.clients import ClientSession
from fedlens.experiments.flower import SERVER_SHARD
from fedlens.experiments.flower.setup import encode_setup
from fedlens.experiments.preparation.local_data import of_server, partition_spec, whole
from fedlens.federated.chains import ROUND, prefixed
from fedlens.federated.client import trainable_parameters
from fedlens.federated.flower.setup import Setup
from fedlens.federated.server import carried
from fedlens.federated.tasks import Clients
from fedlens.models import classifier
from fedlens.registry import Range, engine
from fedlens.runtime.device import choose_device
from fedlens.runtime.stop import StopRequest
from fedlens.runtime.threads import available

if TYPE_CHECKING:
    from flwr.serverapp import Grid
    from torch import nn

    from fedlens.federated.flower.roster import Roster
    from fedlens.sparse.masks import Masks


@engine(label="Flower simulation", order=4, remote=True, packages=("flwr", "ray"))
@contextmanager
def flower_simulation(
    config: Config,
    stop: StopRequest,
    grid: "Grid | None",
    *,
    workers: Annotated[
        int | None, Range("[1, 1024]"), "processes (Ray actors); null: one for each GPU or core"
    ] = None,
    threads_per_client: Annotated[
        int, Range("[1, 1024]"), "with as many as serial has, bits are equal"
    ] = 1,
    vectorise: Annotated[
        bool, "train heads on cached features by batched products (equal up to rounding)"
    ] = True,
    deadline: Annotated[
        float, Range("(0, 1e7]"), "seconds that a round's clients have to answer"
    ] = 600.0,
) -> Iterator[ClientSession]:
    """Flower's simulation engine (Ray) on this machine; needs fedlens[flower]."""
    del grid, vectorise  # the clients' processes read it
    from fedlens.experiments.flower import apps
    from fedlens.federated.flower.simulation import simulated

    assert config.federated.clients is not None
    gpus = torch.cuda.device_count() if choose_device(config.device).type == "cuda" else 0
    actors = workers or gpus or max(1, available() // threads_per_client)
    with simulated(
        apps.simulation(plugins.loaded()),
        clients=config.federated.clients,
        actors=actors,
        threads=threads_per_client,
        gpus=min(1.0, gpus / actors),
    ) as (simulated_grid, healthy):

        def check() -> None:
            stop.check()
            healthy()

        roster = _roster(config, simulated_grid, None, deadline, check)
        yield ClientSession(whole(config), partial(_clients, config, roster, deadline))


@engine(label="Flower deployment", order=5, remote=True, packages=("flwr",))
@contextmanager
def flower(
    config: Config,
    stop: StopRequest,
    grid: "Grid | None",
    *,
    threads_per_client: Annotated[
        int | None, Range("[1, 1024]"), "of nodes by `fedlens flower up`; others have --threads"
    ] = None,
    vectorise: Annotated[
        bool, "train heads on cached features by batched products (equal up to rounding)"
    ] = True,
    deadline: Annotated[
        float, Range("(0, 1e7]"), "seconds that a round's clients have to answer"
    ] = 600.0,
    federation: Annotated[str, "the folder that says where the SuperLink is"] = "federation",
) -> Iterator[ClientSession]:
    """Clients on Flower nodes of their own, see `fedlens flower --help`; needs fedlens[flower]."""
    del threads_per_client, vectorise, federation  # of the nodes, and of whoever submits the run
    assert grid is not None
    from fedlens.federated.flower.deadline_grid import within_deadline

    shard = _server_shard(config)
    bounded = within_deadline(grid, deadline, stop.check)
    roster = _roster(config, bounded, identity(shard), deadline, stop.check)
    yield ClientSession(of_server(config, shard), partial(_clients, config, roster, deadline))


def identity(shard: NodeShard | ServerShard) -> dict[str, Any]:
    """What nodes and server must agree on: their dataset, and which client holds what."""
    return {
        "dataset_digest": shard.dataset_digest,
        "partition_digest": shard.partition_digest,
    }


def _roster(
    config: Config,
    grid: "Grid",
    expected: dict[str, Any] | None,
    deadline: float,
    check: Callable[[], None],
) -> "Roster":
    from fedlens.federated.flower.roster import Roster

    assert config.federated.clients is not None
    roster = Roster(
        grid,
        clients=config.federated.clients,
        identity=expected,
        deadline=deadline,
        check=check,
    )
    roster.wait_for_all()
    if config.privacy.secure and len(set(roster.host.values())) < roster.clients:
        raise FedlensError(
            "privacy.secure=true needs a node for every client: split the data again by "
            f"`fedlens flower partition … --nodes {roster.clients}`."
        )
    return roster


def _clients(config: Config, roster: "Roster", deadline: float, experiment: Experiment) -> Clients:
    from fedlens.federated.flower.differential_privacy import CLIPPING_NORM
    from fedlens.federated.flower.engine import FlowerClients
    from fedlens.federated.flower.secure_aggregation import SecureSettings

    privacy, extra, secure = config.privacy, {}, None
    if privacy.name == "central":
        extra = {CLIPPING_NORM: privacy.clip_norm}
    if privacy.secure:
        max_weight = 1 if privacy.name == "central" else None
        secure = SecureSettings(privacy.max_update_value, deadline=deadline, max_weight=max_weight)

    def encode(head: "nn.Linear | None", masks: "Masks | None") -> Setup:
        weights = experiment.input_hashes["weights"]
        return encode_setup(config, weights, head=head, masks=masks)

    assert experiment.partition is not None
    model, mode = experiment.model, experiment.model.batch_norm
    only_sent = classifier.carried(model, mode).keys() - carried.returned(model, mode)
    return FlowerClients(
        roster,
        experiment.partition.sizes.tolist(),
        encode=encode,
        extra=extra,
        secure=secure,
        losses=privacy.name != "local",
        only_sent=only_sent | prefixed(ROUND, trainable_parameters(model)).keys(),
    )


def _server_shard(config: Config) -> ServerShard:
    if (folder := os.environ.get(SERVER_SHARD)) is None:
        raise FedlensError(
            "This SuperLink has no server data: start it by `fedlens flower superlink`."
        )
    shard = shards.read_server(Path(folder))
    if shard.partition_spec != partition_spec(config):
        raise FedlensError(
            f"The data in {folder} were split for another experiment: split them for this one by "
            "`fedlens flower partition`, or run the experiment they are for."
        )
    return shard
