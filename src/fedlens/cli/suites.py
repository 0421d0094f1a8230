"""`fedlens suite`: run a declared study, resume it after an interruption, and tabulate it."""

import logging
import math
import shlex
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from fedlens.cli import arithmetic
from fedlens.cli.budget import BudgetedStudy, budgeted
from fedlens.cli.shared import PLAIN, Overrides, Plugins, out
from fedlens.errors import FedlensError, suggest
from fedlens.runtime.shared_machine import warn_if_busy
from fedlens.runtime.stop import Interrupted, StopRequest, listening
from fedlens.runtime.units import parse_duration

if TYPE_CHECKING:
    from fedlens.config.schema import Config
    from fedlens.suites.eta import Eta
    from fedlens.suites.launch import Job, Outcome
    from fedlens.suites.plan import PlannedRun

    class Launch(Protocol):
        def __call__(
            self, jobs: Sequence[Job], eta: Eta, stop: StopRequest, *, until: float = math.inf
        ) -> Iterator[Outcome]: ...


app = typer.Typer()
log = logging.getLogger(__name__)

UsageError: Any = typer.BadParameter.__base__  # typer may bring its own click


class Launcher(StrEnum):
    here = "here"
    slurm = "slurm"
    local = "local"


@app.command()
def suite(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[SUITE]", help="Its name, or a YAML file; without it, list all."),
    ] = None,
    overrides: Overrides = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="How many seeds; default: as the suite sets.")
    ] = None,
    only_: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="TEXT",
            help="Only runs whose 'section / row / column' contains it; repeatable.",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Plan the study into this time, such as 20m, 12h or 3d: one setting for all "
            "runs, then runs by priority. The same command resumes; later it continues with "
            "what was left out.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the runs and an estimate of their time.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Runs at a time; default: one on this machine, all on SLURM."),
    ] = None,
    launcher: Annotated[
        Launcher, typer.Option(help="This machine, SLURM, or submitit's local emulation of it.")
    ] = Launcher.here,
    slurm: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Job options, such as `partition=gpu`; repeatable."),
    ] = None,
    _plugins: Plugins = None,
) -> None:
    """Run a study: finished runs are skipped, interrupted ones are resumed.

    A failed run does not stop the others; the command that repeats it is printed at the end.

    Example: `fedlens suite heterogeneity train=head augment=none backbone=vit_tiny --seeds 3`

    Estimate the time first: `fedlens suite paper --dry-run`. On a cluster:
    `fedlens suite paper --launcher slurm --slurm partition=gpu --slurm gpus_per_node=1`
    (runs are jobs there; analyses follow one by one in this process)
    """
    from fedlens.suites.budget import SEEDS
    from fedlens.suites.eta import Eta
    from fedlens.suites.plan import eta_of, plan, unfinished, unique_runs
    from fedlens.suites.plan_file import Request
    from fedlens.suites.suite import find, only, suites

    if name is None:
        for entry in suites():
            out.print(f"[bold]{entry.name}[/bold]")
            out.print(entry.documentation + "\n", **PLAIN)
        return
    if slurm and launcher is Launcher.here:
        raise FedlensError("--slurm sets options of jobs: add --launcher slurm, or leave it out.")
    declared = find(name)
    seconds = parse_duration(budget) if budget else declared.budget.time
    most_seeds = seeds or max(SEEDS, declared.seeds or 1) if seconds else seeds
    cells = only(declared.cells(overrides or [], seeds=most_seeds), only_ or [])
    for command in {command for cell in cells for command in cell.analyses}:
        _check_analysis(command)
    study = None
    if seconds:
        if launcher is Launcher.slurm and not jobs:
            raise FedlensError("A budget on SLURM needs --jobs N: how many jobs run at a time.")
        request = Request(name, tuple(overrides or ()), tuple(only_ or ()), seeds)
        study = budgeted(
            declared, cells, request, seconds, at_once=jobs or 1, dry_run=dry_run,
            seconds=partial(_seconds, at_once=jobs or 1, own_machines=launcher is Launcher.slurm),
            where="this machine",
        )  # fmt: skip
        if dry_run:
            return
        cells = list(study.cells)
    runs = plan(cells)
    todo = unfinished(runs)
    at_once = jobs or (max(1, len(todo)) if launcher is Launcher.slurm else 1)
    if dry_run:
        _print_estimate(unique_runs(runs), at_once, own_machines=launcher is Launcher.slurm)
        return
    if todo and launcher is not Launcher.slurm:  # which computes on other machines
        warn_if_busy()
    root, title = Path(runs[0].cell.config.run.root), f"suite {Path(name).stem}"
    for run in todo:
        if run.folder.failure:
            log.warning("%s failed before and is run again: %s", run.label, run.folder.failure)
    with (
        listening() as stop,
        _launchers(launcher, at_once, root, slurm or []) as (launch_runs, launch_analyses),
    ):
        try:
            run_jobs = [run.job(_start) for run in todo]
            run_eta = eta_of(todo, jobs=at_once)
            failed = _carry_out(title, launch_runs, run_jobs, run_eta, stop, study)
            analysis_jobs = _analyses(runs)
            processes = at_once if launcher is Launcher.here else 1
            eta = Eta({job.label: 1.0 for job in analysis_jobs}, {}, jobs=processes)
            failed += _carry_out(f"{title}, analyses", launch_analyses, analysis_jobs, eta, stop)
        except Interrupted as reason:
            raise Interrupted(_resume_hint(launcher)) from reason
    _print_results(runs, failed)
    if study:
        study.print_left_out(len(run_jobs) - run_eta.finished)
    out.print(f"Next: fedlens report {root} --out report", **PLAIN)
    if failed:
        raise FedlensError(f"{len(failed)} failed (see above); all other runs have finished.")


@contextmanager
def _launchers(
    launcher: Launcher, at_once: int, root: Path, options: list[str]
) -> "Iterator[tuple[Launch, Launch]]":
    """How runs are carried out, and how analyses are."""
    from fedlens.suites.launch import run_in_turn
    from fedlens.suites.slurm import make_executor, parse_options, submit_all
    from fedlens.suites.workers import Workers

    if launcher is Launcher.here and at_once == 1:
        yield run_in_turn, run_in_turn
    elif launcher is Launcher.here:
        with Workers(at_once, threads=_threads(at_once)) as workers:
            yield workers.run, workers.run
    else:
        executor = make_executor(launcher, root / "slurm", parse_options(options))
        yield partial(submit_all, executor=executor, at_once=at_once), run_in_turn


def _threads(at_once: int) -> int:
    from fedlens.runtime.threads import available

    return max(1, available() // at_once)


def _carry_out(
    title: str,
    launch: "Launch",
    jobs: "Sequence[Job]",
    eta: "Eta",
    stop: StopRequest,
    study: "BudgetedStudy | None" = None,
) -> "list[Outcome]":
    """Launch all jobs and return the failed ones; a study's budget limits what is started."""
    from fedlens.suites.progress import suite_progress, time_left_text

    failed: list[Outcome] = []
    if not jobs:
        return failed
    with suite_progress(title, eta), study or nullcontext():
        for outcome in launch(jobs, eta, stop, until=study.until if study else math.inf):
            if study:
                study.save()
            state = f"{eta.finished} of {len(jobs)}, {time_left_text(eta.seconds_left())}"
            if outcome.failure:
                failed.append(outcome)
                log.warning("failed: %s: %s (%s)", outcome.job.label, outcome.failure, state)
            else:
                log.info("finished: %s (%s)", outcome.job.label, state)
    return failed


def _start(config: "Config") -> None:
    from fedlens.experiments.run import start

    start(config)


def _analyses(runs: "Sequence[PlannedRun]") -> "list[Job]":
    """The analyses of finished runs, without duplicates where several cells request one."""
    from fedlens.suites.launch import Job

    jobs: dict[tuple[str, ...], Job] = {}
    for run in runs:
        for command in run.cell.analyses if run.folder.result is not None else []:
            name, *options = shlex.split(command)
            words = [name, str(run.folder.path), *options]
            label = f"{command}: {run.label}"
            job = Job(label, ["arithmetic", *words], partial(_analyse, words), run.folder)
            jobs.setdefault(tuple(words), job)
    return list(jobs.values())


def _analyse(words: list[str]) -> None:
    """As `fedlens arithmetic`, without printing."""
    before, out.quiet = out.quiet, True
    try:
        typer.main.get_command(arithmetic.app).main(words, standalone_mode=False)
    finally:
        out.quiet = before


def _check_analysis(command: str) -> None:
    """Refuse a command that `fedlens arithmetic` would refuse, before anything is trained."""
    group = typer.main.get_command(arithmetic.app)
    assert isinstance(group, typer.core.TyperGroup)
    name, *options = shlex.split(command)
    if name not in group.commands:
        raise FedlensError(f"'{name}' is not a known analysis: {suggest(name, group.commands)}")
    try:
        group.commands[name].make_context(name, ["RUN", *options])
    except UsageError as error:
        raise FedlensError(f"The analysis '{command}' is not valid: {error}") from error


def _print_estimate(runs: "Sequence[PlannedRun]", at_once: int, *, own_machines: bool) -> None:
    """`own_machines`: each job has all threads of a machine."""
    from fedlens.reporting.terminal.suites import plan_table

    todo = [run for run in runs if run.folder.result is None]
    took = _seconds(todo, at_once=at_once, own_machines=own_machines)
    seconds = dict(zip([run.label for run in todo], took, strict=True))
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
        "time. This estimate is based on a few timed steps of each kind and an empty cache; "
        "analyses are not included.",
        **PLAIN,
    )


def _seconds(runs: "Sequence[PlannedRun]", *, at_once: int, own_machines: bool) -> list[float]:
    """What each run still takes, from timed steps."""
    from fedlens.runtime.threads import limited_threads
    from fedlens.suites.plan import estimates
    from fedlens.suites.probe import seconds_per_image

    def probe(config: "Config", tasks: Collection[str]) -> dict[str, float]:
        with limited_threads(config.threads or _threads(1 if own_machines else at_once)):
            return seconds_per_image(config, tasks)

    return estimates(runs, probe)


def _print_results(runs: "Sequence[PlannedRun]", failed: "Sequence[Outcome]") -> None:
    from fedlens.reporting.terminal.suites import suite_table

    for section in dict.fromkeys(run.cell.section for run in runs):
        table = suite_table([(r.cell, r.folder) for r in runs if r.cell.section == section])
        out.print(table)
        out.print()
    for outcome in failed:
        out.print(f"failed: {outcome.job.label}: {outcome.failure}", style="red", **PLAIN)
        out.print(f"  repeat: {shlex.join(['fedlens', *outcome.job.arguments])}", **PLAIN)


def _resume_hint(launcher: Launcher) -> str:
    command = shlex.join(["fedlens", *sys.argv[1:]])
    if launcher is Launcher.slurm:
        return f"submitted jobs continue; run the same command again to watch them: {command}"
    return f"run the same command again to resume: {command}"
