"""Runs at a SuperLink: submit one, follow its log until it ends, stop it.

The app bundle (FAB) is a `pyproject.toml` that names two objects of an installed package and the
keys of the settings; the values are sent beside it, so that text arrives unchanged.
"""

import contextlib
import json
import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import httpx
import tomli_w
from flwr.cli.build import build_fab_from_files
from flwr.common.constant import Status
from flwr.common.serde import user_config_to_proto
from flwr.proto.control_pb2 import (
    ListRunsRequest,
    StartRunRequest,
    StopRunRequest,
    StreamLogsRequest,
)
from flwr.proto.fab_pb2 import Fab
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

from fedlens.errors import FedlensError
from fedlens.federated.flower.deployment.accounts import OWNER, USERS, SignedRequests

POLL_S = 1.0  # between two checks of a run's status
CHECK_S = 0.2  # between two calls of a follower's `check`
START_TIMEOUT_S = 180.0  # for the ServerApp to start: it imports torch first
LAST_LOG_TIMEOUT_S = 5.0  # for the rest of the log to arrive after a run has ended

Events = queue.SimpleQueue["str | RunEnded | FedlensError"]  # a line of the log, or how it ended


@dataclass(frozen=True)
class Connection:
    """How to reach a SuperLink; without a root certificate, the system's are trusted.

    `user_key` is the private key that signs requests to submit, follow and stop runs.
    """

    address: str
    root_certificates: Path | None = None
    insecure: bool = False
    user_key: Path | None = field(default=None, compare=False)

    @classmethod
    def read(cls, folder: Path) -> "Connection":
        """The connection in `superlink.json` of a federation's folder."""
        try:
            content = json.loads((folder / "superlink.json").read_text(encoding="utf-8"))
            root = content.get("root_certificates")
            key = folder / USERS / OWNER
            return cls(
                content["address"],
                folder / root if root else None,
                content["insecure"],
                key if key.exists() else None,
            )
        except (OSError, ValueError, KeyError) as error:
            raise FedlensError(
                f"{folder} has no connection to a SuperLink ({error}): start one with "
                "`fedlens flower up` or `fedlens flower superlink`."
            ) from error


@dataclass(frozen=True)
class SubmittedRun:
    """A run at a SuperLink."""

    connection: Connection
    run_id: int


@dataclass(frozen=True)
class RunEnded:
    """How a run ended."""

    status: str  # completed, failed or stopped
    detail: str


def submit(
    connection: Connection,
    *,
    settings: Mapping[str, str | int | float | bool],
    client_ref: str,
    server_ref: str,
) -> SubmittedRun:
    """Starts a run of the apps "package.module:attribute" with `settings` as its `run_config`."""
    content = _bundle(settings, client_ref, server_ref)
    with control_client(connection) as client:
        response = client.StartRun(
            StartRunRequest(
                fab=Fab(content=content), override_config=user_config_to_proto(dict(settings))
            )
        )
    return SubmittedRun(connection, response.run_id)


def stop(run: SubmittedRun) -> None:
    """Stops a run, unless it has ended."""
    try:
        with control_client(run.connection) as client:
            client.StopRun(StopRunRequest(run_id=run.run_id))
    except RequestRefused as error:
        if error.code != ApiErrorCode.RUN_ALREADY_FINISHED:
            raise


def follow(
    run: SubmittedRun,
    *,
    print_line: Callable[[str], None],
    check: Callable[[], None] = lambda: None,
    timeout: float = 60.0,
) -> RunEnded:
    """Prints every line of the ServerApp's log until the run has ended.

    `check` is called several times a second; if it raises, the run is stopped and the exception
    propagates. Raises `FedlensError` if the SuperLink does not answer for `timeout` seconds.
    """
    events: Events = queue.SimpleQueue()
    done = threading.Event()
    reader = threading.Thread(target=_read_log, args=(run, events, done), daemon=True)
    watcher = threading.Thread(target=_watch, args=(run, events, done, timeout), daemon=True)
    reader.start()
    watcher.start()
    try:
        while isinstance(event := _next(events, check), str):
            print_line(event)
        if isinstance(event, RunEnded):
            reader.join(LAST_LOG_TIMEOUT_S)
            while not events.empty():
                print_line(str(events.get()))
    except BaseException:
        with contextlib.suppress(FedlensError):
            stop(run)
        raise
    finally:
        done.set()
    if isinstance(event, FedlensError):
        raise event
    return event


def _next(events: Events, check: Callable[[], None]) -> "str | RunEnded | FedlensError":
    while True:
        check()
        with contextlib.suppress(queue.Empty):
            return events.get(timeout=CHECK_S)


def _read_log(run: SubmittedRun, events: Events, done: threading.Event) -> None:
    """Runs in a thread of its own, because a log stream has no timeout."""
    latest, rest = 0.0, ""
    while not done.is_set():
        request = StreamLogsRequest(run_id=run.run_id, after_timestamp=latest)
        try:
            with control_client(run.connection) as client:
                for part in client.StreamLogs(request):
                    *lines, rest = (rest + part.log_output).split("\n")
                    latest = part.latest_timestamp
                    for line in lines:
                        events.put(line)
            break  # a stream ends with its run
        except (FedlensError, ValueError):  # the connection failed, or the stream was cut off
            done.wait(POLL_S)
    if rest:
        events.put(rest)


def _watch(run: SubmittedRun, events: Events, done: threading.Event, timeout: float) -> None:
    try:
        _wait_for_end(run, events, done, timeout)
    except Exception as error:  # `follow` waits for an event of this thread
        events.put(
            FedlensError(
                f"The run cannot be followed any more ({error!r}): run the same command again."
            )
        )


def _wait_for_end(run: SubmittedRun, events: Events, done: threading.Event, timeout: float) -> None:
    """Puts how the run ended, or why its status is unknown."""
    submitted_at = answered_at = time.monotonic()
    started = False
    while not done.wait(POLL_S):
        try:
            with control_client(run.connection) as client:
                runs = client.ListRuns(ListRunsRequest(run_id=run.run_id)).run_dict
        except RequestRefused as error:
            unknown = error.code == ApiErrorCode.RUN_ID_NOT_FOUND
            events.put(_unknown_run(run) if unknown else error)
            return
        except FedlensError as error:
            if time.monotonic() - answered_at > timeout:
                events.put(error)
                return
            continue
        answered_at = time.monotonic()
        status = runs[run.run_id].status
        if status.status == Status.FINISHED:
            events.put(RunEnded(status.sub_status, status.details))
            return
        started = started or status.status == Status.RUNNING
        if not started and answered_at - submitted_at > START_TIMEOUT_S:
            events.put(_not_started(run))
            return


def _not_started(run: SubmittedRun) -> FedlensError:
    return FedlensError(
        f"The SuperLink at {run.connection.address} did not start the run within "
        f"{START_TIMEOUT_S:g} s: check that its executor of ServerApps runs (logs/serverapp.log)."
    )


def _unknown_run(run: SubmittedRun) -> FedlensError:
    return FedlensError(
        f"The SuperLink at {run.connection.address} does not know run {run.run_id}, because it was "
        "restarted without its database: run the same command again."
    )


class RequestRefused(FedlensError):
    """The SuperLink answered a request with an error."""

    def __init__(self, connection: Connection, error: httpx.HTTPStatusError) -> None:
        if error.response.status_code == httpx.codes.UNAUTHORIZED:
            self.code = None
            FedlensError.__init__(self, _unknown_user(connection))
            return
        flower = FlowerError.from_json(error.response.text)
        self.code = flower.code if flower else None
        texts = (flower.message, flower.public_details) if flower else (str(error),)
        reason = " ".join(filter(None, texts))
        super().__init__(f"The SuperLink at {connection.address} refused the request: {reason}")


def _unknown_user(connection: Connection) -> str:
    return (
        f"The SuperLink at {connection.address} does not accept this user: put the public key of "
        f"{connection.user_key or f'{USERS}/{OWNER}'} into {USERS}/ of the federation's folder "
        "there, and check the clocks of both hosts."
    )


@contextlib.contextmanager
def control_client(connection: Connection) -> Iterator[ControlHttpClient]:
    """A client of the Control API whose errors are `FedlensError`s."""
    root, key = connection.root_certificates, connection.user_key
    signing = [] if key is None or connection.insecure else [SignedRequests(key)]
    try:
        with ControlHttpClient.from_server_address(
            connection.address,
            connection.insecure,
            root.read_bytes() if root else None,
            [RuntimeVersionHttpInterceptor("fedlens"), *signing],
        ) as client:
            yield client
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500:
            raise RequestRefused(connection, error) from error
        raise FedlensError(
            f"The SuperLink at {connection.address} does not answer ({error}): check that it runs, "
            "and that address, certificate and `insecure` are those it was started with, then run "
            "the same command again."
        ) from error


def _bundle(
    settings: Mapping[str, str | int | float | bool], client_ref: str, server_ref: str
) -> bytes:
    """The bundle, which is the same for all values of the settings: a SuperLink keeps one copy."""
    app = {
        "publisher": "fedlens",
        "components": {"serverapp": server_ref, "clientapp": client_ref},
        "config": {name: type(value)() for name, value in settings.items()},
    }
    project = {
        "project": {"name": "fedlens-run", "version": version("fedlens")},
        "tool": {"flwr": {"app": app}},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # by a library of Flower
        return build_fab_from_files({"pyproject.toml": tomli_w.dumps(project).encode()})[0]
