"""A federation by Flower's deployment engine: its SuperLink, its nodes, and runs submitted to it.

All lies in one folder (see docs/how-to/flower.md); a node elsewhere needs its own part of it.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from fedlens.errors import FedlensError
from fedlens.experiments import compose
from fedlens.experiments.config import Config
from fedlens.experiments.flower import SERVER_SHARD
from fedlens.experiments.signals import StopRequest
from fedlens.federated.flower.child import COLOURS, Child
from fedlens.federated.flower.credentials import make_certificates, make_node_key
from fedlens.federated.flower.processes import SuperLink, SuperNode, register
from fedlens.federated.flower.submission import Connection, follow, submit

CONNECTED = "is connected to"  # what a node says once it is
NOT_TAKEN = "Failed to activate SuperNode"  # Flower's words for an unknown key, or one in use
AFTERLIFE = 90.0  # seconds for which a node that was killed may count as online
RETRY = 5.0
PATIENCE = 120.0  # seconds that a process has to come up
LOST = 60.0  # seconds after which a SuperLink that does not answer is given up
LOOK = 0.3  # seconds between two looks at logs and processes

log = logging.getLogger(__name__)


def credentials(folder: Path, nodes: Sequence[str], hosts: Sequence[str], *, renew: bool) -> None:
    """Certificates for the SuperLink on `hosts`, and a key for every node; for development."""
    make_certificates(folder / "certificates", hosts, renew=renew)
    for name in nodes:
        make_node_key(folder / "keys" / name)


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


def serve_node(
    folder: Path,
    name: str,
    connection: Connection,
    stop: StopRequest,
    *,
    shard: Path,
    reconnect: float | None,
) -> None:
    """A node, until `stop`: the SuperNode is a child, its clients' work is done here."""
    from fedlens.experiments.flower_apps import client
    from fedlens.federated.flower.executor import serve

    start = partial(SuperNode, folder, name, connection=connection, shard=shard)
    with _accepted(partial(start, reconnect=reconnect), stop) as supernode:
        log.info("%s %s %s", name, CONNECTED, connection.address)

        def over() -> bool:
            if supernode.ended() is not None and stop.name is None:
                raise FedlensError(f"{name} lost its SuperNode: see {supernode.log}.")
            return stop.name is not None

        serve(
            client,
            runtime_api_address=supernode.runtime,
            secret_file=supernode.secret,
            insecure=True,  # on this host alone, and with a secret
            stop=over,
        )


def _accepted(start: Callable[[], SuperNode], stop: StopRequest) -> SuperNode:
    """A SuperNode that the SuperLink has taken; after a kill its old self counts for a minute."""
    until = time.monotonic() + AFTERLIFE
    while True:
        supernode = start()
        try:
            supernode.wait_until_ready(patience=PATIENCE)
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
    folder: Path, nodes: int, *, address: str, insecure: bool, say: Callable[[str], None]
) -> Iterator[dict[str, Child]]:
    """SuperLink and nodes as children of this process; all of them are gone afterwards."""
    names = [f"node-{number}" for number in range(nodes)]
    if not insecure:
        credentials(folder, names, ["127.0.0.1", "localhost"], renew=False)
    with ExitStack() as stack:
        say("starting the SuperLink …")
        link = stack.enter_context(superlink(folder, address=address, insecure=insecure))
        children: dict[str, Child] = {"superlink": link, "serverapp": link.executor}
        command = [str(Path(sys.executable).with_name("fedlens")), "flower", "node"]
        for name in names:
            child = Child(
                f"The node {name}",
                [*command, name, "--federation", str(folder)],
                log=folder / "logs" / f"{name}-work.log",
                environment=dict(os.environ),
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
                if name == "superlink":
                    raise FedlensError(f"The SuperLink ended (exit code {code}): see {child.log}.")
                say(f"[{name}] ended (exit code {code})")
        stop.check()
        time.sleep(LOOK)


def run_by_superlink(config: Config, stop: StopRequest, say: Callable[[str], None]) -> None:
    """Hands the run to the federation's SuperLink and follows it to its end."""
    submitted = submit(
        Connection.read(Path(config.engine.federation)),
        settings={"config": compose.to_yaml(config)},
        client_ref="fedlens.experiments.flower_apps:client",
        server_ref="fedlens.experiments.flower_apps:server",
    )
    plain = lambda line: say(COLOURS.sub("", line))  # noqa: E731
    ended = follow(submitted, say=plain, check=stop.check, patience=LOST)
    if ended.status != "completed":
        why = ended.detail.removeprefix("ServerApp failed with exception: ")
        raise FedlensError(why or f"Flower's run was {ended.status}.")
