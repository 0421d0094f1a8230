"""A SuperLink and a SuperNode on loopback, without TLS, with the app worker of `echo`."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedlens.federated.flower.deployment import submission
from fedlens.federated.flower.deployment.submission import Connection, RunEnded, SubmittedRun

BIN = Path(sys.executable).parent
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


@contextlib.contextmanager
def started(folder: Path) -> Iterator[Link]:
    link, node = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    secret = folder / "secret"
    secret.write_bytes(os.urandom(32))
    no_install = "--disable-runtime-dependency-installation"
    commands = {
        "superlink": [BIN / "flower-superlink", "--insecure", no_install, *_listen_options(link)],
        "node": [
            *(BIN / "flower-supernode", "--insecure", "--superlink", link, *_listen_options(node)),
            *("--isolation", "process", "--superexec-auth-secret-file", secret),
        ],
        "worker": [sys.executable, "-m", APP, node, secret],
    }
    variables = os.environ | {
        "FLWR_HOME": str(folder),
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    with contextlib.ExitStack() as stack:
        processes = {}
        for name, command in commands.items():
            output = stack.enter_context((folder / f"{name}.log").open("w"))
            processes[name] = subprocess.Popen(
                [str(word) for word in command],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=variables,
                cwd=folder,
                start_new_session=True,
            )
            stack.callback(_end, processes[name])
        _wait_until_reachable(link)
        yield Link(Connection(link, insecure=True), processes["worker"].pid)


def _listen_options(address: str) -> list[str]:
    host, port = address.split(":")
    return ["--host", host, "--port", port]


def _wait_until_reachable(address: str, seconds: float = 60.0) -> None:
    host, port = address.split(":")
    until = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, int(port)), 1).close()
            return
        except OSError:
            assert time.monotonic() < until, f"no process listens at {address}"
            time.sleep(0.1)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """SIGTERM to the process, then SIGKILL to its group."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(5)
