"""The processes of a federation on this host: a SuperLink, the executor of its ServerApps, nodes.

Between them is TLS, and the SuperLink takes only nodes whose keys it was told of, unless `insecure`
says otherwise. What they keep lies in the federation's folder, so a restarted SuperLink knows its
nodes. https://flower.ai/docs/framework/explanation-flower-architecture.html
"""

import json
import os
import re
import secrets
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import tomli_w
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest
from flwr.supercore.address import is_port_in_use, parse_address, resolve_bind_address
from flwr.supercore.error import ApiErrorCode
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from fedlens.errors import FedlensError
from fedlens.federated.flower.deployment.child_process import Child
from fedlens.federated.flower.deployment.credentials import Certificates, write_private
from fedlens.federated.flower.deployment.submission import Connection, Refused, speaking
from fedlens.files import replacing, write_json

CONNECTED = re.compile(r"SuperNode ID: (\d+)")
NOTHING: Mapping[str, str] = {}
NOT_TAKEN = "Failed to activate SuperNode"  # Flower's words for an unknown key, or one in use
ADVICE = {  # by what Flower writes when a node is refused
    NOT_TAKEN: "register its public key at the SuperLink; if that was done, a "
    "node with the same key is online, or was killed less than a minute ago",
    "CERTIFICATE_VERIFY_FAILED": "give it the ca.crt of the SuperLink that it is to trust, and an "
    "address that the SuperLink's certificate covers",
    "Connection attempt failed": "see that the SuperLink runs at the address that it was given, "
    "and that both or neither are insecure",
}
MADE = "`fedlens flower keys` makes it, for development"
COPIED = "copy it from the SuperLink's host, where `fedlens flower keys` made it"


class SuperLink(Child):
    """Flower's server, which knows its nodes and runs across restarts, and carries messages.

    `address` is where it listens; port 0 takes a free one. ServerApps are started by an executor
    beside it, not by the SuperLink itself: so they are our children too, and nobody else on the
    network can take their place, since the two share a secret.
    """

    def __init__(
        self,
        folder: Path,
        *,
        address: str,
        insecure: bool = False,
        environment: Mapping[str, str] = NOTHING,
    ) -> None:
        folder = folder.absolute()
        address = _free(address)
        certificates = Certificates(folder / "certificates")
        self.connection = Connection(
            resolve_bind_address(address),
            root_certificates=None if insecure else certificates.authority,
            insecure=insecure,
        )
        secret = _fresh_secret(folder / "keys" / "superlink.secret")
        surroundings = _environment(folder, environment)
        command = [_script("flower-superlink"), *_listen(address)]
        command += ["--database", str(folder / "flwr" / "superlink.db")]
        command += ["--disable-runtime-dependency-installation"]
        command += ["--isolation", "process", "--superexec-auth-secret-file", str(secret)]
        if insecure:
            command += ["--insecure"]
        else:
            command += ["--ssl-ca-certfile", _present(certificates.authority, MADE)]
            command += ["--ssl-certfile", _present(certificates.server, MADE)]
            command += ["--ssl-keyfile", _present(certificates.server_key, MADE)]
            command += ["--enable-supernode-auth"]
        _tell(folder, self.connection)
        super().__init__(
            "The SuperLink",
            command,
            log=folder / "logs" / "superlink.log",
            environment=surroundings,
        )
        self.executor = Child(
            "The executor of ServerApps",
            [
                *(_script("flower-superexec"), "--runtime-api-address", self.connection.address),
                *("--superexec-auth-secret-file", str(secret)),
                *_trust(self.connection),
            ],
            log=folder / "logs" / "serverapp.log",
            environment=surroundings,
        )

    def wait_until_ready(self, *, patience: float = 60.0) -> None:
        self.wait(lambda: _answers(self.connection), patience=patience)

    def stop(self) -> None:
        self.executor.stop()
        super().stop()

    def close(self) -> None:
        self.stop()
        self.executor.close()
        super().close()


class SuperNode(Child):
    """One node: it takes messages from the SuperLink for the ClientApp that trains on its shard.

    Our own executor takes them from the node's Runtime API at `runtime`, and shows `secret`. A
    node that does not find the SuperLink, or loses it, looks for it for `reconnect` seconds.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        connection: Connection,
        shard: Path,
        reconnect: float = 600.0,
    ) -> None:
        folder = folder.absolute()
        self.runtime = _free("127.0.0.1:0")
        self.secret = _fresh_secret(folder / "keys" / f"{name}.secret")
        command = [_script("flower-supernode"), "--superlink", connection.address]
        command += _trust(connection)
        if not connection.insecure:
            command += ["--auth-supernode-private-key", _present(folder / "keys" / name, COPIED)]
        command += _listen(self.runtime)
        command += ["--node-config", f"shard={json.dumps(str(shard.absolute()))}"]
        command += ["--isolation", "process", "--superexec-auth-secret-file", str(self.secret)]
        command += ["--max-wait-time", str(reconnect)]
        super().__init__(
            f"The SuperNode {name}",
            command,
            log=folder / "logs" / f"{name}.log",
            environment=_environment(folder),
            advice=ADVICE,
        )

    def connected(self) -> int | None:
        """The number that the SuperLink knows it by, once it does."""
        found = CONNECTED.search(self.said())
        return int(found[1]) if found else None

    def wait_until_ready(
        self, *, patience: float = 60.0, check: Callable[[], None] = lambda: None
    ) -> None:
        """`check` may raise to stop waiting."""

        def ready() -> bool:
            check()
            return self.connected() is not None

        self.wait(ready, patience=patience)


@dataclass(frozen=True)
class Registered:
    number: int
    name: str
    status: str  # registered, online, offline or unregistered
    public_key: bytes


def nodes(connection: Connection) -> list[Registered]:
    """The nodes that the SuperLink knows."""
    with speaking(connection) as client:
        found = client.ListNodes(ListNodesRequest()).nodes_info
    return [Registered(one.node_id, one.name, one.status, one.public_key) for one in found]


def register(connection: Connection, public_key: Path) -> int:
    """Tells the SuperLink of a node's public key; its number there, also if it was known before."""
    key = load_ssh_public_key(public_key.read_bytes())
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise FedlensError(f"{public_key} is not the public key of a node, which is of type EC.")
    told = public_key_to_bytes(key)
    try:
        with speaking(connection) as client:
            return client.RegisterNode(
                RegisterNodeRequest(public_key=told, name=public_key.stem)
            ).node_id
    except Refused as error:
        if error.code != ApiErrorCode.PUBLIC_KEY_ALREADY_IN_USE:
            raise
    return next(one.number for one in nodes(connection) if one.public_key == told)


def _answers(connection: Connection) -> bool:
    try:
        nodes(connection)
    except FedlensError:
        return False
    return True


def _tell(folder: Path, connection: Connection) -> None:
    """Where the SuperLink is: for us, and for Flower's own commands with FLWR_HOME=folder/flwr."""
    root = connection.root_certificates
    write_json(
        folder / "superlink.json",
        {
            "address": connection.address,
            "root_certificates": str(root.relative_to(folder)) if root else None,
            "insecure": connection.insecure,
        },
    )
    known: dict[str, str | bool] = {"address": connection.address}
    known |= {"root-certificates": str(root)} if root else {"insecure": True}
    with replacing(folder / "flwr" / "config.toml") as temporary:
        told = {"superlink": {"default": "fedlens", "fedlens": known}}
        temporary.write_text(tomli_w.dumps(told), encoding="utf-8")


def _trust(connection: Connection) -> list[str]:
    if connection.insecure:
        return ["--insecure"]
    root = connection.root_certificates
    return ["--root-certificates", _present(root.absolute(), COPIED)] if root else []


def _present(path: Path, remedy: str) -> str:
    if not path.is_file():
        raise FedlensError(f"{path} is missing: {remedy}.")
    return str(path)


def _free(address: str) -> str:
    """The address with a port that nobody listens on: its own, or any if it is 0."""
    host, _, port = address.rpartition(":")
    if parse_address(address) is None or not host:
        raise FedlensError(f"'{address}' is not an address to listen on: say 127.0.0.1:9092.")
    if is_port_in_use(address):
        raise FedlensError(f"{address} is in use: stop what listens there, or choose another port.")
    if port != "0":
        return address
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    with socket.socket(family) as found:
        found.bind((host.strip("[]"), 0))
        return f"{host}:{found.getsockname()[1]}"


def _listen(address: str) -> list[str]:
    host, _, port = address.rpartition(":")
    return ["--host", host.strip("[]"), "--port", port]


def _fresh_secret(path: Path) -> Path:
    """A secret for this one start, which a process and its executor share."""
    with replacing(path) as temporary:
        write_private(temporary, secrets.token_bytes(32))
    return path


def _script(name: str) -> str:
    """A command of the environment we run in, whatever the PATH is."""
    return str(Path(sys.executable).with_name(name))


def _environment(folder: Path, more: Mapping[str, str] = NOTHING) -> dict[str, str]:
    """Flower's own children are found beside us; nothing is reported, looked up or left at home."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    flower = {
        "FLWR_HOME": str(folder / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }
    return {**os.environ, "PATH": path, **flower, **more}
