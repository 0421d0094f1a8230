"""Runs at a real SuperLink, and at one whose API is replaced."""

import json
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("flwr")
from flwr.common.config import get_fab_config, get_metadata_from_config
from flwr.proto.control_pb2 import ListRunsRequest, StreamLogsRequest, StreamLogsResponse
from flwr.supercore.control import ControlHttpClient

from fedlens.errors import FedlensError
from fedlens.federated.flower.deployment import submission
from fedlens.federated.flower.deployment.submission import (
    Connection,
    RunEnded,
    SubmittedRun,
    follow,
    stop,
    submit,
)
from fedlens.federated.flower.refusals import Refusal
from tests.federated.flower import links
from tests.federated.flower.links import Link, free_port

pytestmark = pytest.mark.slow

YAML = (
    "seed: 1  # \"quoted\" and 'quoted', \\n is no newline\r\n"
    "name: ünï ∑ 🌻\n\tindented: [1, 2]\n\n"
    "text: |\n  = [tool.flwr] \"\"\"three\"\"\" '''three'''\n   \n"
) + "key: value\n" * 2000


SETTINGS = {"text": YAML, "count": 3, "rate": 1e-5, "whole": 2.0, "on": True, "off": False}


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Link]:
    """A real SuperLink with a node; it ends with this module, for it polls as long as it lives."""
    with links.started(tmp_path_factory.mktemp("federation")) as started:
        yield started


@pytest.fixture(scope="module")
def completed(link: Link) -> list[dict[str, Any]]:
    """What the apps of a run that went to its end have printed: the server's line comes first."""
    ended, lines = link.run(values="[[1.5, 2.5], [-1.0], [4.0]]", **SETTINGS)
    assert ended == RunEnded("completed", "")
    return [json.loads(line) for line in lines if line.startswith("{")]


def status_of(run: SubmittedRun) -> str:
    with submission.control_client(run.connection) as client:
        response = client.ListRuns(ListRunsRequest(run_id=run.run_id))
    return response.run_dict[run.run_id].status.sub_status


def test_settings_arrive_unchanged(completed: list[dict[str, Any]]) -> None:
    received = {name: completed[0]["settings"][name] for name in SETTINGS}
    assert received == SETTINGS
    assert {name: type(value) for name, value in received.items()} == {
        name: type(value) for name, value in SETTINGS.items()
    }


def test_one_process_serves_a_whole_federation(link: Link, completed: list[dict[str, Any]]) -> None:
    """With a real SuperLink, SuperNode and ServerApp; one process counts all messages."""
    first, failed, last = completed[1:]
    assert first["values"] == [3.0, 5.0]
    assert failed["error"] == Refusal.FAILED
    assert last["values"] == [8.0]
    assert first["pid"] == last["pid"] == link.worker
    assert first["text"] == last["text"] == YAML
    assert abs(last["answered"] - first["answered"]) == 1


def test_a_failed_server_app_is_reported_with_its_reason(link: Link) -> None:
    ended, lines = link.run(plan="fail")
    assert ended.status == "failed"
    assert "the sums do not add up" in ended.detail
    assert any("ArithmeticError" in line for line in lines)


def test_an_exception_of_check_stops_the_run(link: Link) -> None:
    run = link.submit(plan="wait")
    lines: list[str] = []
    until = time.monotonic() + 60
    checked: list[float] = []

    class Stopped(Exception):
        pass

    def check() -> None:
        checked.append(time.monotonic())
        if any(line.startswith("{") for line in lines):
            raise Stopped
        assert time.monotonic() < until

    with pytest.raises(Stopped):
        follow(run, print_line=lines.append, check=check)
    assert status_of(run) == "stopped"
    assert max(b - a for a, b in pairwise(checked)) < 10  # also while the log is silent


def test_a_run_stopped_by_another_process_is_reported_as_stopped(link: Link) -> None:
    run = link.submit(plan="wait")
    results: list[RunEnded] = []
    thread = threading.Thread(
        target=lambda: results.append(follow(run, print_line=lambda line: None)), daemon=True
    )
    thread.start()
    stop(run)
    thread.join(30)
    assert [ended.status for ended in results] == ["stopped"]
    stop(run)  # a second stop has no effect


def test_an_unknown_run_is_an_error(link: Link) -> None:
    start = time.monotonic()
    with pytest.raises(FedlensError, match=r"does not know run 1, .*: run the same"):
        follow(SubmittedRun(link.connection, 1), print_line=print)
    assert time.monotonic() - start < 30


def test_an_unreachable_superlink_is_an_error_after_a_timeout() -> None:
    nowhere = Connection(f"127.0.0.1:{free_port()}", insecure=True)
    with pytest.raises(FedlensError, match="does not answer"):
        submit(nowhere, settings={}, client_ref="a:b", server_ref="a:c")
    start = time.monotonic()
    with pytest.raises(FedlensError, match="then run the same command again"):
        follow(SubmittedRun(nowhere, 1), print_line=print, timeout=1.0)
    assert 1.0 < time.monotonic() - start < 30


def test_a_missing_certificate_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FedlensError, match=r"ca\.crt.*certificate"):
        submit(
            Connection("127.0.0.1:1", tmp_path / "ca.crt"),
            settings={},
            client_ref="a:b",
            server_ref="a:c",
        )


def test_tls_to_a_port_without_tls_is_an_error(link: Link) -> None:
    with pytest.raises(FedlensError, match="certificate and `insecure`"):
        submit(Connection(link.connection.address), settings={}, client_ref="a:b", server_ref="a:c")


def test_a_log_stream_that_breaks_off_is_resumed_at_the_same_character(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requested: list[float] = []

    def stream(_: ControlHttpClient, request: StreamLogsRequest) -> Iterator[StreamLogsResponse]:
        requested.append(request.after_timestamp)
        if len(requested) == 1:
            yield StreamLogsResponse(log_output="one\ntw", latest_timestamp=1.5)
            raise httpx.ReadError("gone")
        yield StreamLogsResponse(log_output="o\n\nthree\nfo", latest_timestamp=2.5)
        time.sleep(0.3)  # the run's end may be known before the end of its log
        yield StreamLogsResponse(log_output="ur", latest_timestamp=3.5)

    def watch(_: SubmittedRun, events: submission.Events, done: threading.Event, __: float) -> None:
        while len(requested) < 2:
            done.wait(0.05)
        events.put(RunEnded("completed", ""))

    monkeypatch.setattr(ControlHttpClient, "StreamLogs", stream)
    monkeypatch.setattr(submission, "_watch", watch)
    monkeypatch.setattr(submission, "POLL_S", 0.05)
    lines: list[str] = []
    ended = follow(SubmittedRun(Connection("nowhere:1", insecure=True), 1), print_line=lines.append)
    assert ended.status == "completed"
    assert lines == ["one", "two", "", "three", "four"]
    assert requested == [0.0, 1.5]


def test_a_short_outage_of_the_superlink_is_tolerated(monkeypatch: pytest.MonkeyPatch) -> None:
    from flwr.proto.control_pb2 import ListRunsResponse

    tries: list[int] = []

    def runs(_: ControlHttpClient, request: ListRunsRequest) -> ListRunsResponse:
        tries.append(request.run_id)
        if len(tries) in (1, 2):
            raise httpx.ConnectError("gone")
        response = ListRunsResponse()
        status = response.run_dict[5].status
        status.status, status.sub_status = (
            ("running", "") if len(tries) < 5 else ("finished", "failed")
        )
        return response

    monkeypatch.setattr(ControlHttpClient, "ListRuns", runs)
    monkeypatch.setattr(ControlHttpClient, "StreamLogs", lambda *_: iter(()))
    monkeypatch.setattr(submission, "POLL_S", 0.05)
    run = SubmittedRun(Connection("nowhere:1", insecure=True), 5)
    assert follow(run, print_line=print, timeout=20.0) == RunEnded("failed", "")
    assert tries == [5] * 5


def test_a_bundle_does_not_depend_on_the_values_of_the_settings() -> None:
    bundles = {
        submission._bundle({"text": text, "count": count}, "a.b:client", "a.b:server")
        for text, count in (("", 0), (YAML, 7))
    }
    (content,) = bundles
    config = get_fab_config(content)
    assert get_metadata_from_config(config)[0] == "fedlens/fedlens-run"
    assert config["tool"]["flwr"]["app"]["components"] == {
        "serverapp": "a.b:server",
        "clientapp": "a.b:client",
    }


def test_a_connection_is_read_from_the_folder_of_a_federation(tmp_path: Path) -> None:
    with pytest.raises(FedlensError, match="fedlens flower up"):
        Connection.read(tmp_path)
    content = {"address": "here:1", "root_certificates": "certificates/ca.crt", "insecure": False}
    (tmp_path / "superlink.json").write_text(json.dumps(content))
    expected = Connection("here:1", tmp_path / "certificates" / "ca.crt", False)
    assert Connection.read(tmp_path) == expected
    (tmp_path / "superlink.json").write_text(
        json.dumps({"address": "here:2", "root_certificates": None, "insecure": True})
    )
    assert Connection.read(tmp_path) == Connection("here:2", None, True)
