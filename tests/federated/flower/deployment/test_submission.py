import json
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

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
    Ended,
    Submitted,
    follow,
    stop,
    submit,
)
from tests.federated.flower.links import Link, free_port

YAML = (
    "seed: 1  # \"quoted\" and 'quoted', \\n is no newline\r\n"
    "name: ünï ∑ 🌻\n\tindented: [1, 2]\n\n"
    "text: |\n  = [tool.flwr] \"\"\"three\"\"\" '''three'''\n   \n"
) + "key: value\n" * 2000


def status_of(submitted: Submitted) -> str:
    with submission.speaking(submitted.connection) as client:
        told = client.ListRuns(ListRunsRequest(run_id=submitted.run))
    return told.run_dict[submitted.run].status.sub_status


def test_settings_arrive_as_they_were(link: Link) -> None:
    settings = {"text": YAML, "count": 3, "rate": 1e-5, "whole": 2.0, "on": True, "off": False}
    ended, lines = link.run(**settings)
    assert ended == Ended("completed", "")
    (told,) = [json.loads(line)["settings"] for line in lines if line.startswith("{")]
    found = {name: told[name] for name in settings}
    assert found == settings
    assert {name: type(value) for name, value in found.items()} == {
        name: type(value) for name, value in settings.items()
    }


def test_a_server_app_that_fails_is_told_with_its_reason(link: Link) -> None:
    ended, lines = link.run(plan="fail")
    assert ended.status == "failed"
    assert "the sums do not add up" in ended.detail
    assert any("ArithmeticError" in line for line in lines)


def test_what_check_raises_stops_the_run(link: Link) -> None:
    submitted = link.submit(plan="wait")
    lines: list[str] = []
    until = time.monotonic() + 60
    asked: list[float] = []

    class Enough(Exception):
        pass

    def check() -> None:
        asked.append(time.monotonic())
        if any(line.startswith("{") for line in lines):
            raise Enough
        assert time.monotonic() < until

    with pytest.raises(Enough):
        follow(submitted, say=lines.append, check=check)
    assert status_of(submitted) == "stopped"
    assert max(b - a for a, b in pairwise(asked)) < 10  # not only when the log has something


def test_a_run_stopped_from_elsewhere_is_told_as_stopped(link: Link) -> None:
    submitted = link.submit(plan="wait")
    found: list[Ended] = []
    thread = threading.Thread(
        target=lambda: found.append(follow(submitted, say=lambda line: None)), daemon=True
    )
    thread.start()
    stop(submitted)
    thread.join(30)
    assert [ended.status for ended in found] == ["stopped"]
    stop(submitted)  # twice is as good as once


def test_a_run_nobody_knows_of_is_not_waited_for(link: Link) -> None:
    start = time.monotonic()
    with pytest.raises(FedlensError, match=r"does not know run 1: .*; run the same"):
        follow(Submitted(link.connection, 1), say=print)
    assert time.monotonic() - start < 30


def test_a_superlink_that_is_not_there_is_lost_after_some_patience() -> None:
    nowhere = Connection(f"127.0.0.1:{free_port()}", insecure=True)
    with pytest.raises(FedlensError, match="does not answer"):
        submit(nowhere, settings={}, client_ref="a:b", server_ref="a:c")
    start = time.monotonic()
    with pytest.raises(FedlensError, match="then run the same command again"):
        follow(Submitted(nowhere, 1), say=print, patience=1.0)
    assert 1.0 < time.monotonic() - start < 30


def test_a_certificate_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(FedlensError, match=r"ca\.crt.*certificate"):
        submit(
            Connection("127.0.0.1:1", tmp_path / "ca.crt"),
            settings={},
            client_ref="a:b",
            server_ref="a:c",
        )


def test_tls_to_a_plain_port_is_a_sentence(link: Link) -> None:
    with pytest.raises(FedlensError, match="certificate and `insecure`"):
        submit(Connection(link.connection.address), settings={}, client_ref="a:b", server_ref="a:c")


def test_lines_are_whole_and_a_log_that_breaks_off_goes_on_where_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[float] = []

    def stream(_: ControlHttpClient, request: StreamLogsRequest) -> Iterator[StreamLogsResponse]:
        asked.append(request.after_timestamp)
        if len(asked) == 1:
            yield StreamLogsResponse(log_output="one\ntw", latest_timestamp=1.5)
            raise httpx.ReadError("gone")
        yield StreamLogsResponse(log_output="o\n\nthree\nfo", latest_timestamp=2.5)
        time.sleep(0.3)  # the end of a run may be known before its last words
        yield StreamLogsResponse(log_output="ur", latest_timestamp=3.5)

    def watch(_: Submitted, news: submission.News, over: threading.Event, __: float) -> None:
        while len(asked) < 2:
            over.wait(0.05)
        news.put(Ended("completed", ""))

    monkeypatch.setattr(ControlHttpClient, "StreamLogs", stream)
    monkeypatch.setattr(submission, "_watch", watch)
    monkeypatch.setattr(submission, "PULSE", 0.05)
    lines: list[str] = []
    ended = follow(Submitted(Connection("nowhere:1", insecure=True), 1), say=lines.append)
    assert ended.status == "completed"
    assert lines == ["one", "two", "", "three", "four"]
    assert asked == [0.0, 1.5]


def test_a_short_silence_of_the_superlink_is_borne(monkeypatch: pytest.MonkeyPatch) -> None:
    from flwr.proto.control_pb2 import ListRunsResponse

    tries: list[int] = []

    def runs(_: ControlHttpClient, request: ListRunsRequest) -> ListRunsResponse:
        tries.append(request.run_id)
        if len(tries) in (1, 2):
            raise httpx.ConnectError("gone")
        found = ListRunsResponse()
        status = found.run_dict[5].status
        status.status, status.sub_status = (
            ("running", "") if len(tries) < 5 else ("finished", "failed")
        )
        return found

    monkeypatch.setattr(ControlHttpClient, "ListRuns", runs)
    monkeypatch.setattr(ControlHttpClient, "StreamLogs", lambda *_: iter(()))
    monkeypatch.setattr(submission, "PULSE", 0.05)
    submitted = Submitted(Connection("nowhere:1", insecure=True), 5)
    assert follow(submitted, say=print, patience=20.0) == Ended("failed", "")
    assert tries == [5] * 5


def test_a_bundle_is_the_same_for_all_values_of_its_settings() -> None:
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
    told = {"address": "here:1", "root_certificates": "certificates/ca.crt", "insecure": False}
    (tmp_path / "superlink.json").write_text(json.dumps(told))
    expected = Connection("here:1", tmp_path / "certificates" / "ca.crt", False)
    assert Connection.read(tmp_path) == expected
    (tmp_path / "superlink.json").write_text(
        json.dumps({"address": "here:2", "root_certificates": None, "insecure": True})
    )
    assert Connection.read(tmp_path) == Connection("here:2", None, True)
