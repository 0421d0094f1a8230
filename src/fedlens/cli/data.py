"""`fedlens data`: fetch, verify and describe datasets, and show how clients would share them."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fedlens.cli.shared import Overrides, out
from fedlens.errors import FedlensError, suggest

app = typer.Typer(help="Fetch, verify and describe datasets.", no_args_is_help=True)

DataName = Annotated[str, typer.Argument(help="cifar100 or synthetic.")]
DataRoot = Annotated[
    Path | None, typer.Option("--root", help="Else $FEDLENS_DATA, else the user cache.")
]


@app.command()
def fetch(name: DataName = "cifar100", root: DataRoot = None) -> None:
    """Download CIFAR-100, or draw the synthetic images, unless they are there."""
    from fedlens.data import cifar100

    if _dataset_name(name) == "cifar100":
        out.print(f"cifar100 is complete in {cifar100.fetch(root)}")
        return
    from fedlens.data import synthetic

    dataset = synthetic.dataset()
    images = dataset.load_train()
    out.print(f"synthetic: {len(images)} training images of {len(dataset.classes)} classes, cached")


@app.command()
def verify(name: DataName = "cifar100", root: DataRoot = None) -> None:
    """Compare the files with the official checksums."""
    if _dataset_name(name) == "synthetic":
        raise FedlensError("synthetic images are drawn and checked whenever they are loaded.")
    from fedlens.data import cifar100

    states = cifar100.verify(root)
    for file, state in states.items():
        out.print(f"{state:8} {cifar100.locate(root) / cifar100.FOLDER / file}", soft_wrap=True)
    if set(states.values()) != {"ok"}:
        raise FedlensError("CIFAR-100 is not whole here: run `fedlens data fetch`.")


@app.command()
def partition(
    experiment: Annotated[str, typer.Argument(help="A federated experiment.")],
    overrides: Overrides = None,
    figure: Annotated[
        Path | None, typer.Option(help="Draw it to this file (png, svg or pdf).")
    ] = None,
) -> None:
    """Show how an experiment spreads its data over the clients, without running it.

    Example: `fedlens data partition fedavg_noniid partition.classes_per_client=5 --figure p.png`
    """
    from fedlens.config.compose import compose

    config = compose(experiment, overrides or [])
    if config.federated.clients is None:
        raise FedlensError(f"{experiment} has no clients: set federated.clients.")
    from fedlens.experiments.local_data import partition_record
    from fedlens.reporting.figures.partition import partition_figure
    from fedlens.reporting.terminal.runs import partition_table

    record = partition_record(config)
    out.print(partition_table(record))
    if figure:
        partition_figure(record, figure)
        out.print(f"drawn to {figure}", soft_wrap=True)


@app.command()
def describe(name: DataName = "cifar100", root: DataRoot = None) -> None:
    """Say what a dataset holds; the test images stay unread."""
    from fedlens.config.schema import DataConfig
    from fedlens.experiments.local_data import dataset

    found = dataset(DataConfig(name=_dataset_name(name), root=str(root) if root else None))
    images = found.load_train()
    counts = images.labels.bincount()
    table = Table.grid(padding=(0, 2))
    table.add_row("name", found.name)
    table.add_row("training images", f"{len(images)}, {tuple(images.pixels.shape[1:])} uint8")
    table.add_row("per class", f"{int(counts.min())} to {int(counts.max())}")
    table.add_row("test images", "sealed until a run's final evaluation")
    table.add_row("digest", found.digest)
    table.add_row("classes", f"{len(found.classes)}: {', '.join(found.classes)}")
    out.print(table)


def _dataset_name(name: str) -> str:
    from fedlens.config.checks import DATASETS

    if name not in DATASETS:
        raise FedlensError(f"There is no dataset '{name}': {suggest(name, DATASETS)}")
    return name
