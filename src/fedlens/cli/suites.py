"""`fedlens suite`: carry out a declared study, however often it is interrupted, and tabulate it."""

import logging
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fedlens.cli import arithmetic
from fedlens.cli.shared import PLAIN, Overrides, out
from fedlens.config.schema import Config
from fedlens.errors import FedlensError, suggest
from fedlens.runtime.stop import Interrupted, StopRequest, listening
from fedlens.suites.eta import Outlook
from fedlens.suites.launch import Outcome, Piece, in_turn
from fedlens.suites.plan import Planned, estimates, once, outlook_of, planned, unfinished
from fedlens.suites.progress import in_words, overall
from fedlens.suites.slurm import executor, parameters, submitted
from fedlens.suites.suite import find, only, suites
from fedlens.suites.workers import Workers

app = typer.Typer()
log = logging.getLogger(__name__)

UsageError: Any = typer.BadParameter.__base__  # typer may bring a click of its own

Play = Callable[[Sequence[Piece], Outlook, StopRequest], Iterator[Outcome]]


class Launcher(StrEnum):
    here = "here"
    slurm = "slurm"
    local = "local"


@app.command()
def suite(
    which: Annotated[
        str | None,
        typer.Argument(metavar="[SUITE]", help="Its name, or a YAML file; without it, list all."),
    ] = None,
    overrides: Overrides = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="How many; else what the suite says.")
    ] = None,
    only_: Annotated[
        list[str] | None,
        typer.Option(
            "--only", metavar="TEXT", help="Runs whose 'section / row / column' has it; repeatable."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the runs and an estimate of their time.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time: one here, all of them on SLURM.")
    ] = None,
    launcher: Annotated[
        Launcher, typer.Option(help="This machine, SLURM, or submitit's stand-in for it.")
    ] = Launcher.here,
    slurm: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="For the jobs, as `partition=gpu`; repeatable."),
    ] = None,
) -> None:
    """Carry out a study: what is finished is skipped, what was interrupted goes on.

    A run that fails does not stop the others; the end lists it with the command that repeats it.

    Example: `fedlens suite heterogeneity train=head augment=none backbone=vit_tiny --seeds 3`

    A look ahead: `fedlens suite paper --dry-run`; on a cluster:
    `fedlens suite paper --launcher slurm --slurm partition=gpu --slurm gpus_per_node=1`
    (there runs are jobs; analyses follow one by one in this process)
    """
    if which is None:
        for entry in suites():
            out.print(f"[bold]{entry.name}[/bold]")
            out.print(entry.documentation + "\n", **PLAIN)
        return
    if slurm and launcher is Launcher.here:
        raise FedlensError("--slurm is for jobs: say --launcher slurm too, or leave it out.")
    runs = planned(only(find(which).cells(overrides or [], seeds=seeds), only_ or []))
    for run in runs:
        for words in run.cell.analyses:
            _check(words)
    todo = unfinished(runs)
    at_once = jobs or (max(1, len(todo)) if launcher is Launcher.slurm else 1)
    if dry_run:
        _look_ahead(once(runs), at_once, apart=launcher is Launcher.slurm)
        return
    root, title = Path(runs[0].cell.config.run.root), f"suite {Path(which).stem}"
    for run in todo:
        if run.folder.failure:
            log.warning("%s failed before and is tried again: %s", run.label, run.folder.failure)
    with listening() as stop, _launching(launcher, at_once, root, slurm or []) as ways:
        play, analyse = ways
        try:
            pieces = [run.piece(_start) for run in todo]
            failed = _played(title, play, pieces, outlook_of(todo, at_once=at_once), stop)
            asked = _analyses(runs)
            hands = at_once if launcher is Launcher.here else 1
            later = Outlook({piece.label: 1.0 for piece in asked}, {}, at_once=hands)
            failed += _played(f"{title}, analyses", analyse, asked, later, stop)
        except Interrupted as reason:
            raise Interrupted(_farewell(launcher)) from reason
    _tell(runs, failed)
    out.print(f"Next: fedlens report {root} --out report", **PLAIN)
    if failed:
        raise FedlensError(f"{len(failed)} failed; what else there is to the study is whole.")


@contextmanager
def _launching(
    launcher: Launcher, at_once: int, root: Path, told: list[str]
) -> Iterator[tuple[Play, Play]]:
    """How runs are carried out, and how analyses are."""
    if launcher is Launcher.here and at_once == 1:
        yield in_turn, in_turn
    elif launcher is Launcher.here:
        with Workers(at_once, threads=_threads(at_once)) as workers:
            yield workers.play, workers.play
    else:
        through = executor(launcher, root / "slurm", parameters(told))
        yield partial(submitted, through=through, at_once=at_once), in_turn


def _threads(at_once: int) -> int:
    from fedlens.runtime.threads import available

    return max(1, available() // at_once)


def _played(
    title: str, play: Play, pieces: Sequence[Piece], outlook: Outlook, stop: StopRequest
) -> list[Outcome]:
    """Those that failed, when all have been tried."""
    failed: list[Outcome] = []
    if not pieces:
        return failed
    with overall(title, outlook):
        for outcome in play(pieces, outlook, stop):
            far = f"{outlook.finished} of {len(pieces)}, {in_words(outlook.left())}"
            if outcome.failure:
                failed.append(outcome)
                log.warning("failed: %s: %s (%s)", outcome.piece.label, outcome.failure, far)
            else:
                log.info("finished: %s (%s)", outcome.piece.label, far)
    return failed


def _start(config: Config) -> None:
    from fedlens.experiments.run import start

    start(config)


def _analyses(runs: Sequence[Planned]) -> list[Piece]:
    """What is asked of the runs that are finished, once even where several cells ask it."""
    found: dict[tuple[str, ...], Piece] = {}
    for run in runs:
        for asked in run.cell.analyses if run.folder.result is not None else []:
            name, *options = shlex.split(asked)
            words = [name, str(run.folder.path), *options]
            label = f"{asked}: {run.label}"
            piece = Piece(label, ["arithmetic", *words], partial(_analyse, words), run.folder)
            found.setdefault(tuple(words), piece)
    return list(found.values())


def _analyse(words: list[str]) -> None:
    """As by `fedlens arithmetic`; the record is what counts here, not the page."""
    before, out.quiet = out.quiet, True
    try:
        typer.main.get_command(arithmetic.app).main(words, standalone_mode=False)
    finally:
        out.quiet = before


def _check(asked: str) -> None:
    """Refuses words `fedlens arithmetic` would refuse, before anything is trained."""
    group = typer.main.get_command(arithmetic.app)
    assert isinstance(group, typer.core.TyperGroup)
    name, *options = shlex.split(asked)
    if name not in group.commands:
        raise FedlensError(f"There is no analysis '{name}': {suggest(name, group.commands)}")
    try:
        group.commands[name].make_context(name, ["RUN", *options])
    except UsageError as error:
        raise FedlensError(f"The analysis '{asked}' is refused: {error}") from error


def _look_ahead(runs: Sequence[Planned], at_once: int, *, apart: bool) -> None:
    """`apart`: each job has a machine's threads to itself."""
    from fedlens.reporting.terminal.runs import plan_table
    from fedlens.runtime.threads import limited_threads
    from fedlens.suites.probe import pace

    def timed(config: Config, tasks: Collection[str]) -> dict[str, float]:
        with limited_threads(config.threads or _threads(1 if apart else at_once)):
            return pace(config, tasks)

    todo = [run for run in runs if run.folder.result is None]
    seconds = dict(zip([run.label for run in todo], estimates(todo, timed), strict=True))
    out.print(
        plan_table(
            [
                (run.label, run.state(), f"{run.units} {run.unit}", seconds.get(run.label))
                for run in runs
            ]
        )
    )
    total = max([sum(seconds.values()) / at_once, *seconds.values()], default=0.0)
    out.print(
        f"{len(todo)} of {len(runs)} runs to do: about {total / 60:.1f} min with {at_once} at a "
        "time. An estimate, from a few timed steps of each kind, as if nothing were in the cache; "
        "analyses come on top.",
        **PLAIN,
    )


def _tell(runs: Sequence[Planned], failed: Sequence[Outcome]) -> None:
    from fedlens.reporting.terminal.runs import suite_table

    for section in dict.fromkeys(run.cell.section for run in runs):
        table = suite_table([(r.cell, r.folder) for r in runs if r.cell.section == section])
        out.print(table)
        out.print()
    for outcome in failed:
        out.print(f"failed: {outcome.piece.label}: {outcome.failure}", style="red", **PLAIN)
        out.print(f"  again: {shlex.join(['fedlens', *outcome.piece.words])}", **PLAIN)


def _farewell(launcher: Launcher) -> str:
    command = shlex.join(["fedlens", *sys.argv[1:]])
    if launcher is Launcher.slurm:
        return f"the jobs that were submitted go on; watch them with the same command: {command}"
    return f"go on with the same command: {command}"
