"""`fedlens run`, `resume`, `ls`, `show` and `config`: make runs and look at them."""

from typing import Annotated

import typer

from fedlens.cli.shared import RUNS, Overrides, Root, RunName, out
from fedlens.store.run_folder import RunFolder, find_run, runs

app = typer.Typer()


@app.command()
def run(
    experiment: Annotated[
        str, typer.Argument(help="A name from `fedlens config`, or a YAML file.")
    ],
    overrides: Overrides = None,
) -> None:
    """Run an experiment; the same command continues a run that was interrupted.

    Example: `fedlens run centralized data=cifar100 backbone=vit_tiny train.lr=0.01 seed=1`
    """
    from fedlens.config.compose import compose

    config = compose(experiment, overrides or [])
    from fedlens.experiments.run import start

    finished(start(config))


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

    finished(go_on(folder, overrides))


@app.command()
def ls(root: Root = RUNS) -> None:
    """List runs with their state and headline metrics."""
    from fedlens.reporting.terminal.runs import runs_table

    found = runs(root)
    out.print(runs_table(found) if found else f"There are no runs in {root} yet.")


@app.command()
def show(which: RunName, root: Root = RUNS) -> None:
    """Show one run: result, provenance, learning curve."""
    from fedlens.reporting.terminal.runs import run_page

    out.print(run_page(find_run(which, root)))


@app.command()
def config(
    experiment: Annotated[
        str | None, typer.Argument(help="Print its config; without it, list all experiments.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """List the experiments and what each costs, or print the composed config of one."""
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


def finished(folder: RunFolder) -> None:
    from fedlens.reporting.terminal.runs import run_page

    if folder.result is None:  # it is on the host of a SuperLink
        return
    _draw(folder)
    out.print(run_page(folder))


def _draw(folder: RunFolder) -> None:
    """The picture of who holds what, once, beside the record it is made from."""
    picture = folder.path / "partition.png"
    if (record := folder.partition) is not None and not picture.exists():
        from fedlens.reporting.figures.partition import partition_figure

        partition_figure(record, picture)
