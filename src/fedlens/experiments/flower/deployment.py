"""A federation by Flower's deployment engine: its SuperLink, its nodes, and runs submitted to it.

All lies in one folder (see docs/how-to/flower.md); a node elsewhere needs its own part of it.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from fedlens.config import compose
from fedlens.config.schema import Config
from fedlens.data import shards
from fedlens.errors import FedlensError
from fedlens.experiments.flower.clients import SERVER_SHARD
from fedlens.federated.flower.deployment.child_process import COLOURS, Child
from fedlens.federated.flower.deployment.credentials import (
    Certificates,
    make_certificates,
    make_node_key,
)
from fedlens.federated.flower.deployment.processes import NOT_TAKEN, SuperLink, SuperNode, register
from fedlens.federated.flower.deployment.submission import Connection, follow, submit
from fedlens.runtime.stop import StopRequest
from fedlens.runtime.threads import available

CONNECTED = "is connected to"  # what a node says once it is
AFTERLIFE = 90.0  # seconds for which a node that was killed may count as online
RETRY = 5.0
PATIENCE = 120.0  # seconds that a process has to come up
LOST = 60.0  # seconds after which a SuperLink that does not answer is given up
LOOK = 0.3  # seconds between two looks at logs and processes

log = logging.getLogger(__name__)


def credentials(
    folder: Path, nodes: int, hosts: Sequence[str] = (), *, renew: bool = False
) -> None:
    """Certificates for the SuperLink on `hosts`, and a key for every node; for development."""
    make_certificates(folder / "certificates", hosts, renew=renew)
    for number in range(nodes):
        make_node_key(folder / "keys" / shards.node_name(number))


@contextmanager
def superlink(folder: Path, *, address: str, insecure: bool) -> Iterator[SuperLink]:
    """A SuperLink that evaluates on the server's data and knows the nodes whose keys lie here."""
    server = folder / "server"
    if not server.is_dir():
        raise FedlensError(
            f"{folder} has no data for a server: `fedlens flower partition` deals them."
        )
    environment = {SERVER_SHARD: str(server.absolute())}
    with SuperLink(folder, address=address, insecure=insecure, environment=environment) as link:
        link.wait_until_ready(patience=PATIENCE)
        for key in [] if insecure else sorted((folder / "keys").glob("*.pub")):
            register(link.connection, key)
        yield link


def connection_of(
    folder: Path,
    *,
    address: str | None = None,
    root_certificates: Path | None = None,
    insecure: bool = False,
) -> Connection:
    """How a node reaches its SuperLink: as the folder says, but for what is told."""
    if insecure and root_certificates:
        raise FedlensError("Without TLS nothing is trusted: leave --root-certificates out.")
    if address is None:
        found = Connection.read(folder)
    else:
        found = Connection(address, Certificates(folder / "certificates").authority)
    if root_certificates:
        return replace(found, root_certificates=root_certificates, insecure=False)
    return replace(found, root_certificates=None, insecure=True) if insecure else found


def serve_node(
    folder: Path,
    name: str,
    connection: Connection,
    stop: StopRequest,
    *,
    shard: Path,
    reconnect: float,
) -> None:
    """A node, until `stop`: the SuperNode is a child, its clients' work is done here."""
    from fedlens.experiments.flower.apps import client
    from fedlens.federated.flower.deployment.app_worker import serve

    shards.read_node(shard)  # a node without its data would be of no use to anybody
    start = partial(
        SuperNode, folder, name, connection=connection, shard=shard, reconnect=reconnect
    )
    log.info("%s looks for the SuperLink at %s", name, connection.address)
    with _accepted(start, stop, max(PATIENCE, reconnect)) as supernode:
        log.info("%s %s %s", name, CONNECTED, connection.address)

        def over() -> bool:
            if supernode.ended() is not None and stop.name is None:
                raise FedlensError(f"{name} lost its SuperNode: see {supernode.log}.")
            return stop.name is not None

        serve(
            client,
            runtime_api_address=supernode.runtime,
            secret_file=supernode.secret,
            stop=over,
        )


def _accepted(start: Callable[[], SuperNode], stop: StopRequest, patience: float) -> SuperNode:
    """A SuperNode that the SuperLink has taken; after a kill its old self counts for a minute."""
    until = time.monotonic() + AFTERLIFE
    while True:
        supernode = start()
        try:
            supernode.wait_until_ready(patience=patience, check=stop.check)
            return supernode
        except FedlensError:
            refused = NOT_TAKEN in supernode.said()
            supernode.close()
            stop.check()
            if not refused or time.monotonic() > until:
                raise
            log.info("the SuperLink does not take this node yet: trying again")
            time.sleep(RETRY)
        except BaseException:
            supernode.close()
            raise


@contextmanager
def local_federation(
    folder: Path,
    nodes: int,
    *,
    address: str,
    insecure: bool,
    say: Callable[[str], None],
    through: Callable[[str], str] = lambda address: address,
) -> Iterator[dict[str, Child]]:
    """SuperLink and nodes as children of this process; all of them are gone afterwards.

    Nodes meet the SuperLink where `through` says, given its address, and share the cores among
    them unless OMP_NUM_THREADS is set.
    """
    if not insecure:
        credentials(folder, nodes)
    with ExitStack() as stack:
        say("starting the SuperLink …")
        link = stack.enter_context(superlink(folder, address=address, insecure=insecure))
        children: dict[str, Child] = {"superlink": link, "serverapp": link.executor}
        command = [str(Path(sys.executable).with_name("fedlens")), "flower", "node"]
        where = ["--federation", str(folder), "--superlink", through(link.connection.address)]
        where += ["--insecure"] if insecure else []
        threads = {"OMP_NUM_THREADS": str(max(1, available() // nodes))}
        names = [shards.node_name(number) for number in range(nodes)]
        for name in names:
            child = Child(
                f"The node {name}",
                [*command, name, *where],
                log=folder / "logs" / f"{name}-work.log",
                environment={**threads, **os.environ},
            )
            children[name] = stack.enter_context(child)
        for name in names:
            say(f"starting {name} …")
            children[name].wait(partial(_connected, children[name]), patience=PATIENCE)
        yield children


def _connected(child: Child) -> bool:
    return CONNECTED in child.said()


def watch(children: dict[str, Child], stop: StopRequest, say: Callable[[str], None]) -> None:
    """Says what they log, and who ended, until `stop`; the SuperLink's end is everybody's."""
    read = dict.fromkeys(children, 0)
    gone: set[str] = set()
    while True:
        for name, child in children.items():
            lines = child.said().splitlines()
            for line in lines[read[name] :]:
                say(f"[{name}] {line}")
            read[name] = len(lines)
            if name not in gone and (code := child.ended()) is not None:
                gone.add(name)
                if name in ("superlink", "serverapp"):  # without either there are no runs
                    raise FedlensError(f"{child.name} ended (exit code {code}): see {child.log}.")
                say(f"[{name}] ended (exit code {code})")
        stop.check()
        time.sleep(LOOK)


def run_by_superlink(config: Config, stop: StopRequest, say: Callable[[str], None]) -> None:
    """Hands the run to the federation's SuperLink and follows it to its end."""
    submitted = submit(
        Connection.read(Path(config.engine.federation)),
        settings={"config": compose.to_yaml(config)},
        client_ref="fedlens.experiments.flower.apps:client",
        server_ref="fedlens.experiments.flower.apps:server",
    )
    plain = lambda line: say(COLOURS.sub("", line))  # noqa: E731
    ended = follow(submitted, say=plain, check=stop.check, patience=LOST)
    if ended.status != "completed":
        why = ended.detail.removeprefix("ServerApp failed with exception: ")
        raise FedlensError(why or f"Flower's run was {ended.status}.")
