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
from fedlens.federated.flower.deployment import child_process
from fedlens.federated.flower.deployment.child_process import Child
from fedlens.federated.flower.deployment.credentials import make_certificates, make_node_key
from fedlens.federated.flower.deployment.processes import SuperLink, SuperNode, nodes, register
from fedlens.federated.flower.deployment.submission import Connection

SOON = 60.0  # seconds, for what takes a few on an idle machine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("federation")
    make_certificates(made / "certificates")
    for name in ("node-0", "unknown"):
        make_node_key(made / "keys" / name)
    return made


@pytest.fixture(scope="module")
def link(folder: Path) -> Iterator[SuperLink]:
    with SuperLink(folder, address="127.0.0.1:0") as started:
        started.wait_until_ready()
        register(started.connection, folder / "keys" / "node-0.pub")
        yield started


def run(script: str, *, log: Path) -> Child:
    return Child("It", ["/bin/sh", "-c", script], log=log, environment=dict(os.environ))


def alive(group: int) -> int:
    """How many processes of the group there are, without those only waiting to be reaped."""
    told = subprocess.run(["ps", "-A", "-o", "pgid=,stat="], capture_output=True, text=True)
    rows = [line.split() for line in told.stdout.splitlines()]
    return sum(int(pgid) == group and not state.startswith("Z") for pgid, state in rows)


def eventually(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SOON
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def status(link: SuperLink) -> dict[str, str]:
    return {one.name: one.status for one in nodes(link.connection)}


def private_key(folder: Path, name: str) -> ec.EllipticCurvePrivateKey:
    key = load_ssh_private_key((folder / "keys" / name).read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def fleet(
    link: SuperLink, signing: ec.EllipticCurvePrivateKey, claimed: ec.EllipticCurvePrivateKey
) -> FleetHttpClient:
    """A client that signs with one key and says it is the owner of another."""
    root = link.connection.root_certificates
    assert root is not None
    signs = NodeAuthHttpInterceptor(signing, claimed.public_key())
    return FleetHttpClient.from_server_address(
        link.connection.address, False, root.read_bytes(), [signs]
    )


def refused(node: SuperNode, match: str) -> None:
    with node, pytest.raises(FedlensError, match=match) as told:
        node.wait_until_ready()
    assert node.ended() == 1
    assert "Exit Code: 305" in str(told.value)  # of its log
    assert eventually(lambda: alive(node.pid) == 0)


def test_a_registered_node_connects_and_leaves_in_good_order(folder: Path, link: SuperLink) -> None:
    number = register(link.connection, folder / "keys" / "node-0.pub")  # once more
    with SuperNode(folder, "node-0", connection=link.connection, shard=folder / "a shard") as node:
        node.wait_until_ready()
        assert node.connected() == number
        assert status(link) == {"node-0": "online"}
        with (  # nor may others on this host take its messages
            RuntimeHttpClient.from_server_address(node.runtime, True, None, []) as client,
            pytest.raises(httpx.HTTPStatusError, match="401"),
        ):
            client.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-clientapp"]))
    assert node.ended() == 0
    assert eventually(lambda: alive(node.pid) == 0)
    assert status(link) == {"node-0": "offline"}


def test_an_unknown_node_is_refused_and_told_to_register(folder: Path, link: SuperLink) -> None:
    before = status(link)
    node = SuperNode(folder, "unknown", connection=link.connection, shard=folder)
    refused(node, "register its public key")
    assert status(link) == before


def test_a_node_that_signs_with_another_key_is_refused(folder: Path, link: SuperLink) -> None:
    known, unknown = private_key(folder, "node-0"), private_key(folder, "unknown")
    asked = ActivateNodeRequest(
        public_key=public_key_to_bytes(known.public_key()), heartbeat_interval=30
    )
    with (
        fleet(link, signing=unknown, claimed=known) as client,
        pytest.raises(httpx.HTTPStatusError, match="401"),
    ):
        client.ActivateNode(asked)


def test_a_node_cannot_register_itself(folder: Path, link: SuperLink) -> None:
    key = private_key(folder, "unknown")
    asked = RegisterNodeFleetRequest(public_key=public_key_to_bytes(key.public_key()))
    with fleet(link, key, key) as client, pytest.raises(httpx.HTTPStatusError, match="412"):
        client.RegisterNode(asked)


def test_a_node_in_plain_text_is_refused(folder: Path, link: SuperLink) -> None:
    plain = Connection(link.connection.address, insecure=True)
    node = SuperNode(folder, "plain", connection=plain, shard=folder, reconnect=1.0)
    refused(node, "both or neither are insecure")


def test_a_request_in_plain_text_gets_no_answer(link: SuperLink) -> None:
    host, port = link.connection.address.split(":")
    with socket.create_connection((host, int(port)), timeout=SOON) as raw:
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
    refused(node, r"give it the ca\.crt")


def test_who_lacks_the_secret_cannot_run_serverapps(link: SuperLink) -> None:
    root = link.connection.root_certificates
    assert root is not None
    with (
        RuntimeHttpClient.from_server_address(
            link.connection.address, False, root.read_bytes(), []
        ) as client,
        pytest.raises(httpx.HTTPStatusError, match="401"),
    ):
        client.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-serverapp"]))
    assert link.executor.ended() is None
    assert eventually(lambda: "Connection successful" in link.executor.said())


def test_the_folder_tells_us_and_flower_where_the_superlink_is(
    folder: Path, link: SuperLink
) -> None:
    assert Connection.read(folder) == link.connection
    told = json.loads((folder / "superlink.json").read_text())
    assert told["root_certificates"] == "certificates/ca.crt"
    config = tomllib.loads((folder / "flwr" / "config.toml").read_text())["superlink"]
    assert config[config["default"]] == {
        "address": link.connection.address,
        "root-certificates": str(link.connection.root_certificates),
    }


def test_a_port_in_use_is_told_of_before_anything_starts(tmp_path: Path, link: SuperLink) -> None:
    with pytest.raises(FedlensError, match="is in use"):
        SuperLink(tmp_path, address=link.connection.address)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("address", ["9092", "http://127.0.0.1:9092", "127.0.0.1:many"])
def test_what_is_no_address_is_refused(tmp_path: Path, address: str) -> None:
    with pytest.raises(FedlensError, match="not an address"):
        SuperLink(tmp_path, address=address)


def test_an_insecure_superlink_restarts_and_knows_its_nodes(tmp_path: Path) -> None:
    make_node_key(tmp_path / "keys" / "node-0")
    with SuperLink(tmp_path, address="127.0.0.1:0", insecure=True) as first:
        first.wait_until_ready()
        number = register(first.connection, tmp_path / "keys" / "node-0.pub")
    assert eventually(lambda: alive(first.pid) == alive(first.executor.pid) == 0)
    with SuperLink(tmp_path, address=first.connection.address, insecure=True) as again:
        again.wait_until_ready()
        assert [one.number for one in nodes(again.connection)] == [number]
        connection = Connection.read(tmp_path)
        assert connection.insecure
        with SuperNode(tmp_path, "any", connection=connection, shard=tmp_path) as node:
            node.wait_until_ready()
        assert eventually(lambda: alive(node.pid) == 0)


def test_a_superlink_that_cannot_start_says_why(tmp_path: Path) -> None:
    make_certificates(tmp_path / "certificates").server_key.write_text("nonsense")
    with (
        SuperLink(tmp_path, address="127.0.0.1:0") as link,
        pytest.raises(FedlensError, match=r"The SuperLink ended at its start(.|\n)*SSLError"),
    ):
        link.wait_until_ready()


def test_missing_credentials_are_named_before_anything_starts(
    folder: Path, link: SuperLink, tmp_path: Path
) -> None:
    with pytest.raises(FedlensError, match=r"ca\.crt is missing: `fedlens flower keys`"):
        SuperLink(tmp_path, address="127.0.0.1:0")
    with pytest.raises(FedlensError, match="node-9 is missing: copy it from the SuperLink's host"):
        SuperNode(folder, "node-9", connection=link.connection, shard=folder)
    assert not (folder / "logs" / "node-9.log").exists()


def test_nothing_outlives_us_even_when_we_are_killed(tmp_path: Path) -> None:
    script = """
        import os, sys, time
        from pathlib import Path
        from fedlens.federated.flower.deployment.child_process import Child
        stubborn = "trap '' TERM INT HUP; sleep 600 & sleep 600"
        command = ["/bin/sh", "-c", stubborn]
        started = Child("It", command, log=Path(sys.argv[1]), environment=os.environ)
        print(started.pid, flush=True)
        time.sleep(600)
    """
    us = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        text=True,
    )
    with us:
        assert us.stdout is not None
        group = int(us.stdout.readline())
        grown = eventually(lambda: alive(group) == 4)  # a shell, two that sleep, and the watcher
        us.kill()
    assert grown
    assert eventually(lambda: alive(group) == 0)


def test_closing_ends_the_children_of_a_child_too(tmp_path: Path) -> None:
    with run("sleep 600 & echo ready; sleep 600", log=tmp_path / "log") as started:
        started.wait(lambda: "ready" in started.said(), patience=SOON)
        assert eventually(lambda: alive(started.pid) == 4)
    assert eventually(lambda: alive(started.pid) == 0)
    assert started.ended() == -signal.SIGTERM


def test_what_a_dead_child_leaves_behind_ends_as_soon_as_it_is_seen(tmp_path: Path) -> None:
    with run("sleep 600 & echo ready; sleep 600", log=tmp_path / "log") as started:
        started.wait(lambda: "ready" in started.said(), patience=SOON)
        os.kill(started.pid, signal.SIGKILL)
        assert eventually(lambda: started.ended() == -signal.SIGKILL)
        assert eventually(lambda: alive(started.pid) == 0)


def test_a_child_that_will_not_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "GRACE", 0.3)
    stubborn = run("trap '' TERM; echo ready; while :; do sleep 1; done", log=tmp_path / "log")
    stubborn.wait(lambda: "ready" in stubborn.said(), patience=SOON)
    stubborn.close()
    assert stubborn.ended() == -signal.SIGKILL
    assert eventually(lambda: alive(stubborn.pid) == 0)
    stubborn.close()  # once more is fine


def test_a_child_that_ends_early_is_told_of_with_its_last_words(tmp_path: Path) -> None:
    script = "echo INFO: all is well; printf '\\033[91mno luck\\033[0m\\n'; exit 3"
    with (
        run(script, log=tmp_path / "log") as failed,
        pytest.raises(FedlensError, match=r"It ended at its start \(exit code 3\)") as told,
    ):
        failed.wait(lambda: False, patience=SOON)
    assert str(told.value).splitlines()[1:] == ["    no luck"]


def test_a_child_that_is_not_ready_in_time_is_told_of(tmp_path: Path) -> None:
    with (
        run("sleep 600", log=tmp_path / "log") as slow,
        pytest.raises(FedlensError, match="was not ready within 0 seconds"),
    ):
        slow.wait(lambda: False, patience=0.2)


def test_a_log_goes_on_but_a_new_child_is_judged_by_its_own_words(tmp_path: Path) -> None:
    for word in ("first", "second"):
        with run(f"echo {word}", log=tmp_path / "log") as started:
            assert eventually(lambda one=started: one.ended() == 0)  # type: ignore[misc]
            assert started.said() == f"{word}\n"
    assert (tmp_path / "log").read_text() == "first\nsecond\n"
