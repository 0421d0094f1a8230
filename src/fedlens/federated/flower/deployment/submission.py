"""Our app as a Flower app: submitted to a SuperLink, followed to its end, stopped.

The app's bundle (FAB) is a `pyproject.toml` that names two objects of an installed package and the
settings there are; their values travel beside it, as values, so that a text arrives as it was.
"""

import contextlib
import json
import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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

from fedlens import __version__
from fedlens.errors import FedlensError

PULSE = 1.0  # seconds between two looks at whether a run goes on
CHECK = 0.2  # seconds between two calls of a follower's `check`
UNKNOWN = ApiErrorCode.RUN_ID_NOT_FOUND
STARTING = 180.0  # seconds that a run may wait for its ServerApp, which imports torch first
LAST_WORDS = 5.0  # seconds that the log of a run that ended may take to come

News = queue.SimpleQueue["str | Ended | FedlensError"]


@dataclass(frozen=True)
class Connection:
    """How to reach a SuperLink; without a certificate, the system's authorities are trusted."""

    address: str
    root_certificates: Path | None = None
    insecure: bool = False

    @classmethod
    def read(cls, folder: Path) -> "Connection":
        """What `superlink.json` in a federation's folder says."""
        try:
            told = json.loads((folder / "superlink.json").read_text(encoding="utf-8"))
            root = told.get("root_certificates")
            return cls(told["address"], folder / root if root else None, told["insecure"])
        except (OSError, ValueError, KeyError) as error:
            raise FedlensError(
                f"{folder} does not tell where a SuperLink is ({error}): start one with "
                "`fedlens flower up` or `fedlens flower superlink`."
            ) from error


@dataclass(frozen=True)
class Submitted:
    connection: Connection
    run: int


@dataclass(frozen=True)
class Ended:
    status: str  # completed, failed or stopped
    detail: str


def submit(
    connection: Connection,
    *,
    settings: Mapping[str, str | int | float | bool],
    client_ref: str,
    server_ref: str,
) -> Submitted:
    """Starts a run of the apps "package.module:attribute", whose `run_config` is `settings`."""
    content = _bundle(settings, client_ref, server_ref)
    with speaking(connection) as client:
        told = client.StartRun(
            StartRunRequest(
                fab=Fab(content=content), override_config=user_config_to_proto(dict(settings))
            )
        )
    return Submitted(connection, told.run_id)


def stop(submitted: Submitted) -> None:
    """Ends a run; one that has ended is left alone."""
    try:
        with speaking(submitted.connection) as client:
            client.StopRun(StopRunRequest(run_id=submitted.run))
    except Refused as error:
        if error.code != ApiErrorCode.RUN_ALREADY_FINISHED:
            raise


def follow(
    submitted: Submitted,
    *,
    say: Callable[[str], None],
    check: Callable[[], None] = lambda: None,
    patience: float = 60.0,
) -> Ended:
    """Says every line of the ServerApp's log, until the run has ended.

    `check` is called several times a second; what it raises stops the run and goes on. A SuperLink
    that is silent for `patience` seconds is lost.
    """
    news: News = queue.SimpleQueue()
    over = threading.Event()
    reader = threading.Thread(target=_read, args=(submitted, news, over), daemon=True)
    watcher = threading.Thread(target=_watch, args=(submitted, news, over, patience), daemon=True)
    reader.start()
    watcher.start()
    try:
        while isinstance(found := _next(news, check), str):
            say(found)
        if isinstance(found, Ended):
            reader.join(LAST_WORDS)
            while not news.empty():
                say(str(news.get()))
    except BaseException:
        with contextlib.suppress(FedlensError):
            stop(submitted)
        raise
    finally:
        over.set()
    if isinstance(found, FedlensError):
        raise found
    return found


def _next(news: News, check: Callable[[], None]) -> "str | Ended | FedlensError":
    while True:
        check()
        with contextlib.suppress(queue.Empty):
            return news.get(timeout=CHECK)


def _read(submitted: Submitted, news: News, over: threading.Event) -> None:
    """The log; a stream has no timeout, so this may wait for ever, and only for itself."""
    seen, rest = 0.0, ""
    while not over.is_set():
        request = StreamLogsRequest(run_id=submitted.run, after_timestamp=seen)
        try:
            with speaking(submitted.connection) as client:
                for part in client.StreamLogs(request):
                    *lines, rest = (rest + part.log_output).split("\n")
                    seen = part.latest_timestamp
                    for line in lines:
                        news.put(line)
            break  # a stream ends with its run
        except (FedlensError, ValueError):  # lost, or cut in the middle
            over.wait(PULSE)
    if rest:
        news.put(rest)


def _watch(submitted: Submitted, news: News, over: threading.Event, patience: float) -> None:
    try:
        _wait_for_end(submitted, news, over, patience)
    except Exception as error:  # whoever follows waits for this thread's word
        news.put(FedlensError(f"The run cannot be followed any more: {error!r}."))


def _wait_for_end(submitted: Submitted, news: News, over: threading.Event, patience: float) -> None:
    """Tells the run's end, or that nothing can be known of it any more."""
    asked = heard = time.monotonic()
    begun = False
    while not over.wait(PULSE):
        try:
            with speaking(submitted.connection) as client:
                runs = client.ListRuns(ListRunsRequest(run_id=submitted.run)).run_dict
        except Refused as error:
            news.put(_forgotten(submitted) if error.code == UNKNOWN else error)
            return
        except FedlensError as error:
            if time.monotonic() - heard > patience:
                news.put(error)
                return
            continue
        heard = time.monotonic()
        found = runs[submitted.run].status
        if found.status == Status.FINISHED:
            news.put(Ended(found.sub_status, found.details))
            return
        begun = begun or found.status == Status.RUNNING
        if not begun and heard - asked > STARTING:
            news.put(_unbegun(submitted))
            return


def _unbegun(submitted: Submitted) -> FedlensError:
    return FedlensError(
        f"The SuperLink at {submitted.connection.address} did not begin the run within "
        f"{STARTING:g} s: see that its executor of ServerApps runs (logs/serverapp.log)."
    )


def _forgotten(submitted: Submitted) -> FedlensError:
    return FedlensError(
        f"The SuperLink at {submitted.connection.address} does not know run {submitted.run}: it "
        "was started anew, without its database; run the same command again."
    )


class Refused(FedlensError):
    """The SuperLink answers, and says no."""

    def __init__(self, connection: Connection, error: httpx.HTTPStatusError) -> None:
        told = FlowerError.from_json(error.response.text)
        self.code = told.code if told else None
        why = " ".join(filter(None, (told.message, told.public_details))) if told else str(error)
        super().__init__(f"The SuperLink at {connection.address} refuses: {why}")


@contextlib.contextmanager
def speaking(connection: Connection) -> Iterator[ControlHttpClient]:
    """A client of the Control API, whose troubles are sentences."""
    root = connection.root_certificates
    try:
        with ControlHttpClient.from_server_address(
            connection.address,
            connection.insecure,
            root.read_bytes() if root else None,
            [RuntimeVersionHttpInterceptor("fedlens")],
        ) as client:
            yield client
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500:
            raise Refused(connection, error) from error
        raise FedlensError(
            f"The SuperLink at {connection.address} does not answer ({error}): see that it runs "
            "and that address, certificate and `insecure` are those it was started with, then run "
            "the same command again."
        ) from error


def _bundle(
    settings: Mapping[str, str | int | float | bool], client_ref: str, server_ref: str
) -> bytes:
    """The same for all values of the settings, so that a SuperLink keeps one copy of it."""
    app = {
        "publisher": "fedlens",
        "components": {"serverapp": server_ref, "clientapp": client_ref},
        "config": {name: type(value)() for name, value in settings.items()},
    }
    described = {
        "project": {"name": "fedlens-run", "version": __version__},
        "tool": {"flwr": {"app": app}},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a library, by Flower
        return build_fab_from_files({"pyproject.toml": tomli_w.dumps(described).encode()})[0]
