"""`fedlens flower`: split the data, make keys, and start a federation's SuperLink and nodes."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from fedlens.cli.numbers import within
from fedlens.cli.shared import PLAIN, Commands, Overrides, Plugins, out
from fedlens.errors import FedlensError, shown

app = Commands(
    help="Clients on separate nodes, by Flower: split the data, make keys, start servers.",
    no_args_is_help=True,
)

Experiment = Annotated[
    str, typer.Argument(help="A federated experiment from `fedlens config`, or a YAML file.")
]
Folder = Annotated[Path, typer.Option("--federation", help="The federation's folder on this host.")]
Nodes = Annotated[
    int,
    typer.Option(
        "--nodes",
        callback=within("[1, 10000]"),
        help="The number of nodes to distribute the clients over.",
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="No TLS and no node authentication: anybody can read and join. For tests only.",
    ),
]
Address = Annotated[
    str, typer.Option("--address", help="The address of the SuperLink; port 0: any free port.")
]
FOLDER = Path("federation")
LOOPBACK = "127.0.0.1:9092"


@app.command()
def partition(
    experiment: Experiment,
    overrides: Overrides = None,
    nodes: Nodes = 4,
    folder: Folder = FOLDER,
    _plugins: Plugins = None,
) -> None:
    """Split an experiment's data: server/ for the SuperLink's host, node-0/, node-1/, … for nodes.

    Example: `fedlens flower partition quickstart_fedavg --nodes 4`
    """
    from fedlens.config.compose import compose
    from fedlens.experiments.local_data import write_shards
    from fedlens.runtime.stop import listening

    config = compose(experiment, overrides or [])
    with listening() as stop:
        made = write_shards(config, folder, nodes, stop.check)
    out.print(
        f"{folder} {'holds' if made else 'already held'} the data of {nodes} nodes and the server.",
        **PLAIN,
    )


@app.command()
def keys(
    nodes: Nodes = 4,
    host: Annotated[
        list[str] | None,
        typer.Option(help="A name or address that nodes will use; repeatable."),
    ] = None,
    folder: Folder = FOLDER,
    renew: Annotated[
        bool,
        typer.Option(
            "--renew",
            help="Replace existing ones; nodes then need the new ca.crt.",
        ),
    ] = False,
) -> None:
    """Make certificates for the SuperLink and a key for each node, for development.

    In production, use certificates of your own authority and let each node make its own key.
    """
    from fedlens.federated.flower import require

    require()
    from fedlens.experiments.flower.deployment import credentials
    from fedlens.federated.flower.deployment.credentials import LOCAL_HOSTS

    credentials(folder, nodes, host or [], renew=renew)
    covered = ", ".join(dict.fromkeys([*LOCAL_HOSTS, *(host or [])]))
    out.print(f"{folder} has certificates for {covered} and {nodes} keys.", **PLAIN)


@app.command()
def superlink(
    folder: Folder = FOLDER,
    address: Address = LOOPBACK,
    insecure: Insecure = False,
    plugins: Plugins = None,
) -> None:
    """Start the SuperLink: it accepts nodes whose public keys are in keys/, and runs experiments.

    Submitted runs are written to runs/ in the current folder, with the rows of its own plugins
    alone. Ctrl-C ends it.
    """
    from fedlens.federated.flower import require

    require()
    from fedlens.experiments.flower import deployment
    from fedlens.runtime.stop import listening

    with (
        listening() as stop,
        deployment.superlink(
            folder, address=address, insecure=insecure, plugins=plugins or []
        ) as link,
    ):
        out.print(f"The SuperLink listens at {link.connection.address}.", **PLAIN)
        deployment.watch({"superlink": link, "serverapp": link.executor}, stop, _print_line)


@app.command()
def node(
    name: Annotated[
        str, typer.Argument(help="The node's name: keys/NAME is its key, NAME/ its data.")
    ],
    folder: Folder = FOLDER,
    superlink: Annotated[
        str | None, typer.Option(help="host:port; default: from superlink.json in the folder.")
    ] = None,
    root_certificates: Annotated[
        Path | None, typer.Option(help="The authority to trust; default: certificates/ca.crt.")
    ] = None,
    shard: Annotated[Path | None, typer.Option(help="The node's data; default: NAME/.")] = None,
    reconnect: Annotated[
        float,
        typer.Option(
            callback=within("[0, 1e7]"),
            help="Seconds to wait for a SuperLink that is not reachable.",
        ),
    ] = 600.0,
    insecure: Insecure = False,
    _plugins: Plugins = None,
) -> None:
    """Start a node with its own data; it handles messages one by one until Ctrl-C.

    It loads the plugins of its own command line alone, and refuses a server whose experiment
    needs another one.
    """
    from fedlens.federated.flower import require

    require()
    from fedlens.config.schema import FOLDER_NAME
    from fedlens.experiments.flower import deployment
    from fedlens.runtime.stop import listening

    if name not in FOLDER_NAME:
        raise FedlensError(f"The node's name '{shown(name)}' must be {FOLDER_NAME}.")
    connection = deployment.connection_of(
        folder, address=superlink, root_certificates=root_certificates, insecure=insecure
    )
    with listening() as stop:
        deployment.run_node(
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
    plugins: Plugins = None,
) -> None:
    """Start a complete federation on this machine: data, keys, SuperLink, nodes. Ctrl-C ends it.

    The nodes share the cores, unless engine.threads_per_client or OMP_NUM_THREADS is set.

    Example: `fedlens flower up --nodes 4 --run`
    """
    from fedlens.federated.flower import require

    require()
    from fedlens.config.compose import compose, plugin_options
    from fedlens.experiments.flower import deployment
    from fedlens.experiments.local_data import write_shards
    from fedlens.runtime.stop import listening

    words = [*(overrides or []), "engine=flower", f"engine.federation={folder}"]
    config = compose(experiment, words)
    with listening() as stop:
        write_shards(config, folder, nodes, stop.check)
        with deployment.local_federation(
            folder,
            nodes,
            address=address,
            insecure=insecure,
            print_line=_print_line,
            plugins=plugins or [],
        ) as children:
            if run:
                from fedlens.cli.runs import print_finished
                from fedlens.experiments.run import start

                print_finished(start(config))
                return
            command = ["fedlens", "run", experiment, *words, *plugin_options(config)]
            out.print(
                f"{nodes} nodes are connected. In another terminal:\n\n    {shlex.join(command)}\n",
                **PLAIN,
            )
            deployment.watch(children, stop, _print_line)


def _print_line(line: str) -> None:
    out.print(line, **PLAIN)
