"""`fedlens tune`: search hyper-parameters on validation and write the best as an experiment."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedlens.cli.numbers import within
from fedlens.cli.shared import PLAIN, Commands, Overrides, Plugins, out
from fedlens.errors import FedlensError, shown, suggest
from fedlens.runtime.units import counted

app = Commands()


@app.command()
def tune(
    experiment: Annotated[
        str, typer.Argument(help="A name from `fedlens config`, or a YAML file.")
    ],
    overrides: Overrides = None,
    trials: Annotated[
        int,
        typer.Option(
            min=1,
            max=1_000_000,
            help="The number of trials, including those that are stopped early. Failed trials do "
            "not count.",
        ),
    ] = 20,
    search: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=SPACE",
            help="Search this key too: in a range (`log:1e-4:1`, `float:0:0.1`, `int:1:8`), or "
            "among values (`cosine,linear`); repeatable.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="The name of the search and its folder; default: made from its settings."
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            max=2**32 - 1,
            help="The seed of the search. The seed of the runs is the config key `seed`.",
        ),
    ] = 0,
    pruner: Annotated[
        str,
        typer.Option(
            help="`median` stops trials that are worse than the median of earlier ones; `none` "
            "stops no trial."
        ),
    ] = "median",
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="MIN",
            callback=within("[0.001, 1e7]"),
            help="Stop after this many minutes. The same command resumes the search.",
        ),
    ] = None,
    root: Annotated[
        Path | None,
        typer.Option("--runs", help="The folder for the runs; default: runs."),
    ] = None,
    _plugins: Plugins = None,
) -> None:
    """Search for the best hyper-parameters of an experiment, on validation images only.

    It searches `train.lr`, `train.optimizer.weight_decay`, `train.schedule.name` and the keys of
    `--search`; a key that you set with `key=value` is not searched. No trial opens the test split.
    The same command resumes an interrupted search, and more `--trials` extend a finished one.

    Example: `fedlens tune sparse_fedavg train.optimizer.weight_decay=0
    --search sparse.density=0.05,0.1,0.2 --trials 30`

    The folder `runs/tune/NAME/` then holds `best.yaml`, an experiment for `fedlens run`,
    `trials.csv` and `trials.json` with all trials, and figures of the search.
    """
    from fedlens.config.compose import compose, word
    from fedlens.config.schema import FOLDER_NAME
    from fedlens.tuning.space import space

    if name is not None and name not in FOLDER_NAME:
        raise FedlensError(f"--name {shown(name)} must be {FOLDER_NAME}.")
    words = [*(overrides or []), *([f"run.root={word(str(root))}"] if root else [])]
    config = compose(experiment, words)
    if config.run.name:
        raise FedlensError(
            "A search names its runs itself: leave run.name out, or use --name for the search."
        )
    dimensions = space(config, words, search or [])
    from fedlens.reporting.figures.search import draw
    from fedlens.tuning.search import PRUNERS, Search
    from fedlens.tuning.trial_records import best_trial, percent
    from fedlens.tuning.tune import run_search

    if pruner not in PRUNERS:
        raise FedlensError(f"--pruner {pruner} is unknown: {suggest(pruner, PRUNERS)}")
    settings = Search(config, dimensions, seed, pruner, name)
    for dimension in dimensions:
        out.print(f"Searching {dimension.key} in {dimension}", **PLAIN)
    from fedlens.experiments.run import start

    command = shlex.join(["fedlens", *sys.argv[1:]])
    record = run_search(settings, trials=trials, start=start, minutes=timeout, command=command)
    chosen, states = best_trial(record), [trial["state"] for trial in record["trials"]]
    if chosen is None:
        raise FedlensError(
            f"No trial of {record['name']} was completed ({states.count('failed')} failed): read "
            f"{settings.folder / 'trials.csv'}, and change the search space."
        )
    draw(record, settings.folder)
    out.print(
        f"{counted(len(states), 'trial')}, {states.count('pruned')} stopped early, "
        f"{states.count('failed')} failed. The best is trial {chosen['number']}, with validation "
        f"accuracy {percent(chosen['value'])} and",
        **PLAIN,
    )
    for key, value in chosen["params"].items():
        out.print(f"  {key}={value}", **PLAIN)
    out.print(f"Figures and all trials: {settings.folder}", **PLAIN)
    out.print(f"Test it: fedlens run {settings.folder / 'best.yaml'}", **PLAIN)
