"""A SuperLink and a SuperNode on loopback, without TLS, with the app worker of `echo`."""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedlens.federated.flower.deployment import submission
from fedlens.federated.flower.deployment.child_process import ChildProcess
from fedlens.federated.flower.deployment.processes import SuperLink, SuperNode
from fedlens.federated.flower.deployment.submission import Connection, RunEnded, SubmittedRun

APP = "tests.federated.flower.echo"
ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Link:
    connection: Connection
    worker: int  # the process id of the app worker

    def submit(self, **settings: str | int | float | bool) -> SubmittedRun:
        settings = {"plan": "ask", "values": "[]", **settings}
        refs = {"client_ref": f"{APP}:client", "server_ref": f"{APP}:server"}
        return submission.submit(self.connection, settings=settings, **refs)

    def run(self, **settings: str | int | float | bool) -> tuple[RunEnded, list[str]]:
        lines: list[str] = []
        until = time.monotonic() + 90

        def check() -> None:
            assert time.monotonic() < until, lines

        ended = submission.follow(self.submit(**settings), print_line=lines.append, check=check)
        return ended, lines


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def quick_polls(patch: pytest.MonkeyPatch) -> None:
    """Lets the Flower processes that are started from now on look for work more often, but not so
    often that answering them keeps a core busy."""
    patch.setenv("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.4")
    _put_on_path(patch, Path(__file__).with_name("quick_polls"))


def _put_on_path(patch: pytest.MonkeyPatch, folder: Path) -> None:
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    patch.setenv("PYTHONPATH", os.pathsep.join(paths))


@contextlib.contextmanager
def started(folder: Path) -> Iterator[Link]:
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        quick_polls(patch)
        _put_on_path(patch, ROOT)  # the apps are among the tests
        link = stack.enter_context(SuperLink(folder, address="127.0.0.1:0", insecure=True))
        node = stack.enter_context(
            SuperNode(folder, "node", connection=link.connection, shard=folder)
        )
        worker = stack.enter_context(
            ChildProcess(
                "The worker",
                [sys.executable, "-m", APP, node.runtime, str(node.secret)],
                log=folder / "logs" / "worker.log",
                environment=dict(os.environ),
            )
        )
        link.wait_until_ready()
        yield Link(link.connection, worker.pid)
