"""The two Flower apps: what a node does with a message, and the run a SuperLink starts.

A process keeps what it has loaded for the setups met last: those of the stages of one run.
"""

import logging
import sys
from functools import lru_cache, partial
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedlens.config import compose
from fedlens.data import shards
from fedlens.data.shards import NodeShard
from fedlens.experiments import privacy
from fedlens.experiments.flower.clients import identity
from fedlens.experiments.flower.host import Desk, Node
from fedlens.experiments.local_data import of_node, whole
from fedlens.federated.flower.client_app import Protection, client_app
from fedlens.federated.tasks import Setup
from fedlens.runtime.logs import logging_to

logging.getLogger("flwr").setLevel(logging.WARNING)  # it has a word for every message

SHARD = "shard"  # in a node's config: the folder of its own data
LOST = 120.0  # seconds after which a SuperLink that does not answer its run is given up
STAGES = 3  # with setups of their own: statistics, calibration, rounds


def host_of(context: Context) -> Node:
    """A node with a shard of its own, or a virtual one that is one client of a simulation."""
    told = context.node_config
    if SHARD not in told:
        return Node((int(told["partition-id"]),), None, _simulated)
    folder = Path(str(told[SHARD]))
    shard = _shard(folder)
    return Node(shard.clients, identity(shard), partial(_deployed, folder))


@lru_cache(maxsize=STAGES)
def _simulated(setup: Setup) -> Desk:
    return Desk(setup, whole)


@lru_cache(maxsize=STAGES)
def _deployed(folder: Path, setup: Setup) -> Desk:
    return Desk(setup, lambda config: of_node(_shard(folder)))


@lru_cache(maxsize=1)
def _shard(folder: Path) -> NodeShard:
    return shards.read_node(folder)


@lru_cache(maxsize=STAGES)
def protection_of(setup: Setup) -> Protection:
    """What the config says of privacy; that a head be prepared is no part of it."""
    config = compose.from_yaml(setup.config, "The setup the server sent")
    return privacy.settings(config), config.privacy.secure


client = client_app(host_of, protection_of)
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """The experiment in the run's own settings, with the nodes of this grid as its clients."""
    from fedlens.experiments.run import start

    config = compose.from_yaml(str(context.run_config["config"]), "What was submitted")
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))  # whoever follows adds the time
    grid._retry_invoker.max_time = LOST  # type: ignore[attr-defined]  # Flower would never give up
    with logging_to(handler):
        start(config, grid=grid)
