"""`fedlens run`, `resume`, `ls`, `show` and `config`: start runs and inspect them."""

from typing import Annotated

import typer

from fedlens.cli.shared import RUNS, Overrides, Plugins, Root, RunName, out
from fedlens.store.run_folder import RunFolder, find_run, runs

app = typer.Typer()


@app.command()
def run(
    experiment: Annotated[
        str, typer.Argument(help="A name from `fedlens config`, or a YAML file.")
    ],
    overrides: Overrides = None,
    _plugins: Plugins = None,
) -> None:
    """Run an experiment; the same command resumes a run that was interrupted.

    Example: `fedlens run centralized data=cifar100 backbone=vit_tiny train.lr=0.01 seed=1`
    """
    from fedlens.config.compose import compose

    config = compose(experiment, overrides or [])
    from fedlens.experiments.run import start

    print_finished(start(config))


@app.command()
def resume(
    which: RunName, overrides: Overrides = None, root: Root = RUNS, _plugins: Plugins = None
) -> None:
    """Resume an interrupted run; a finished run is not changed.

    On another machine, set the paths: `fedlens resume RUN data.root=/content/data`
    """
    folder = find_run(which, root)
    if folder.result is not None:
        out.print(f"{folder.name} is finished: nothing to do.")
        return
    from fedlens.experiments.run import resume as resume_run

    print_finished(resume_run(folder, overrides))


@app.command()
def ls(root: Root = RUNS) -> None:
    """List runs with their states and main metrics."""
    from fedlens.reporting.terminal.runs import runs_table

    folders = runs(root)
    out.print(runs_table(folders) if folders else f"There are no runs in {root} yet.")


@app.command()
def show(which: RunName, root: Root = RUNS) -> None:
    """Show one run: result, provenance, learning curve."""
    from fedlens.reporting.terminal.runs import run_page

    out.print(run_page(find_run(which, root)))


@app.command()
def config(
    experiment: Annotated[
        str | None,
        typer.Argument(help="Print its config; without it, list all experiments; or `rows`."),
    ] = None,
    overrides: Overrides = None,
    _plugins: Plugins = None,
) -> None:
    """List the experiments and what each costs, or print the composed config of one.

    `fedlens config rows` lists everything that can be chosen by name, such as aggregators, mask
    rules and partitions; `fedlens config rows KIND` prints their parameters and papers.

    Example: `fedlens config fedavg_noniid partition.classes_per_client=5`
    """
    if experiment == "rows":
        from fedlens.cli.rows import print_kinds, print_rows
        from fedlens.plugins import load_entry_points

        load_entry_points()

        for kind in overrides or []:
            print_rows(kind)
        if not overrides:
            print_kinds()
        return
    from fedlens.config.compose import compose, documentation, experiments, to_yaml

    if experiment is None:
        for entry in experiments():
            out.print(f"[bold]{entry.name}[/bold]")
            out.print(entry.documentation + "\n", markup=False, highlight=False)
        return
    composed = compose(experiment, overrides or [])
    for line in documentation(experiment).splitlines():
        print(f"# {line}".rstrip())
    print(to_yaml(composed), end="")


def print_finished(folder: RunFolder) -> None:
    from fedlens.reporting.terminal.runs import run_page

    if folder.result is None:  # it was submitted to a SuperLink and is stored there
        return
    _draw_partition(folder)
    out.print(run_page(folder))


def _draw_partition(folder: RunFolder) -> None:
    """The figure of the partition, once, beside its record."""
    figure = folder.path / "partition.png"
    if (record := folder.partition) is not None and not figure.exists():
        from fedlens.reporting.figures.partition import partition_figure

        partition_figure(record, figure)
