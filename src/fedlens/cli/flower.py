"""`fedlens flower`: deal the data, make keys, and start a federation's SuperLink and nodes."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from fedlens.cli.shared import PLAIN, Overrides, out

app = typer.Typer(
    help="Clients on nodes of their own, by Flower: deal the data, make keys, start servers.",
    no_args_is_help=True,
)

Experiment = Annotated[
    str, typer.Argument(help="A name from `fedlens config` with clients, or a YAML file.")
]
Folder = Annotated[
    Path, typer.Option("--federation", help="The folder of the federation, on this host.")
]
Nodes = Annotated[int, typer.Option("--nodes", help="How many nodes the clients live on.")]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="No TLS and no node authentication: anybody can read and join. For trying out only.",
    ),
]
Address = Annotated[
    str, typer.Option("--address", help="Where the SuperLink listens; port 0: any that is free.")
]
FOLDER = Path("federation")
LOOPBACK = "127.0.0.1:9092"


@app.command()
def partition(
    experiment: Experiment,
    overrides: Overrides = None,
    nodes: Nodes = 4,
    folder: Folder = FOLDER,
) -> None:
    """Deal an experiment's data: server/ for the SuperLink's host, node-0/, node-1/, … for nodes.

    Example: `fedlens flower partition quickstart_fedavg --nodes 4`
    """
    from fedlens.config.compose import compose
    from fedlens.experiments.local_data import deal
    from fedlens.runtime.stop import listening

    config = compose(experiment, overrides or [])
    with listening() as stop:
        made = deal(config, folder, nodes, stop.check)
    out.print(
        f"{folder} {'holds' if made else 'held already'} the data of {nodes} nodes and the server.",
        **PLAIN,
    )


@app.command()
def keys(
    nodes: Nodes = 4,
    host: Annotated[
        list[str] | None,
        typer.Option(help="A name or address nodes will use; may be given several times."),
    ] = None,
    folder: Folder = FOLDER,
    renew: Annotated[
        bool,
        typer.Option(
            "--renew",
            help="Make new ones in place of those there; nodes then need the new ca.crt.",
        ),
    ] = False,
) -> None:
    """Make certificates for the SuperLink and a key for each node: for development.

    In earnest, use certificates of your own authority and let each node make its own key.
    """
    from fedlens.federated.flower import require

    require()
    from fedlens.experiments.flower.deployment import credentials
    from fedlens.federated.flower.deployment.credentials import HERE

    credentials(folder, nodes, host or [], renew=renew)
    covered = ", ".join(dict.fromkeys([*HERE, *(host or [])]))
    out.print(f"{folder} has certificates for {covered} and {nodes} keys.", **PLAIN)


@app.command()
def superlink(
    folder: Folder = FOLDER, address: Address = LOOPBACK, insecure: Insecure = False
) -> None:
    """Start the SuperLink: it takes nodes whose public keys lie in keys/, and runs experiments.

    Runs it is given go to runs/ in the folder it is started from. Ctrl-C ends it.
    """
    from fedlens.federated.flower import require

    require()
    from fedlens.experiments.flower import deployment
    from fedlens.runtime.stop import listening

    with (
        listening() as stop,
        deployment.superlink(folder, address=address, insecure=insecure) as link,
    ):
        out.print(f"The SuperLink listens at {link.connection.address}.", **PLAIN)
        deployment.watch({"superlink": link, "serverapp": link.executor}, stop, _say)


@app.command()
def node(
    name: Annotated[str, typer.Argument(help="Its name: keys/NAME is its key, NAME/ its data.")],
    folder: Folder = FOLDER,
    superlink: Annotated[
        str | None, typer.Option(help="host:port; else as superlink.json in the folder says.")
    ] = None,
    root_certificates: Annotated[
        Path | None, typer.Option(help="The authority to trust; else certificates/ca.crt.")
    ] = None,
    shard: Annotated[Path | None, typer.Option(help="Its data, if not NAME/.")] = None,
    reconnect: Annotated[
        float, typer.Option(help="Seconds to look for a SuperLink that is gone, or not there yet.")
    ] = 600.0,
    insecure: Insecure = False,
) -> None:
    """Start a node with its own data; it serves until Ctrl-C, one message after another."""
    from fedlens.federated.flower import require

    require()
    from fedlens.experiments.flower import deployment
    from fedlens.runtime.stop import listening

    connection = deployment.connection_of(
        folder, address=superlink, root_certificates=root_certificates, insecure=insecure
    )
    with listening() as stop:
        deployment.serve_node(
            folder, name, connection, stop, shard=shard or folder / name, reconnect=reconnect
        )


@app.command()
def up(
    experiment: Experiment = "quickstart_fedavg",
    overrides: Overrides = None,
    nodes: Nodes = 4,
    folder: Folder = FOLDER,
    address: Address = LOOPBACK,
    run: Annotated[
        bool, typer.Option("--run", help="Run the experiment, then end the federation.")
    ] = False,
    insecure: Insecure = False,
) -> None:
    """Start a whole federation on this machine: data, keys, SuperLink, nodes; Ctrl-C ends it all.

    Its nodes share the cores, unless engine.threads_per_client or OMP_NUM_THREADS says otherwise.

    Example: `fedlens flower up --nodes 4 --run`
    """
    from fedlens.federated.flower import require

    require()
    from fedlens.config.compose import compose
    from fedlens.experiments.flower import deployment
    from fedlens.experiments.local_data import deal
    from fedlens.runtime.stop import listening

    words = [*(overrides or []), "engine=flower", f"engine.federation={folder}"]
    config = compose(experiment, words)
    with listening() as stop:
        deal(config, folder, nodes, stop.check)
        with deployment.local_federation(
            folder, nodes, address=address, insecure=insecure, say=_say
        ) as children:
            if run:
                from fedlens.cli.runs import finished
                from fedlens.experiments.run import start

                finished(start(config))
                return
            out.print(
                f"{nodes} nodes are connected. In another terminal:\n\n"
                f"    {shlex.join(['fedlens', 'run', experiment, *words])}\n",
                **PLAIN,
            )
            deployment.watch(children, stop, _say)


def _say(line: str) -> None:
    out.print(line, **PLAIN)
