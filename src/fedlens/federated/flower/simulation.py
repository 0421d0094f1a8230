"""Flower's simulation engine (Ray): virtual nodes, one client each, on actors of several processes.

Flower runs a ServerApp in a thread of its own; ours hands the grid over to whoever opened the
simulation and waits until it is closed, so that the loop stays where signals and logs are.
"""

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, Queue

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedlens.errors import FedlensError

START = 180.0  # seconds that Ray has to come up

log = logging.getLogger(__name__)


@contextmanager
def simulated(
    client_app: ClientApp, *, clients: int, actors: int, threads: int, gpus: float
) -> Iterator[Grid]:
    """The grid of `clients` virtual nodes on `actors` processes; gone when the context ends."""
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from flwr.simulation import run_simulation

    handed: Queue[Grid | BaseException] = Queue()
    closed = threading.Event()
    server = ServerApp()

    @server.main()
    def hand_over(grid: Grid, context: Context) -> None:  # noqa: ARG001
        handed.put(grid)
        closed.wait()

    def run() -> None:
        try:
            run_simulation(
                server,
                client_app,
                num_supernodes=clients,
                backend_config={
                    "init_args": {"num_cpus": actors * threads, "log_to_driver": False,
                                  "include_dashboard": False},
                    "client_resources": {"num_cpus": threads, "num_gpus": gpus},
                },
            )  # fmt: skip
        except BaseException as error:
            handed.put(error)

    logging.getLogger("flwr").setLevel(logging.ERROR)
    thread = threading.Thread(target=run, name="flower-simulation", daemon=True)
    thread.start()
    try:
        grid = handed.get(timeout=START)
    except Empty:
        closed.set()
        raise FedlensError(f"Flower's simulation did not start within {START:g} s.") from None
    if isinstance(grid, BaseException):
        raise FedlensError(f"Flower's simulation did not start: {grid}.") from grid
    try:
        yield grid
    finally:
        closed.set()
        thread.join(60)
