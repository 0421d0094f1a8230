"""`fedlens run`, `resume`, `ls`, `show` and `config`: start runs and inspect them."""

import logging
import shlex
from typing import Annotated

import typer

from fedlens.cli.shared import (
    PLAIN,
    RUNS,
    Commands,
    Overrides,
    Plugins,
    Root,
    RootOrArchive,
    RunName,
    RuntimeOverrides,
    out,
    print_csv,
    print_entries,
    print_json,
)
from fedlens.errors import FedlensError, shown
from fedlens.runtime.shared_machine import warn_if_busy
from fedlens.runtime.units import counted
from fedlens.store.run_folder import RunFolder, find_run, runs
from fedlens.store.table import matches

app = Commands()
log = logging.getLogger(__name__)


@app.command()
def run(
    experiment: Annotated[
        str, typer.Argument(help="A name from `fedlens config`, or a YAML file.")
    ],
    overrides: Overrides = None,
    _plugins: Plugins = None,
) -> None:
    """Run an experiment. Run the same command again to resume it.

    `fedlens config` lists all experiments; start with `fedlens run quickstart`.

    Example: `fedlens run centralized data=cifar100 backbone=vit_tiny train.lr=0.01 seed=1`
    """
    from fedlens.config.checks import without_effect
    from fedlens.config.compose import compose
    from fedlens.suites.plan import folder_of

    config = compose(experiment, overrides or [])
    if unused := without_effect(config):
        log.warning(
            "%s has no effect in central training: leave it out, or set federated.clients.",
            " ".join(unused),
        )
    if not folder_of(config).finished:
        warn_if_busy()
    from fedlens.experiments.run import start

    print_finished(start(config))


@app.command()
def resume(
    run: RunName,
    overrides: RuntimeOverrides = None,
    root: Root = RUNS,
    _plugins: Plugins = None,
) -> None:
    """Resume an interrupted run. A finished run is not changed.

    If you moved the run to another machine, set its paths:
    `fedlens resume RUN data.root=/content/data`
    """
    folder = find_run(run, root)
    if folder.finished:
        out.print(f"{folder.name} has finished: there is nothing to do.", **PLAIN)
        return
    warn_if_busy()
    from fedlens.experiments.run import resume as resume_run

    print_finished(resume_run(folder, overrides))


@app.command()
def ls(
    root: RootOrArchive = RUNS,
    texts: Annotated[
        list[str] | None,
        typer.Option(
            "--filter",
            metavar="TEXT",
            help="Only runs whose name, labels or state contain this text; repeatable.",
        ),
    ] = None,
    last: Annotated[
        int | None, typer.Option("--last", metavar="N", min=1, help="Only the newest N runs.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of objects.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV with a header.")] = False,
) -> None:
    """List runs, the newest last: what each one is, its state and its accuracy.

    Every command that takes a RUN accepts the id in the first column. Columns show what differs
    between the runs; what they have in common is above the table.

    `--json` and `--csv` print the columns of `fl.load_runs`. Values that a run does not have are
    null in JSON and empty in CSV.

    Example: `fedlens ls --filter Nc=1 --filter finished --last 10`
    """
    if as_json and as_csv:
        raise FedlensError("--json and --csv exclude each other: choose one.")
    everything = runs(root)
    folders = [run for run in everything if all(matches(run, text) for text in texts or [])]
    folders = folders[-last:] if last else folders
    if as_json or as_csv:
        from fedlens.store.table import COLUMNS, run_row

        rows = [run_row(folder) for folder in folders]
        print_json(rows) if as_json else print_csv(rows, COLUMNS)
        return
    if not everything:
        out.print(f"There are no runs in {root} yet. Start one: fedlens run quickstart", **PLAIN)
        return
    if not folders:
        filters = " and ".join(f"'{shown(text)}'" for text in texts or [])
        number = counted(len(everything), "run")
        out.print(f"{root} has {number}, but none matches {filters}.", **PLAIN)
        return
    from fedlens.reporting.terminal.runs import runs_table

    out.print(runs_table(folders))


@app.command()
def show(
    run: RunName,
    root: RootOrArchive = RUNS,
    as_json: Annotated[bool, typer.Option("--json", help="Print all records as JSON.")] = False,
) -> None:
    """Show one run: its accuracy, settings, command and learning curve.

    `--json` prints one object with the keys name, state, error, path, config, manifest, result,
    partition, metrics and test_curve. A record that the run does not have is null or an empty list.

    Example: `fedlens show quickstart`
    """
    folder = find_run(run, root)
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
        typer.Argument(
            help="The experiment whose config to print, or a YAML file. Without it, all "
            "experiments are listed. The word `rows` instead lists all components that can be "
            "chosen by name."
        ),
    ] = None,
    overrides: Overrides = None,
    _plugins: Plugins = None,
) -> None:
    """List all experiments and what each costs, or print the complete config of one.

    `fedlens config rows` lists everything that you can choose by name, such as aggregators, mask
    rules and partitions. `fedlens config rows KIND` prints their parameters and papers.

    Example: `fedlens config fedavg_noniid partition.classes_per_client=5`
    """
    if experiment == "rows":
        from fedlens.cli.commands.rows import print_kinds, print_rows
        from fedlens.plugins import load_entry_points

        load_entry_points()

        for kind in overrides or []:
            print_rows(kind)
        if not overrides:
            print_kinds()
        return
    from fedlens.config.compose import compose, documentation, experiments, to_yaml

    if experiment is None:
        print_entries((entry.name, entry.documentation) for entry in experiments())
        out.print("Run one: fedlens run NAME. Print its config: fedlens config NAME", **PLAIN)
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
    words = ["fedlens", "report", str(folder.path.parent), "--out", "report"]
    out.print(f"\nNext: {shlex.join(words)}", **PLAIN)


def _draw_partition(folder: RunFolder) -> None:
    """The figure of the partition, once, beside its record."""
    figure = folder.path / "partition.png"
    if (record := folder.partition) is not None and not figure.exists():
        from fedlens.reporting.figures.partition import partition_figure

        partition_figure(record, figure)
