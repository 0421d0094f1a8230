"""Flower's simulation engine (Ray): one virtual node per client, on several worker processes.

Flower runs a ServerApp in a thread; this one passes its grid to the caller and waits until the
simulation is closed, so that the training loop stays in the main thread with signals and logs.
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

START_TIMEOUT_S = 180.0  # for Ray to start
STOP_TIMEOUT_S = 60.0


def _cluster(cores: int) -> dict[str, str | int | bool]:
    """The whole cluster at RAY_ADDRESS if that is set, else `cores` cores of this machine."""
    if "RAY_ADDRESS" in os.environ:
        return {}
    return {"address": "local", "num_cpus": cores, "include_dashboard": False}


@contextmanager
def simulated(
    client_app: ClientApp, *, clients: int, actors: int, threads: int, gpus: float
) -> Iterator[tuple[Grid, Callable[[], None]]]:
    """Yields the grid of `clients` virtual nodes on `actors` processes; stops them on exit.

    Also yields a check that raises if the simulation has failed.
    """
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # silences a deprecation warning of Ray
    from flwr.simulation import run_simulation

    grids: Queue[Grid] = Queue()
    errors: list[BaseException] = []
    closed = threading.Event()
    server = ServerApp()

    @server.main()
    def pass_grid(grid: Grid, context: Context) -> None:  # noqa: ARG001
        grids.put(grid)
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
            errors.append(error)

    logging.getLogger("flwr").setLevel(logging.ERROR)
    thread = threading.Thread(target=run, name="flower-simulation", daemon=True)
    thread.start()

    def check() -> None:
        if errors:
            raise FedlensError(
                f"Flower's simulation failed ({errors[0].__cause__ or errors[0]}): see its log "
                "above, and check that this machine has enough memory and cores for its "
                "workers."
            )

    try:
        yield grids.get(timeout=START_TIMEOUT_S), check
    except Empty:
        check()
        raise FedlensError(
            f"Flower's simulation did not start within {START_TIMEOUT_S:g} s: check that Ray can "
            "start on this machine."
        ) from None
    finally:
        closed.set()
        thread.join(STOP_TIMEOUT_S)
