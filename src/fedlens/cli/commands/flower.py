"""`fedlens flower`: split the data, make keys, and start a federation's SuperLink and nodes."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from fedlens.cli.numbers import within
from fedlens.cli.shared import PLAIN, Commands, Overrides, Plugins, out
from fedlens.errors import FedlensError, shown
from fedlens.runtime.units import counted

app = Commands(
    help="Run clients on separate machines with Flower: split data, make keys, start nodes.",
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
KeyNodes = Annotated[
    int,
    typer.Option(
        "--nodes", callback=within("[1, 10000]"), help="The number of nodes to make keys for."
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
    """Split the data of an experiment into folders: server/, node-0/, node-1/, …

    Copy server/ to the machine of the SuperLink, and every other folder to its node.

    Example: `fedlens flower partition quickstart_fedavg --nodes 4`
    """
    from fedlens.config.compose import compose
    from fedlens.experiments.preparation.local_data import write_shards
    from fedlens.runtime.stop import listening

    config = compose(experiment, overrides or [])
    with listening() as stop:
        made = write_shards(config, folder, nodes, stop.check)
    state = "now has" if made else "already has"
    out.print(f"{folder} {state} the data of {counted(nodes, 'node')} and the server.", **PLAIN)


@app.command()
def keys(
    nodes: KeyNodes = 4,
    host: Annotated[
        list[str] | None,
        typer.Option(help="A name or address that nodes will use; repeatable."),
    ] = None,
    folder: Folder = FOLDER,
    renew: Annotated[
        bool,
        typer.Option(
            "--renew",
            help="Replace existing certificates and keys; nodes then need the new ca.crt.",
        ),
    ] = False,
) -> None:
    """Make certificates for the SuperLink, a key for each node and one to submit runs with.

    These are for development.

    In production, use certificates of your own authority and let each node make its own key.
    """
    from fedlens.federated.flower import require

    require()
    from fedlens.experiments.flower.deployment import credentials
    from fedlens.federated.flower.deployment.credentials import LOCAL_HOSTS

    credentials(folder, nodes, host or [], renew=renew)
    covered = ", ".join(dict.fromkeys([*LOCAL_HOSTS, *(host or [])]))
    out.print(f"{folder} has certificates for {covered} and {counted(nodes, 'key')}.", **PLAIN)


@app.command()
def superlink(
    folder: Folder = FOLDER,
    address: Address = LOOPBACK,
    insecure: Insecure = False,
    plugins: Plugins = None,
) -> None:
    """Start the SuperLink, Flower's server: nodes connect to it, and it runs experiments.

    It accepts only nodes whose public keys are in keys/, and users whose keys are in users/. Runs
    are written to runs/ in the current folder. It loads only the plugins of its own command line.
    Ctrl-C ends it.
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
        str | None,
        typer.Option(
            help="The address of the SuperLink, host:port; default: the one in superlink.json of "
            "the federation's folder."
        ),
    ] = None,
    root_certificates: Annotated[
        Path | None,
        typer.Option(help="The certificate to trust; default: certificates/ca.crt in the folder."),
    ] = None,
    shard: Annotated[
        Path | None,
        typer.Option(
            help="The folder with the node's data; default: NAME/ in the federation's folder."
        ),
    ] = None,
    reconnect: Annotated[
        float,
        typer.Option(
            callback=within("[0, 1e7]"),
            help="Seconds to wait for a SuperLink that is not reachable.",
        ),
    ] = 600.0,
    device: Annotated[
        str, typer.Option(help="Where its clients train: auto, cpu, cuda:1.")
    ] = "auto",
    threads: Annotated[
        int | None,
        typer.Option(
            callback=within("[1, 1024]"),
            help="CPU threads for training; default: torch's default, all cores of the host.",
        ),
    ] = None,
    insecure: Insecure = False,
    _plugins: Plugins = None,
) -> None:
    """Start a node with its own data. It trains its clients until you press Ctrl-C.

    Device, threads and paths are its own: no server can set them. It loads only the plugins of its
    own command line, and refuses an experiment that needs others.
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
            folder,
            name,
            connection,
            stop,
            shard=shard or folder / name,
            reconnect=reconnect,
            device=device,
            threads=threads,
        )


@app.command()
def up(
    experiment: Experiment = "quickstart_fedavg",
    overrides: Overrides = None,
    nodes: Nodes = 4,
    folder: Folder = FOLDER,
    address: Address = LOOPBACK,
    run: Annotated[
        bool, typer.Option("--run", help="Run the experiment, then stop all processes.")
    ] = False,
    insecure: Insecure = False,
    plugins: Plugins = None,
) -> None:
    """Start a complete federation on this machine, with data, keys, SuperLink and nodes.

    Ctrl-C ends it. The nodes share the cores, unless engine.threads_per_client or OMP_NUM_THREADS
    is set.

    Example: `fedlens flower up --nodes 4 --run`
    """
    from fedlens.federated.flower import require

    require()
    from fedlens.config.compose import compose, plugin_options
    from fedlens.experiments.flower import deployment
    from fedlens.experiments.preparation.local_data import write_shards
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
            threads=config.engine.threads_per_client,
        ) as children:
            if run:
                from fedlens.cli.commands.runs import print_finished
                from fedlens.experiments.run import start

                print_finished(start(config))
                return
            command = ["fedlens", "run", experiment, *words, *plugin_options(config)]
            out.print(
                f"Connected: {counted(nodes, 'node')}. Run in another terminal:\n\n"
                f"    {shlex.join(command)}\n",
                **PLAIN,
            )
            deployment.watch(children, stop, _print_line)


def _print_line(line: str) -> None:
    out.print(line, **PLAIN)
