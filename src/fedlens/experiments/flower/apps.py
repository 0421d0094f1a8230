"""The two Flower apps: what a node does with a message, and the run that a SuperLink starts.

A process keeps the experiment it has built, however many setups of it arrive.
"""

import logging
import os
import sys
from functools import lru_cache, partial
from pathlib import Path

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedlens.config import compose
from fedlens.config.schema import Config
from fedlens.data.partitions import shards
from fedlens.data.partitions.shards import NodeShard
from fedlens.errors import FedlensError
from fedlens.experiments.flower import SERVER_PLUGINS
from fedlens.experiments.flower.clients import identity
from fedlens.experiments.flower.host import FlowerHost, HostSession
from fedlens.experiments.flower.setup import NodeSettings, read_client_part
from fedlens.experiments.preparation import privacy
from fedlens.experiments.preparation.local_data import of_node, whole
from fedlens.federated.flower.client_app import Protection, client_app
from fedlens.federated.flower.setup import Setup
from fedlens.plugins import Loaded, only_loaded
from fedlens.registry import load_plugin
from fedlens.runtime.logs import logging_to

logging.getLogger("flwr").setLevel(logging.WARNING)  # it logs every message

# In a node's config: the folder of its own data, its device, its threads.
SHARD, DEVICE, THREADS = "shard", "device", "threads"
LOST_AFTER_S = 120.0  # a SuperLink that does not answer its run for so long is given up
SETUPS = 3  # of one run: as it begins, with the head, with masks


def host_of(context: Context) -> FlowerHost:
    """A node with a shard of its own; its settings are those of its command line."""
    config = context.node_config
    if SHARD not in config:
        raise FedlensError("This node has no data: give it the folder of its shard.")
    folder = Path(str(config[SHARD]))
    threads = config.get(THREADS)
    own = NodeSettings(str(config.get(DEVICE, "auto")), None if threads is None else int(threads))
    shard = _shard(folder)
    return FlowerHost(
        shard.clients, identity(shard), lambda setup: _session(setup.config, folder, own)
    )


@lru_cache(maxsize=1)
def _session(config: str, folder: Path | None, own: NodeSettings | None) -> HostSession:
    """`folder` holds a node's own data; None: a simulation, where every process has all."""
    if folder is None or own is None:
        return HostSession(_whole_config(config), whole)
    return HostSession(read_client_part(config, own), lambda _: of_node(_shard(folder)))


def _whole_config(text: str) -> Config:
    """Of a simulation: what this run's own process has written."""
    return compose.from_yaml(text, "The setup of the simulation")


@lru_cache(maxsize=1)
def _shard(folder: Path) -> NodeShard:
    return shards.read_node(folder)


@lru_cache(maxsize=SETUPS)
def protection_of(setup: Setup) -> Protection:
    return _protection(read_client_part(setup.config, NodeSettings()))


@lru_cache(maxsize=SETUPS)
def _simulated_protection(setup: Setup) -> Protection:
    return _protection(_whole_config(setup.config))


def _protection(config: Config) -> Protection:
    return privacy.settings(config), config.privacy.secure


client = client_app(host_of, protection_of)
server = ServerApp()


def simulation(loaded: Loaded) -> ClientApp:
    """The ClientApp of a simulation, whose processes load what this one has loaded."""
    return client_app(partial(_simulated_host, loaded), _simulated_protection)


def _simulated_host(loaded: Loaded, context: Context) -> FlowerHost:
    """A virtual node, which is one client."""
    del loaded  # unpickling it has loaded the plugins
    number = int(context.node_config["partition-id"])
    return FlowerHost((number,), None, lambda setup: _session(setup.config, None, None))


@server.main()
def main(grid: Grid, context: Context) -> None:
    """The experiment of the submitted config, with the nodes of this grid as its clients."""
    from fedlens.experiments.run import start

    logging.getLogger("flwr").addFilter(_NotOurErrors())
    for path in filter(None, os.environ.get(SERVER_PLUGINS, "").split(os.pathsep)):
        load_plugin(Path(path))
    with only_loaded():  # whatever row the submitted config names
        config = compose.from_yaml(str(context.run_config["config"]), "The submitted config")
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))  # whoever follows adds the time
    handler.addFilter(lambda record: record.levelno < logging.ERROR)  # the run ends with it
    grid._retry_invoker.max_time = LOST_AFTER_S  # type: ignore[attr-defined]  # Flower never stops
    with logging_to(handler):
        start(config, grid=grid)


class _NotOurErrors(logging.Filter):
    """Lets Flower log all but an error of ours: that is a sentence, which the SuperLink passes on.

    Flower would write the traceback before it, and after it that the app ended.
    """

    failed = False

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(record.exc_info[1], FedlensError):
            self.failed = True
        return not (self.failed and record.levelno >= logging.ERROR)
