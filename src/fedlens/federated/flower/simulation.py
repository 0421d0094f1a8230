"""Flower's simulation engine (Ray): virtual nodes, one client each, on actors of several processes.

Flower runs a ServerApp in a thread of its own; ours hands the grid over to whoever opened the
simulation and waits until it is closed, so that the loop stays where signals and logs are.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, Queue

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedlens.errors import FedlensError

START = 180.0  # seconds that Ray has to come up

log = logging.getLogger(__name__)


def _cluster(cores: int) -> dict[str, str | int | bool]:
    """The cluster that RAY_ADDRESS names, with all it has; else so many cores of this machine."""
    if "RAY_ADDRESS" in os.environ:
        return {}
    return {"address": "local", "num_cpus": cores, "include_dashboard": False}


@contextmanager
def simulated(
    client_app: ClientApp, *, clients: int, actors: int, threads: int, gpus: float
) -> Iterator[tuple[Grid, Callable[[], None]]]:
    """The grid of `clients` virtual nodes on `actors` processes; gone when the context ends.

    With it comes a check, which raises once the simulation has broken down.
    """
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # else Ray warns of its future
    from flwr.simulation import run_simulation

    handed: Queue[Grid] = Queue()
    broken: list[BaseException] = []
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
                    "init_args": {"log_to_driver": False, **_cluster(actors * threads)},
                    "client_resources": {"num_cpus": threads, "num_gpus": gpus},
                },
            )
        except BaseException as error:
            broken.append(error)

    logging.getLogger("flwr").setLevel(logging.ERROR)
    thread = threading.Thread(target=run, name="flower-simulation", daemon=True)
    thread.start()

    def check() -> None:
        if broken:
            raise FedlensError(
                f"Flower's simulation broke down ({broken[0].__cause__ or broken[0]}): its log is "
                "above; see that this machine has the memory and cores for engine.workers."
            )

    try:
        yield handed.get(timeout=START), check
    except Empty:
        check()
        raise FedlensError(f"Flower's simulation did not start within {START:g} s.") from None
    finally:
        closed.set()
        thread.join(60)
