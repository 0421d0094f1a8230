"""Real SuperLinks and SuperNodes on loopback, one SuperLink for most of the tests."""

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import textwrap
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs fedlens[flower]")

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.proto.fleet_pb2 import ActivateNodeRequest, RegisterNodeFleetRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedlens.errors import FedlensError
from fedlens.federated.flower.deployment import child_process, submission
from fedlens.federated.flower.deployment.child_process import ChildProcess
from fedlens.federated.flower.deployment.credentials import make_certificates, make_node_key
from fedlens.federated.flower.deployment.processes import (
    SuperLink,
    SuperNode,
    accept_only,
    register,
    registered_nodes,
)
from fedlens.federated.flower.deployment.submission import Connection, SubmittedRun

pytestmark = pytest.mark.slow

TIMEOUT_S = 60.0  # a few seconds are enough on an idle machine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("federation")
    make_certificates(folder / "certificates")
    for name in ("node-0", "unknown"):
        make_node_key(folder / "keys" / name)
    return folder


@pytest.fixture(scope="module")
def link(folder: Path) -> Iterator[SuperLink]:
    with SuperLink(folder, address="127.0.0.1:0") as started:
        started.wait_until_ready()
        register(started.connection, folder / "keys" / "node-0.pub")
        yield started


def run(script: str, *, log: Path) -> ChildProcess:
    return ChildProcess("It", ["/bin/sh", "-c", script], log=log, environment=dict(os.environ))


def alive(group: int) -> int:
    """The number of processes in the group, without zombies."""
    table = subprocess.run(["ps", "-A", "-o", "pgid=,stat="], capture_output=True, text=True)
    rows = [line.split() for line in table.stdout.splitlines()]
    return sum(int(pgid) == group and not state.startswith("Z") for pgid, state in rows)


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def status(link: SuperLink) -> dict[str, str]:
    return {one.name: one.status for one in registered_nodes(link.connection)}


def private_key(folder: Path, name: str) -> ec.EllipticCurvePrivateKey:
    key = load_ssh_private_key((folder / "keys" / name).read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def fleet_client(
    link: SuperLink, signing: ec.EllipticCurvePrivateKey, claimed: ec.EllipticCurvePrivateKey
) -> FleetHttpClient:
    """A client that signs with one key and claims to be the owner of another."""
    root = link.connection.root_certificates
    assert root is not None
    signature = NodeAuthHttpInterceptor(signing, claimed.public_key())
    return FleetHttpClient.from_server_address(
        link.connection.address, False, root.read_bytes(), [signature]
    )


def assert_refused(node: SuperNode, match: str) -> None:
    with node, pytest.raises(FedlensError, match=match) as error:
        node.wait_until_ready()
    assert node.exit_code() == 1
    assert "Exit Code: 305" in str(error.value)  # from its log
    assert eventually(lambda: alive(node.pid) == 0)


def test_a_registered_node_connects_and_disconnects(folder: Path, link: SuperLink) -> None:
    node_id = register(link.connection, folder / "keys" / "node-0.pub")  # a second time
    with SuperNode(folder, "node-0", connection=link.connection, shard=folder / "a shard") as node:
        node.wait_until_ready()
        assert node.node_id() == node_id
        assert status(link) == {"node-0": "online"}
        with (  # other processes on this host cannot take its messages
            RuntimeHttpClient.from_server_address(node.runtime, True, None, []) as client,
            pytest.raises(httpx.HTTPStatusError, match="401"),
        ):
            client.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-clientapp"]))
    assert node.exit_code() == 0
    assert eventually(lambda: alive(node.pid) == 0)
    assert status(link) == {"node-0": "offline"}


def test_an_unregistered_node_is_refused_with_advice(folder: Path, link: SuperLink) -> None:
    before = status(link)
    node = SuperNode(folder, "unknown", connection=link.connection, shard=folder)
    assert_refused(node, "register its public key")
    assert status(link) == before


def test_a_node_that_signs_with_another_key_is_refused(folder: Path, link: SuperLink) -> None:
    known, unknown = private_key(folder, "node-0"), private_key(folder, "unknown")
    request = ActivateNodeRequest(
        public_key=public_key_to_bytes(known.public_key()), heartbeat_interval=30
    )
    with (
        fleet_client(link, signing=unknown, claimed=known) as client,
        pytest.raises(httpx.HTTPStatusError, match="401"),
    ):
        client.ActivateNode(request)


def test_a_node_cannot_register_itself(folder: Path, link: SuperLink) -> None:
    key = private_key(folder, "unknown")
    request = RegisterNodeFleetRequest(public_key=public_key_to_bytes(key.public_key()))
    with fleet_client(link, key, key) as client, pytest.raises(httpx.HTTPStatusError, match="412"):
        client.RegisterNode(request)


def test_a_stranger_with_the_certificate_alone_is_refused_everything(
    folder: Path, link: SuperLink, tmp_path: Path
) -> None:
    """With ca.crt and no registered key: no list of nodes, no key registered, no app submitted."""
    before = status(link)
    make_node_key(tmp_path / "owner")
    strangers = [
        replace(link.connection, user_key=None),
        replace(link.connection, user_key=tmp_path / "owner"),
        replace(link.connection, user_key=folder / "keys" / "node-0"),  # a node is no user
    ]
    references = {"client_ref": "os:system", "server_ref": "os:system"}
    for stranger in strangers:
        for call in (
            lambda one=stranger: registered_nodes(one),
            lambda one=stranger: register(one, tmp_path / "owner.pub"),
            lambda one=stranger: submission.submit(one, settings={"a": 1}, **references),
            lambda one=stranger: submission.stop(SubmittedRun(one, 1)),
        ):
            with pytest.raises(FedlensError, match="does not accept this user"):
                call()
    trusting = ssl.create_default_context(cafile=link.connection.root_certificates)
    for method in ("list-runs", "start-run", "stream-logs", "list-nodes", "x"):
        url = f"https://{link.connection.address}/v1/control/{method}"
        for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": "Basic eDp4"}):
            answer = httpx.post(url, verify=trusting, headers=headers, content=b"")
            assert answer.status_code in (401, 404)
    assert status(link) == before


def test_a_node_whose_key_was_removed_is_removed_too(
    folder: Path, link: SuperLink, tmp_path: Path
) -> None:
    make_node_key(tmp_path / "leaving")
    keys = [folder / "keys" / "node-0.pub", tmp_path / "leaving.pub"]
    accept_only(link.connection, keys)
    assert status(link)["leaving"] == "registered"
    accept_only(link.connection, keys[:1])
    assert status(link).get("leaving", "unregistered") == "unregistered"
    assert "node-0" in status(link)


def test_logs_and_keys_are_private(folder: Path, link: SuperLink) -> None:
    assert link.log.stat().st_mode & 0o777 == link.executor.log.stat().st_mode & 0o777 == 0o600
    assert link.log.parent.stat().st_mode & 0o777 == 0o700
    assert (folder / "users" / "owner").stat().st_mode & 0o777 == 0o600


def test_a_node_without_tls_is_refused(folder: Path, link: SuperLink) -> None:
    plain = Connection(link.connection.address, insecure=True)
    node = SuperNode(folder, "plain", connection=plain, shard=folder, reconnect=1.0)
    assert_refused(node, "both or neither are insecure")


def test_a_request_without_tls_gets_no_answer(link: SuperLink) -> None:
    host, port = link.connection.address.split(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n")
        try:
            answer = raw.recv(1000)
        except ConnectionResetError:
            answer = b""
    assert b"HTTP" not in answer
    trusting = ssl.create_default_context(cafile=link.connection.root_certificates)
    health = httpx.get(f"https://{host}:{port}/health", verify=trusting)
    assert health.status_code == 200


def test_a_node_that_trusts_another_authority_refuses_the_superlink(
    folder: Path, link: SuperLink, tmp_path: Path
) -> None:
    other = make_certificates(tmp_path / "other")
    wrong = replace(link.connection, root_certificates=other.authority)
    node = SuperNode(folder, "node-0", connection=wrong, shard=folder)
    assert_refused(node, r"give it the SuperLink's ca\.crt")


def test_a_process_without_the_secret_cannot_run_serverapps(link: SuperLink) -> None:
    root = link.connection.root_certificates
    assert root is not None
    with (
        RuntimeHttpClient.from_server_address(
            link.connection.address, False, root.read_bytes(), []
        ) as client,
        pytest.raises(httpx.HTTPStatusError, match="401"),
    ):
        client.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-serverapp"]))
    assert link.executor.exit_code() is None
    assert eventually(lambda: "Connection successful" in link.executor.output())


def test_the_folder_has_the_connection_for_fedlens_and_for_flower(
    folder: Path, link: SuperLink
) -> None:
    assert Connection.read(folder) == link.connection
    content = json.loads((folder / "superlink.json").read_text())
    assert content["root_certificates"] == "certificates/ca.crt"
    config = tomllib.loads((folder / "flwr" / "config.toml").read_text())["superlink"]
    assert config[config["default"]] == {
        "address": link.connection.address,
        "root-certificates": str(link.connection.root_certificates),
    }


def test_a_port_in_use_is_an_error_before_anything_starts(tmp_path: Path, link: SuperLink) -> None:
    with pytest.raises(FedlensError, match="is in use"):
        SuperLink(tmp_path, address=link.connection.address)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("address", ["9092", "http://127.0.0.1:9092", "127.0.0.1:many"])
def test_an_invalid_address_is_rejected(tmp_path: Path, address: str) -> None:
    with pytest.raises(FedlensError, match="not an address"):
        SuperLink(tmp_path, address=address)


def test_a_superlink_that_cannot_start_is_an_error_with_its_log(tmp_path: Path) -> None:
    make_certificates(tmp_path / "certificates").server_key.write_text("nonsense")
    with (
        SuperLink(tmp_path, address="127.0.0.1:0") as link,
        pytest.raises(FedlensError, match=r"The SuperLink ended at its start(.|\n)*SSLError"),
    ):
        link.wait_until_ready()


def test_missing_credentials_are_named_before_anything_starts(
    folder: Path, link: SuperLink, tmp_path: Path
) -> None:
    with pytest.raises(
        FedlensError, match=r"ca\.crt is missing: make it with `fedlens flower keys`"
    ):
        SuperLink(tmp_path, address="127.0.0.1:0")
    with pytest.raises(FedlensError, match="node-9 is missing: copy it from the SuperLink's host"):
        SuperNode(folder, "node-9", connection=link.connection, shard=folder)
    assert not (folder / "logs" / "node-9.log").exists()


def test_no_child_outlives_a_killed_parent(tmp_path: Path) -> None:
    script = """
        import os, sys, time
        from pathlib import Path
        from fedlens.federated.flower.deployment.child_process import ChildProcess
        stubborn = "trap '' TERM INT HUP; sleep 600 & sleep 600"
        command = ["/bin/sh", "-c", stubborn]
        started = ChildProcess("It", command, log=Path(sys.argv[1]), environment=os.environ)
        print(started.pid, flush=True)
        time.sleep(600)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        group = int(parent.stdout.readline())
        # The shell, two sleeps, and the watcher.
        all_started = eventually(lambda: alive(group) == 4)
        parent.kill()
    assert all_started
    assert eventually(lambda: alive(group) == 0)


def test_closing_a_child_also_ends_its_children(tmp_path: Path) -> None:
    with run("sleep 600 & echo ready; sleep 600", log=tmp_path / "log") as started:
        started.wait_until(lambda: "ready" in started.output(), timeout=TIMEOUT_S)
        assert eventually(lambda: alive(started.pid) == 4)
    assert eventually(lambda: alive(started.pid) == 0)
    assert started.exit_code() == -signal.SIGTERM


def test_children_of_a_killed_child_end_when_its_exit_is_noticed(tmp_path: Path) -> None:
    with run("sleep 600 & echo ready; sleep 600", log=tmp_path / "log") as started:
        started.wait_until(lambda: "ready" in started.output(), timeout=TIMEOUT_S)
        os.kill(started.pid, signal.SIGKILL)
        assert eventually(lambda: started.exit_code() == -signal.SIGKILL)
        assert eventually(lambda: alive(started.pid) == 0)


def test_a_child_that_ignores_sigterm_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "STOP_TIMEOUT_S", 0.3)
    stubborn = run("trap '' TERM; echo ready; while :; do sleep 1; done", log=tmp_path / "log")
    stubborn.wait_until(lambda: "ready" in stubborn.output(), timeout=TIMEOUT_S)
    stubborn.close()
    assert stubborn.exit_code() == -signal.SIGKILL
    assert eventually(lambda: alive(stubborn.pid) == 0)
    stubborn.close()  # a second close has no effect


def test_a_child_that_ends_early_is_an_error_with_its_log(tmp_path: Path) -> None:
    script = "echo INFO: all is well; printf '\\033[91mno luck\\033[0m\\n'; exit 3"
    with (
        run(script, log=tmp_path / "log") as failed,
        pytest.raises(FedlensError, match=r"It ended at its start \(exit code 3\)") as error,
    ):
        failed.wait_until(lambda: False, timeout=TIMEOUT_S)
    assert str(error.value).splitlines()[1:] == ["    no luck"]


def test_a_child_that_is_not_ready_in_time_is_an_error(tmp_path: Path) -> None:
    with (
        run("sleep 600", log=tmp_path / "log") as slow,
        pytest.raises(FedlensError, match="was not ready within 0 seconds"),
    ):
        slow.wait_until(lambda: False, timeout=0.2)


def test_a_log_is_appended_but_output_is_that_of_the_new_child(tmp_path: Path) -> None:
    for word in ("first", "second"):
        with run(f"echo {word}", log=tmp_path / "log") as started:
            assert eventually(lambda one=started: one.exit_code() == 0)  # type: ignore[misc]
            assert started.output() == f"{word}\n"
    assert (tmp_path / "log").read_text() == "first\nsecond\n"
