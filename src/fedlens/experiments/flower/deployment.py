"""A federation by Flower's deployment engine: its SuperLink, its nodes, and runs submitted to it.

All files are in one folder (see docs/how-to/flower.md); a node on another host needs its own part.
Importing this module loads no torch, which a SuperLink does not need.
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
from fedlens.config.checks import check_device
from fedlens.config.schema import Config
from fedlens.data.partitions import node_name
from fedlens.errors import FedlensError
from fedlens.experiments.flower import SERVER_PLUGINS, SERVER_SHARD
from fedlens.federated.flower.deployment.accounts import OWNER, USERS
from fedlens.federated.flower.deployment.child_process import ANSI_COLOURS, ChildProcess
from fedlens.federated.flower.deployment.credentials import (
    Certificates,
    make_certificates,
    make_node_key,
)
from fedlens.federated.flower.deployment.processes import (
    NODE_REFUSED,
    SuperLink,
    SuperNode,
    accept_only,
    check_address,
)
from fedlens.federated.flower.deployment.submission import Connection, follow, submit
from fedlens.federated.flower.plain import printable
from fedlens.plugins import only_loaded
from fedlens.runtime.stop import StopRequest

CONNECTED = "is connected to"  # what a node logs once it is
OFFLINE_GRACE_S = 90.0  # a node that was killed may count as online for so long
RETRY_S = 5.0
START_TIMEOUT_S = 120.0  # for a process to come up
LOST_AFTER_S = 60.0  # a SuperLink that does not answer for so long is given up
POLL_S = 0.3  # between two looks at logs and processes

log = logging.getLogger(__name__)


def credentials(
    folder: Path, nodes: int, hosts: Sequence[str] = (), *, renew: bool = False
) -> None:
    """Certificates for the SuperLink on `hosts`, a key for every node and one for the user."""
    make_certificates(folder / "certificates", hosts, renew=renew)
    make_node_key(folder / USERS / OWNER)
    for number in range(nodes):
        make_node_key(folder / "keys" / node_name(number))


@contextmanager
def superlink(
    folder: Path, *, address: str, insecure: bool, plugins: Sequence[Path] = ()
) -> Iterator[SuperLink]:
    """A SuperLink that evaluates on the server's data and accepts the nodes whose keys are here.

    Its runs have the rows of `plugins`, and load no others.
    """
    server = folder / "server"
    if not server.is_dir():
        raise FedlensError(
            f"{folder} has no data for a server: write them with `fedlens flower partition`."
        )
    environment = {
        SERVER_SHARD: str(server.absolute()),
        SERVER_PLUGINS: os.pathsep.join(str(path.absolute()) for path in plugins),
    }
    with SuperLink(folder, address=address, insecure=insecure, environment=environment) as link:
        link.wait_until_ready(timeout=START_TIMEOUT_S)
        if not insecure:
            accept_only(link.connection, sorted((folder / "keys").glob("*.pub")))
        yield link


def connection_of(
    folder: Path,
    *,
    address: str | None = None,
    root_certificates: Path | None = None,
    insecure: bool = False,
) -> Connection:
    """How a node reaches its SuperLink: as the folder says, unless an argument says otherwise."""
    if insecure and root_certificates:
        raise FedlensError("--insecure uses no TLS: leave --root-certificates out.")
    if address is None:
        connection = Connection.read(folder)
    else:
        check_address(address)
        connection = Connection(address, Certificates(folder / "certificates").authority)
    if root_certificates:
        return replace(connection, root_certificates=root_certificates, insecure=False)
    if insecure:
        return replace(connection, root_certificates=None, insecure=True)
    return connection


def run_node(
    folder: Path,
    name: str,
    connection: Connection,
    stop: StopRequest,
    *,
    shard: Path,
    reconnect: float,
    device: str = "auto",
    threads: int | None = None,
) -> None:
    """A node, until `stop`: the SuperNode is a child, its clients' work is done here.

    They train on `device` with so many threads, whatever a server says.
    """
    from fedlens.data.partitions import shards
    from fedlens.experiments.flower.apps import DEVICE, THREADS, client
    from fedlens.federated.flower.deployment.app_worker import serve

    shards.read_node(shard)  # refuses to start a node without its data
    check_device("--device ", device)
    settings: dict[str, str | int] = {DEVICE: device}
    settings |= {} if threads is None else {THREADS: threads}
    start = partial(
        SuperNode,
        folder,
        name,
        connection=connection,
        shard=shard,
        reconnect=reconnect,
        settings=settings,
    )
    log.info("%s connects to the SuperLink at %s", name, connection.address)
    with _accepted(start, stop, max(START_TIMEOUT_S, reconnect)) as supernode:
        log.info("%s %s %s", name, CONNECTED, connection.address)

        def stopped() -> bool:
            if supernode.exit_code() is not None and stop.name is None:
                raise FedlensError(f"{name} lost its SuperNode: see {supernode.log}.")
            return stop.name is not None

        with only_loaded():  # whatever row a server names
            serve(
                client,
                runtime_api_address=supernode.runtime,
                secret_file=supernode.secret,
                stop=stopped,
            )


def _accepted(start: Callable[[], SuperNode], stop: StopRequest, patience: float) -> SuperNode:
    """A SuperNode that the SuperLink has accepted; after a kill the old one counts for a minute."""
    until = time.monotonic() + OFFLINE_GRACE_S
    while True:
        supernode = start()
        try:
            supernode.wait_until_ready(timeout=patience, check=stop.check)
            return supernode
        except FedlensError:
            refused = NODE_REFUSED in supernode.output()
            supernode.close()
            stop.check()
            if not refused or time.monotonic() > until:
                raise
            log.info("the SuperLink does not accept this node yet: trying again")
            time.sleep(RETRY_S)
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
    print_line: Callable[[str], None],
    through: Callable[[str], str] = lambda address: address,
    plugins: Sequence[Path] = (),
    threads: int | None = None,
) -> Iterator[dict[str, ChildProcess]]:
    """SuperLink and nodes as children of this process; all of them are gone afterwards.

    Nodes connect to the address that `through` makes of the SuperLink's, and share the cores
    unless `threads` or OMP_NUM_THREADS is set. All of them load `plugins`.
    """
    from fedlens.runtime.threads import available

    if not insecure:
        credentials(folder, nodes)
    with ExitStack() as stack:
        print_line("starting the SuperLink …")
        link = stack.enter_context(
            superlink(folder, address=address, insecure=insecure, plugins=plugins)
        )
        children: dict[str, ChildProcess] = {"superlink": link, "serverapp": link.executor}
        command = [str(Path(sys.executable).with_name("fedlens")), "flower", "node"]
        options = ["--federation", str(folder), "--superlink", through(link.connection.address)]
        options += ["--insecure"] if insecure else []
        options += [word for path in plugins for word in ("--plugin", str(path))]
        options += [] if threads is None else ["--threads", str(threads)]
        shared = {"OMP_NUM_THREADS": str(max(1, available() // nodes))}
        names = [node_name(number) for number in range(nodes)]
        for name in names:
            child = ChildProcess(
                f"The node {name}",
                [*command, name, *options],
                log=folder / "logs" / f"{name}-work.log",
                environment={**shared, **os.environ},
            )
            children[name] = stack.enter_context(child)
        for name in names:
            print_line(f"starting {name} …")
            children[name].wait_until(partial(_connected, children[name]), timeout=START_TIMEOUT_S)
        try:
            yield children
        finally:
            for name in names:  # they end at the same time; the SuperLink is closed after them
                children[name].stop()


def _connected(child: ChildProcess) -> bool:
    return CONNECTED in child.output()


def watch(
    children: dict[str, ChildProcess], stop: StopRequest, print_line: Callable[[str], None]
) -> None:
    """Prints what they log and which ended, until `stop`; it ends with the SuperLink."""
    read = dict.fromkeys(children, 0)
    gone: set[str] = set()
    while True:
        for name, child in children.items():
            lines = child.output().splitlines()
            for line in lines[read[name] :]:
                print_line(f"[{name}] {printable(line)}")
            read[name] = len(lines)
            if name not in gone and (code := child.exit_code()) is not None:
                gone.add(name)
                if name in ("superlink", "serverapp"):  # without either there are no runs
                    raise FedlensError(f"{child.name} ended (exit code {code}): see {child.log}.")
                print_line(f"[{name}] ended (exit code {code})")
        stop.check()
        time.sleep(POLL_S)


def submit_run(config: Config, stop: StopRequest, print_line: Callable[[str], None]) -> None:
    """Submits the run to the federation's SuperLink and follows it to its end."""
    submitted = submit(
        Connection.read(Path(config.engine.federation)),
        settings={"config": compose.to_yaml(config)},
        client_ref="fedlens.experiments.flower.apps:client",
        server_ref="fedlens.experiments.flower.apps:server",
    )
    plain = lambda line: print_line(printable(ANSI_COLOURS.sub("", line)))  # noqa: E731
    ended = follow(submitted, print_line=plain, check=stop.check, timeout=LOST_AFTER_S)
    if ended.status != "completed":
        why = ended.detail.removeprefix("ServerApp failed with exception: ")
        raise FedlensError(why or f"Flower's run was {ended.status}.")
