"""`fedlens data`: fetch, verify and describe datasets, and show how they are partitioned."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fedlens import registry
from fedlens.cli.shared import Commands, Overrides, Plugins, out
from fedlens.errors import FedlensError
from fedlens.runtime.units import counted

if TYPE_CHECKING:
    from fedlens.data.images import Dataset

app = Commands(help="Get, check and describe datasets.", no_args_is_help=True)

DataName = Annotated[
    str,
    typer.Argument(
        metavar="DATASET",
        help="A name from `fedlens config rows dataset`, such as torchvision:CIFAR10.",
    ),
]
DataSettings = Annotated[
    list[str] | None,
    typer.Argument(metavar="[data.KEY=VALUE]…", help="Parameters of the dataset."),
]
DataRoot = Annotated[
    Path | None,
    typer.Option(
        "--root", help="The folder with its files; default: $FEDLENS_DATA, else the cache folder."
    ),
]


@app.command()
def fetch(
    name: DataName = "cifar100",
    settings: DataSettings = None,
    root: DataRoot = None,
    _plugins: Plugins = None,
) -> None:
    """Get the images of a dataset: download, generate or decode them if they are missing.

    Example: `fedlens data fetch folder --root photos data.size=32`
    """
    dataset = _dataset(name, settings, root)
    images = dataset.load_train()
    out.print(
        f"{name} is complete: {counted(len(images), 'training image')} of "
        f"{counted(len(dataset.classes), 'class')}."
    )


@app.command()
def verify(
    name: DataName = "cifar100",
    settings: DataSettings = None,
    root: DataRoot = None,
    _plugins: Plugins = None,
) -> None:
    """Check the files of a dataset: compare them with official checksums, or decode them all."""
    states = _dataset(name, settings, root).verify()
    for file, state in states.items():
        out.print(f"{state:8} {file}", soft_wrap=True)
    if not states:
        out.print(f"{name} has no files to verify: it is checked whenever it is loaded.")
    elif set(states.values()) != {"ok"}:
        raise FedlensError(
            f"Files of {name} are missing or corrupt: get missing files with `fedlens data fetch "
            f"{name}`, and replace or remove corrupt ones."
        )


@app.command()
def partition(
    experiment: Annotated[
        str, typer.Argument(help="A federated experiment from `fedlens config`, or a YAML file.")
    ],
    overrides: Overrides = None,
    figure: Annotated[
        Path | None, typer.Option(help="Save a figure to this file (png, svg or pdf).")
    ] = None,
    _plugins: Plugins = None,
) -> None:
    """Show how an experiment divides its data among clients, without running it.

    Example: `fedlens data partition fedavg_noniid partition.classes_per_client=5 --figure p.png`
    """
    from fedlens.config.compose import compose

    config = compose(experiment, overrides or [])
    if config.federated.clients is None:
        raise FedlensError(f"{experiment} is not federated: set federated.clients.")
    from fedlens.experiments.preparation.local_data import partition_record, whole
    from fedlens.reporting.figures.partition import partition_figure
    from fedlens.reporting.terminal.partition import partition_table

    record = partition_record(config, whole(config).class_counts)
    out.print(partition_table(record))
    if figure:
        partition_figure(record, figure)
        out.print(f"figure: {figure}", soft_wrap=True)


@app.command()
def describe(
    name: DataName = "cifar100",
    settings: DataSettings = None,
    root: DataRoot = None,
    _plugins: Plugins = None,
) -> None:
    """Show the size and classes of a dataset; its test images stay unread."""
    dataset = _dataset(name, settings, root)
    images = dataset.load_train()
    counts = images.labels.bincount()
    table = Table.grid(padding=(0, 2))
    table.add_row("name", dataset.name)
    table.add_row("training images", f"{len(images)}, {tuple(images.pixels.shape[1:])} uint8")
    table.add_row("per class", f"{int(counts.min())} to {int(counts.max())}")
    table.add_row("test images", "sealed until a run's final evaluation")
    table.add_row("digest", dataset.digest)
    table.add_row("classes", f"{len(dataset.classes)}: {', '.join(dataset.classes)}")
    out.print(table)


def _dataset(name: str, words: list[str] | None, root: Path | None) -> "Dataset":
    from fedlens.config.compose import parse
    from fedlens.experiments.preparation.local_data import open_dataset

    values = registry.dataset.chosen(name)
    for key, value in parse(words or []):
        values[key.removeprefix("data.")] = value
    if root is not None:
        values["root"] = str(root)
    return open_dataset(registry.dataset.settings(values, "data"))
