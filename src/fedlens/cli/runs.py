"""`fedlens run`, `resume`, `ls`, `show` and `config`: start runs and inspect them."""

from typing import Annotated

import typer

from fedlens.cli.shared import (
    RUNS,
    Overrides,
    Plugins,
    Root,
    RunName,
    out,
    print_csv,
    print_json,
)
from fedlens.errors import FedlensError
from fedlens.runtime.shared_machine import warn_if_busy
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
    warn_if_busy()
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
    if folder.finished:
        out.print(f"{folder.name} is finished: nothing to do.")
        return
    warn_if_busy()
    from fedlens.experiments.run import resume as resume_run

    print_finished(resume_run(folder, overrides))


@app.command()
def ls(
    root: Root = RUNS,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of objects.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV with a header.")] = False,
) -> None:
    """List runs with their states and main metrics.

    `--json` and `--csv` print one entry for each run, with the columns of `fl.load_runs`; what a
    run does not have is null, or empty.
    """
    if as_json and as_csv:
        raise FedlensError("--json and --csv exclude each other: choose one.")
    folders = runs(root)
    if as_json or as_csv:
        from fedlens.store.table import COLUMNS, run_row

        rows = [run_row(folder) for folder in folders]
        print_json(rows) if as_json else print_csv(rows, COLUMNS)
        return
    from fedlens.reporting.terminal.runs import runs_table

    out.print(runs_table(folders) if folders else f"There are no runs in {root} yet.")


@app.command()
def show(
    which: RunName,
    root: Root = RUNS,
    as_json: Annotated[bool, typer.Option("--json", help="Print its records as JSON.")] = False,
) -> None:
    """Show one run: result, provenance, learning curve.

    `--json` prints one object: name, state, error, path, config, manifest, result, partition,
    metrics and test_curve. A record that the run does not have is null, or an empty list.
    """
    folder = find_run(which, root)
    with folder.named_in_errors():
        if as_json:
            from fedlens.store.table import run_record

            print_json(run_record(folder))
            return
        from fedlens.reporting.terminal.runs import run_page

        out.print(run_page(folder))


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
