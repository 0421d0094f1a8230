"""A federation's processes on this host: the SuperLink, the executor of its ServerApps, SuperNodes.

They use TLS, and the SuperLink accepts only registered nodes and users, unless `insecure` is set.
https://flower.ai/docs/framework/explanation-flower-architecture.html
"""

import json
import os
import re
import secrets
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import tomli_w
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, UnregisterNodeRequest
from flwr.supercore.address import is_port_in_use, parse_address, resolve_bind_address
from flwr.supercore.error import ApiErrorCode
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from fedlens.errors import FedlensError, shown
from fedlens.federated.flower.deployment.accounts import OWNER, USERS
from fedlens.federated.flower.deployment.child_process import ChildProcess
from fedlens.federated.flower.deployment.credentials import (
    Certificates,
    is_host,
    make_node_key,
    write_private,
)
from fedlens.federated.flower.deployment.submission import (
    Connection,
    RequestRefused,
    control_client,
)
from fedlens.files import replacing, write_json

CONNECTED = re.compile(r"SuperNode ID: (\d+)")
NO_VARIABLES: Mapping[str, str] = {}
NO_SETTINGS: Mapping[str, str | int] = {}
NODE_REFUSED = "Failed to activate SuperNode"  # Flower's log line: the key is unknown, or in use
ADVICE = {  # text in Flower's log when a node cannot connect → what to do
    NODE_REFUSED: "register its public key at the SuperLink; if it is registered, a node with the "
    "same key is online, or was killed less than a minute ago",
    "CERTIFICATE_VERIFY_FAILED": "give it the SuperLink's ca.crt, and an address that the "
    "SuperLink's certificate covers",
    "Connection attempt failed": "check that the SuperLink runs at this address, and that both or "
    "neither are insecure",
}
ACCOUNTS = [sys.executable, "-m", "fedlens.federated.flower.deployment.accounts"]
MAKE_KEYS = "make it with `fedlens flower keys`, for development"
COPY_KEYS = "copy it from the SuperLink's host, where `fedlens flower keys` made it"


class SuperLink(ChildProcess):
    """Flower's server: it passes messages on, and keeps its nodes and runs across restarts.

    It listens at `address`; port 0 chooses a free one. An executor starts the ServerApps, so that
    they are children of this process too; it shares a secret with the SuperLink, so that no other
    process on the network can take its place.
    """

    def __init__(
        self,
        folder: Path,
        *,
        address: str,
        insecure: bool = False,
        environment: Mapping[str, str] = NO_VARIABLES,
    ) -> None:
        folder = folder.absolute()
        address = _available(address)
        certificates, users = Certificates(folder / "certificates"), folder / USERS
        self.connection = Connection(
            resolve_bind_address(address),
            root_certificates=None if insecure else certificates.authority,
            insecure=insecure,
            user_key=None if insecure else users / OWNER,
        )
        secret = _new_secret(folder / "keys" / "superlink.secret")
        variables = _environment(folder, environment)
        command = [_script("flower-superlink")] if insecure else [*ACCOUNTS, str(users)]
        command += _listen(address)
        command += ["--database", str(folder / "flwr" / "superlink.db")]
        command += ["--disable-runtime-dependency-installation"]
        command += ["--isolation", "process", "--superexec-auth-secret-file", str(secret)]
        if insecure:
            command += ["--insecure"]
        else:
            command += ["--ssl-ca-certfile", _existing(certificates.authority, MAKE_KEYS)]
            command += ["--ssl-certfile", _existing(certificates.server, MAKE_KEYS)]
            command += ["--ssl-keyfile", _existing(certificates.server_key, MAKE_KEYS)]
            command += ["--enable-supernode-auth"]
            make_node_key(users / OWNER)  # it registers nodes as a user
        _write_connection(folder, self.connection)
        super().__init__(
            "The SuperLink",
            command,
            log=folder / "logs" / "superlink.log",
            environment=variables,
        )
        self.executor = ChildProcess(
            "The executor of ServerApps",
            [
                *(_script("flower-superexec"), "--runtime-api-address", self.connection.address),
                *("--superexec-auth-secret-file", str(secret)),
                *_tls_options(self.connection),
            ],
            log=folder / "logs" / "serverapp.log",
            environment=variables,
        )

    def wait_until_ready(self, *, timeout: float = 60.0) -> None:
        self.wait_until(lambda: _answers(self.connection), timeout=timeout)

    def stop(self) -> None:
        self.executor.stop()
        super().stop()

    def close(self) -> None:
        self.stop()
        self.executor.close()
        super().close()


class SuperNode(ChildProcess):
    """One node: it receives messages from the SuperLink for the ClientApp that trains on its shard.

    `app_worker.serve` takes them from the Runtime API at `runtime`, with the file `secret`. A node
    that cannot reach the SuperLink, or loses it, tries again for `reconnect` seconds.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        connection: Connection,
        shard: Path,
        reconnect: float = 600.0,
        settings: Mapping[str, str | int] = NO_SETTINGS,
    ) -> None:
        """`settings` are the node's own, which its app reads beside its shard."""
        folder = folder.absolute()
        self.runtime = _available("127.0.0.1:0")
        self.secret = _new_secret(folder / "keys" / f"{name}.secret")
        command = [_script("flower-supernode"), "--superlink", connection.address]
        command += _tls_options(connection)
        if not connection.insecure:
            key = _existing(folder / "keys" / name, COPY_KEYS)
            command += ["--auth-supernode-private-key", key]
        command += _listen(self.runtime)
        own = {"shard": str(shard.absolute()), **settings}
        words = (f"{name}={json.dumps(value)}" for name, value in own.items())
        command += ["--node-config", " ".join(words)]
        command += ["--isolation", "process", "--superexec-auth-secret-file", str(self.secret)]
        command += ["--max-wait-time", str(reconnect)]
        super().__init__(
            f"The SuperNode {name}",
            command,
            log=folder / "logs" / f"{name}.log",
            environment=_environment(folder),
            advice=ADVICE,
        )

    def node_id(self) -> int | None:
        """Its id at the SuperLink; None until it is connected."""
        match = CONNECTED.search(self.output())
        return int(match[1]) if match else None

    def wait_until_ready(
        self, *, timeout: float = 60.0, check: Callable[[], None] = lambda: None
    ) -> None:
        """`check` may raise to stop waiting."""

        def ready() -> bool:
            check()
            return self.node_id() is not None

        self.wait_until(ready, timeout=timeout)


@dataclass(frozen=True)
class RegisteredNode:
    """A node as the SuperLink lists it."""

    node_id: int
    name: str
    status: str  # registered, online, offline or unregistered
    public_key: bytes


def registered_nodes(connection: Connection) -> list[RegisteredNode]:
    """All nodes that are registered at the SuperLink."""
    with control_client(connection) as client:
        nodes = client.ListNodes(ListNodesRequest()).nodes_info
    return [RegisteredNode(one.node_id, one.name, one.status, one.public_key) for one in nodes]


def accept_only(connection: Connection, public_keys: Iterable[Path]) -> None:
    """Registers the nodes with these keys at the SuperLink, and removes all others."""
    keys = list(public_keys)
    for key in keys:
        register(connection, key)
    known = {_node_key(key) for key in keys}
    for node in registered_nodes(connection):
        if node.public_key not in known and node.status != "unregistered":
            with control_client(connection) as client:
                client.UnregisterNode(UnregisterNodeRequest(node_id=node.node_id))


def _node_key(public_key: Path) -> bytes:
    """A node's public key as Flower stores it."""
    key = load_ssh_public_key(public_key.read_bytes())
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise FedlensError(
            f"{public_key} is not the public key of a node: give one of type EC, as made "
            "by `fedlens flower keys`."
        )
    return public_key_to_bytes(key)


def register(connection: Connection, public_key: Path) -> int:
    """Registers a node's public key at the SuperLink, unless it is; returns the node's id."""
    encoded = _node_key(public_key)
    try:
        with control_client(connection) as client:
            return client.RegisterNode(
                RegisterNodeRequest(public_key=encoded, name=public_key.stem)
            ).node_id
    except RequestRefused as error:
        if error.code != ApiErrorCode.PUBLIC_KEY_ALREADY_IN_USE:
            raise
    nodes = registered_nodes(connection)
    return next(one.node_id for one in nodes if one.public_key == encoded)


def _answers(connection: Connection) -> bool:
    try:
        registered_nodes(connection)
    except FedlensError:
        return False
    return True


def _write_connection(folder: Path, connection: Connection) -> None:
    """For `Connection.read`, and for Flower's own commands with FLWR_HOME=folder/flwr."""
    root = connection.root_certificates
    write_json(
        folder / "superlink.json",
        {
            "address": connection.address,
            "root_certificates": str(root.relative_to(folder)) if root else None,
            "insecure": connection.insecure,
        },
    )
    superlink: dict[str, str | bool] = {"address": connection.address}
    superlink |= {"root-certificates": str(root)} if root else {"insecure": True}
    config = {"superlink": {"default": "fedlens", "fedlens": superlink}}
    with replacing(folder / "flwr" / "config.toml") as temporary:
        temporary.write_text(tomli_w.dumps(config), encoding="utf-8")


def _tls_options(connection: Connection) -> list[str]:
    if connection.insecure:
        return ["--insecure"]
    root = connection.root_certificates
    return ["--root-certificates", _existing(root.absolute(), COPY_KEYS)] if root else []


def _existing(path: Path, remedy: str) -> str:
    if not path.is_file():
        raise FedlensError(f"{path} is missing: {remedy}.")
    return str(path)


def check_address(address: str) -> None:
    """Refuses what is not host:port."""
    host, _, _ = address.rpartition(":")
    if parse_address(address) is None or not is_host(host.strip("[]")):
        raise FedlensError(
            f"'{shown(address)}' is not an address: write host:port, such as 127.0.0.1:9092."
        )


def _available(address: str) -> str:
    """The address, with a free port in place of port 0; raises if its port is in use."""
    check_address(address)
    host, _, port = address.rpartition(":")
    if is_port_in_use(address):
        raise FedlensError(f"{address} is in use: stop what listens there, or choose another port.")
    if port != "0":
        return address
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    with socket.socket(family) as bound:
        bound.bind((host.strip("[]"), 0))
        return f"{host}:{bound.getsockname()[1]}"


def _listen(address: str) -> list[str]:
    host, _, port = address.rpartition(":")
    return ["--host", host.strip("[]"), "--port", port]


def _new_secret(path: Path) -> Path:
    """A file with a new secret, which a process and its executor share until they end."""
    with replacing(path) as temporary:
        write_private(temporary, secrets.token_bytes(32))
    return path


def _script(name: str) -> str:
    """A command installed beside this Python, whatever the PATH is."""
    return str(Path(sys.executable).with_name(name))


def _environment(folder: Path, extra: Mapping[str, str] = NO_VARIABLES) -> dict[str, str]:
    """Flower's commands are beside this Python; no telemetry, no files in the home folder."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    flower = {
        "FLWR_HOME": str(folder / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }
    return {**os.environ, "PATH": path, **flower, **extra}
