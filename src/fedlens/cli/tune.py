"""`fedlens tune`: search hyper-parameters on validation, and leave an experiment one can run."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedlens.cli.shared import PLAIN, Overrides, out
from fedlens.errors import FedlensError, suggest

app = typer.Typer()


@app.command()
def tune(
    experiment: Annotated[
        str, typer.Argument(help="A name from `fedlens config`, or a YAML file.")
    ],
    overrides: Overrides = None,
    trials: Annotated[
        int, typer.Option(min=1, help="Complete or stopped early; failed ones do not count.")
    ] = 20,
    search: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=SPACE",
            help="Search this too: `log:1e-4:1`, `float:0:0.1`, `int:1:8`, or values such as "
            "`cosine,linear`. May be given several times.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Of the search's folder; else made from what is asked.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the suggestions, not of the runs.")] = 0,
    pruner: Annotated[
        str, typer.Option(help="`median` stops what falls behind the trials before; or `none`.")
    ] = "median",
    timeout: Annotated[
        float | None,
        typer.Option(metavar="MIN", min=0.001, help="Stop after so many minutes; goes on later."),
    ] = None,
    root: Annotated[
        Path | None,
        typer.Option("--runs", help="The folder that holds the runs.", show_default="runs"),
    ] = None,
) -> None:
    """Search for the best hyper-parameters of an experiment, on validation images only.

    Searched are `train.lr`, `train.weight_decay` and `train.schedule.name`, but for those that a
    `key=value` fixes, and whatever `--search` names. No trial opens the test split. The same
    command continues a search that was interrupted; more `--trials` extend one.

    Example: `fedlens tune sparse_fedavg train.weight_decay=0 --search sparse.density=0.05,0.1,0.2
    --trials 30`

    Below `runs/tune/NAME/` it leaves `best.yaml`, which `fedlens run` takes, `trials.csv` and
    `trials.json` with all trials, and figures of the search.
    """
    from fedlens.config.compose import compose, word
    from fedlens.tuning.space import space

    if name is not None and (Path(name).name != name or name.startswith(".")):
        raise FedlensError(f"--name {name} must be one plain folder name.")
    told = [*(overrides or []), *([f"run.root={word(str(root))}"] if root else [])]
    config = compose(experiment, told)
    if config.run.name:
        raise FedlensError("A search names its runs itself: use --name for the search.")
    dimensions = space(config, told, search or [])
    from fedlens.reporting.figures.search import draw
    from fedlens.tuning.search import PRUNERS, Search
    from fedlens.tuning.trial_records import best_trial, percent
    from fedlens.tuning.tune import search as go

    if pruner not in PRUNERS:
        raise FedlensError(f"--pruner {pruner} is unknown: {suggest(pruner, PRUNERS)}")
    asked = Search(config, dimensions, seed, pruner, name)
    for dimension in dimensions:
        out.print(f"searching {dimension.key} in {dimension}", **PLAIN)
    from fedlens.experiments.run import start

    command = shlex.join(["fedlens", *sys.argv[1:]])
    record = go(asked, trials=trials, start=start, minutes=timeout, command=command)
    chosen, states = best_trial(record), [trial["state"] for trial in record["trials"]]
    if chosen is None:
        raise FedlensError(
            f"No trial of {record['name']} came to an end ({states.count('failed')} failed): see "
            f"{asked.folder / 'trials.csv'}, and search elsewhere."
        )
    draw(record, asked.folder)
    out.print(
        f"{len(states)} trials, {states.count('pruned')} stopped early, {states.count('failed')} "
        f"failed. The best, number {chosen['number']}, has {percent(chosen['value'])} on "
        "validation, with:",
        **PLAIN,
    )
    for key, value in chosen["params"].items():
        out.print(f"  {key}={value}", **PLAIN)
    out.print(f"figures and all trials: {asked.folder}", **PLAIN)
    out.print(f"its test accuracy: fedlens run {asked.folder / 'best.yaml'}", **PLAIN)
