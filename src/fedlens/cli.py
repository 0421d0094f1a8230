"""The `fedlens` command: parse, call, print. Torch is loaded only by commands that compute."""

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table

from fedlens.errors import FedlensError, suggest
from fedlens.experiments.logs import logging_to
from fedlens.experiments.records import RunFolder, find_run, runs
from fedlens.experiments.signals import Interrupted, StopRequest

PLAIN: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}
INTERRUPTED = 75  # EX_TEMPFAIL: run the resume command and it goes on

app = typer.Typer(
    help="Federated learning under the lens of task arithmetic.",
    epilog="Start with `fedlens run quickstart`: no download, a few minutes on a laptop.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
data_app = typer.Typer(help="Fetch, verify and describe datasets.", no_args_is_help=True)
weights_app = typer.Typer(help="List, fetch and verify pretrained weights.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(weights_app, name="weights")

# A pipe has no width of its own, and names are long.
out = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 200)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Config overrides, such as `train.lr=0.01 seed=1`."
    ),
]
Root = Annotated[
    Path, typer.Option("--runs", help="The folder that holds the runs.", show_default="runs")
]
RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="Its folder, name, or part of its name.")
]
Backbone = Annotated[str, typer.Argument(metavar="BACKBONE", help="A name from `weights list`.")]
RUNS = Path("runs")


@app.command()
def run(
    experiment: Annotated[str, typer.Argument(help="A name from `fedlens config`.")],
    overrides: Overrides = None,
) -> None:
    """Run an experiment; the same command continues a run that was interrupted.

    Example: `fedlens run centralized data=cifar100 backbone=vit_tiny train.lr=0.01 seed=1`
    """
    from fedlens.experiments.compose import compose

    config = compose(experiment, overrides or [])
    from fedlens.experiments.run import start

    _finished(start(config))


@app.command()
def resume(which: RunName, overrides: Overrides = None, root: Root = RUNS) -> None:
    """Continue an interrupted run from its folder; a finished one is left as it is.

    On another machine, say where things are: `fedlens resume RUN data.root=/content/data`
    """
    folder = find_run(which, root)
    if folder.result is not None:
        out.print(f"{folder.name} is finished: nothing to do.")
        return
    from fedlens.experiments.run import resume as go_on

    _finished(go_on(folder, overrides))


@app.command()
def suite(
    which: Annotated[
        str | None,
        typer.Argument(metavar="[SUITE]", help="Its name, or a YAML file; without it, list all."),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Run a table of runs; what is finished is skipped, what was interrupted goes on.

    Example: `fedlens suite heterogeneity train=head augment=none backbone=vit_tiny`
    """
    from fedlens.experiments import suite as table

    if which is None:
        for entry in table.suites():
            out.print(f"[bold]{entry.name}[/bold]")
            out.print(entry.documentation + "\n", **PLAIN)
        return
    cells = table.find(which).cells(overrides or [])
    from fedlens.experiments.run import start
    from fedlens.reporting.console import suite_table

    outcomes = []
    for outcome in table.play(cells, start):
        outcomes.append(outcome)
        if outcome.folder:
            _draw(outcome.folder)
    out.print(suite_table(outcomes))
    if failed := [outcome for outcome in outcomes if outcome.failure]:
        raise FedlensError(f"{len(failed)} of {len(outcomes)} runs failed; the others are whole.")


@app.command()
def ls(root: Root = RUNS) -> None:
    """List runs with their state and headline metrics."""
    from fedlens.reporting.console import runs_table

    found = runs(root)
    out.print(runs_table(found) if found else f"There are no runs in {root} yet.")


@app.command()
def show(which: RunName, root: Root = RUNS) -> None:
    """Show one run: result, provenance, learning curve."""
    from fedlens.reporting.console import run_page

    out.print(run_page(find_run(which, root)))


@app.command()
def config(
    experiment: Annotated[
        str | None, typer.Argument(help="Print its config; without it, list all experiments.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """List the experiments and what each costs, or print the composed config of one."""
    from fedlens.experiments.compose import compose, experiments, to_yaml

    if experiment is None:
        for entry in experiments():
            out.print(f"[bold]{entry.name}[/bold]")
            out.print(entry.documentation + "\n", markup=False, highlight=False)
        return
    composed = compose(experiment, overrides or [])
    documentation = next(e.documentation for e in experiments() if e.name == experiment)
    for line in documentation.splitlines():
        print(f"# {line}".rstrip())
    print(to_yaml(composed), end="")


DataName = Annotated[str, typer.Argument(help="cifar100 or synthetic.")]
DataRoot = Annotated[
    Path | None, typer.Option("--root", help="Else $FEDLENS_DATA, else the user cache.")
]


@data_app.command("fetch")
def data_fetch(name: DataName = "cifar100", root: DataRoot = None) -> None:
    """Download CIFAR-100, or draw the synthetic images, unless they are there."""
    from fedlens.data import cifar

    if _dataset_name(name) == "cifar100":
        out.print(f"cifar100 is complete in {cifar.fetch(root)}")
        return
    from fedlens.data import synthetic

    dataset = synthetic.dataset()
    images = dataset.load_train()
    out.print(f"synthetic: {len(images)} training images of {len(dataset.classes)} classes, cached")


@data_app.command("verify")
def data_verify(name: DataName = "cifar100", root: DataRoot = None) -> None:
    """Compare the files with the official checksums."""
    if _dataset_name(name) == "synthetic":
        raise FedlensError("synthetic images are drawn and checked whenever they are loaded.")
    from fedlens.data import cifar

    states = cifar.verify(root)
    for file, state in states.items():
        out.print(f"{state:8} {cifar.locate(root) / cifar.FOLDER / file}", soft_wrap=True)
    if set(states.values()) != {"ok"}:
        raise FedlensError("CIFAR-100 is not whole here: run `fedlens data fetch`.")


@data_app.command("partition")
def data_partition(
    experiment: Annotated[str, typer.Argument(help="A federated experiment.")],
    overrides: Overrides = None,
    figure: Annotated[
        Path | None, typer.Option(help="Draw it to this file (png, svg or pdf).")
    ] = None,
) -> None:
    """Show how an experiment spreads its data over the clients, without running it.

    Example: `fedlens data partition fedavg_noniid partition.classes_per_client=5 --figure p.png`
    """
    from fedlens.experiments.compose import compose

    config = compose(experiment, overrides or [])
    if config.federated.clients is None:
        raise FedlensError(f"{experiment} has no clients: set federated.clients.")
    from fedlens.experiments.build import partition_record
    from fedlens.reporting.console import partition_table
    from fedlens.reporting.figures import partition_figure

    record = partition_record(config)
    out.print(partition_table(record))
    if figure:
        partition_figure(record, figure)
        out.print(f"drawn to {figure}", soft_wrap=True)


@data_app.command("describe")
def data_describe(name: DataName = "cifar100", root: DataRoot = None) -> None:
    """Say what a dataset holds; the test images stay unread."""
    from fedlens.experiments.build import dataset
    from fedlens.experiments.config import DataConfig

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


@weights_app.command("list")
def weights_list() -> None:
    """The backbones, and the files their weights may lie in."""
    from fedlens.models.backbones import TABLE

    table = Table("backbone", "patch", "px", "files", "paper", box=None)
    for row in TABLE.values():
        files = ", ".join(row.files) or "pretrained here, on first use"
        table.add_row(row.name, str(row.patch), str(row.resolution), files, row.paper)
    table.add_row("timm:<any name>", "", "", "downloaded by timm's name", "")
    out.print(table)


@weights_app.command("fetch")
def weights_fetch(backbone: Backbone) -> None:
    """Download a backbone's weights unless they are there, and say where they are."""
    from fedlens.experiments.build import weights_file
    from fedlens.experiments.config import BackboneConfig

    out.print(str(weights_file(BackboneConfig(name=backbone), StopRequest())), soft_wrap=True)


@weights_app.command("verify")
def weights_verify(
    backbone: Backbone,
    file: Annotated[Path | None, typer.Option(help="Another file than the one found.")] = None,
    sha256: Annotated[str | None, typer.Option(help="The hash it should have.")] = None,
) -> None:
    """Check that a file fits the backbone, key by key, and print its hash."""
    from fedlens.experiments.build import weights_file
    from fedlens.experiments.config import BackboneConfig
    from fedlens.models import backbones, weights

    wanted = BackboneConfig(name=backbone, weights=str(file) if file else None)
    path = weights_file(wanted, StopRequest())
    loaded = weights.verify(backbones.find(backbone), path, expected_sha256=sha256)
    out.print(f"ok       {loaded.path}\nsha256   {loaded.sha256}", soft_wrap=True)


def _dataset_name(name: str) -> str:
    from fedlens.experiments.validate import DATASETS

    if name not in DATASETS:
        raise FedlensError(f"There is no dataset '{name}': {suggest(name, DATASETS)}")
    return name


def _finished(folder: RunFolder) -> None:
    from fedlens.reporting.console import run_page

    _draw(folder)
    out.print(run_page(folder))


def _draw(folder: RunFolder) -> None:
    """The picture of who holds what, once, beside the record it is made from."""
    picture = folder.path / "partition.png"
    if (record := folder.partition) is not None and not picture.exists():
        from fedlens.reporting.figures import partition_figure

        partition_figure(record, picture)


def main() -> None:
    """Errors are one sentence and exit code 2; an interrupted run exits with 75."""
    console = Console(stderr=True)
    with logging_to(_progress_log(console)):
        try:
            app()
        except FedlensError as error:
            console.print(f"error: {error}", style="red", **PLAIN)
            sys.exit(2)
        except Interrupted as stopped:
            console.print(f"Stopped; {stopped}", **PLAIN)
            sys.exit(INTERRUPTED)


def _progress_log(console: Console) -> logging.Handler:
    """Progress goes to stderr; errors are left to `main`, which says them once."""
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=False, show_level=False)
        handler.setFormatter(logging.Formatter("%(message)s"))
    handler.addFilter(lambda record: record.levelno < logging.ERROR)
    return handler


if __name__ == "__main__":
    main()
