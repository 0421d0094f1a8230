"""`fedlens suite`: run a declared study, resume it after an interruption, and tabulate it."""

import logging
import math
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from fedlens.cli.budget import BudgetedStudy, budgeted
from fedlens.cli.commands import arithmetic
from fedlens.cli.shared import PLAIN, Commands, Overrides, Plugins, out, print_entries
from fedlens.errors import FedlensError, suggest
from fedlens.runtime.shared_machine import warn_if_busy
from fedlens.runtime.stop import Interrupted, StopRequest, listening
from fedlens.runtime.units import parse_duration, size_text

if TYPE_CHECKING:
    from fedlens.config.schema import Config
    from fedlens.suites.estimates.calculator import Calculator
    from fedlens.suites.estimates.machines import KnownMachine, Machine
    from fedlens.suites.eta import Eta
    from fedlens.suites.launch import Job, Outcome
    from fedlens.suites.plan import PlannedAnalysis, PlannedRun
    from fedlens.suites.suite import Cell, Suite

    class Launch(Protocol):
        def __call__(
            self, jobs: Sequence[Job], eta: Eta, stop: StopRequest, *, until: float = math.inf
        ) -> Iterator[Outcome]: ...


app = Commands()
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
        typer.Argument(
            metavar="[SUITE]",
            help="A suite's name, or a YAML file. Without it, all suites are listed.",
        ),
    ] = None,
    overrides: Overrides = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, max=10_000, help="The number of seeds; default: set by the suite."),
    ] = None,
    only_: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="TEXT",
            help="Only runs whose label, 'section / row / column', contains this text; repeatable.",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Fit the study into this time, such as 20m, 12h or 3d. All runs are reduced in "
            "the same way; if that is not enough, runs are left out by priority. Run the same "
            "command again to resume, and then to run what was left out.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the runs, and estimate their time and memory.")
    ] = False,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="MACHINE",
            help="With --dry-run: estimate for another machine: `t4`, `a100`, `cpu2` or `cpu8`.",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1024,
            help="How many runs to execute at the same time; default: 1 on this machine, all on "
            "SLURM.",
        ),
    ] = None,
    launcher: Annotated[
        Launcher,
        typer.Option(
            help="Where to run: on this machine, on SLURM, or in a local emulation of SLURM."
        ),
    ] = Launcher.here,
    slurm: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="A SLURM job option, such as `partition=gpu`; repeatable."
        ),
    ] = None,
    _plugins: Plugins = None,
) -> None:
    """Run a suite of experiments. Finished runs are skipped, interrupted ones resumed.

    A failed run does not stop the others. The command that repeats it is printed at the end.

    Example: `fedlens suite heterogeneity train=head augment=none backbone=vit_tiny --seeds 3`

    To estimate time and memory first: `fedlens suite paper --dry-run`, or for another machine
    `fedlens suite paper --dry-run --on t4`.

    On a cluster, every run is a job: `fedlens suite paper --launcher slurm --slurm partition=gpu
    --slurm gpus_per_node=1`. Analyses follow one by one in this process.
    """
    from fedlens.suites.estimates.calculator import Calculator
    from fedlens.suites.estimates.machines import (
        LONGER_PATIENCE_S,
        PATIENCE_S,
        ThisMachine,
        known_machine,
        remembers_speeds,
    )
    from fedlens.suites.plan import analyses_of, eta_of, plan, unfinished
    from fedlens.suites.plan_file import Request
    from fedlens.suites.suite import find, suites

    began = time.monotonic()
    if name is None:
        print_entries((entry.name, entry.documentation) for entry in suites())
        out.print("Run one: fedlens suite NAME. Estimate its time first: add --dry-run", **PLAIN)
        return
    if slurm and launcher is Launcher.here:
        raise FedlensError(
            "--slurm sets options of SLURM jobs: add --launcher slurm, or leave --slurm out."
        )
    if on is not None and not dry_run:
        raise FedlensError("--on estimates the time on another machine: add --dry-run.")
    elsewhere = None if on is None else known_machine(on)
    declared = find(name)
    seconds = parse_duration(budget) if budget is not None else declared.budget.time
    if seconds and launcher is Launcher.slurm and not jobs:
        raise FedlensError("A budget on SLURM needs --jobs N: how many jobs run at a time.")
    study = None
    with Calculator() as calculator:
        if (dry_run or seconds) and not remembers_speeds():
            calculator.start()  # loads torch while the runs are composed
        machine = partial(
            _machine, calculator, elsewhere, began=began, separate=launcher is Launcher.slurm,
            patience=PATIENCE_S if dry_run else LONGER_PATIENCE_S,
        )  # fmt: skip
        cells = _cells(declared, overrides or [], seeds, only_ or [], budgeted=bool(seconds))
        if seconds:
            request = Request(name, tuple(overrides or ()), tuple(only_ or ()), seeds)
            study = budgeted(
                declared.budget, cells, request, seconds, machine, at_once=jobs or 1,
                dry_run=dry_run,
            )  # fmt: skip
            cells = study.cells
        runs = plan(cells)
        at_once = _at_once(jobs, launcher, unfinished(runs))
        if dry_run and study is None:
            _print_estimate(runs, at_once, machine(at_once))
    if dry_run:
        return
    todo, analyses = unfinished(runs), analyses_of(runs)
    if todo and launcher is not Launcher.slurm:  # which computes on other machines
        warn_if_busy()
    root, title = Path(runs[0].cell.config.run.root), f"suite {Path(name).stem}"
    for run in todo:
        if run.folder.failure:
            log.warning("%s failed before and runs again: %s", run.label, run.folder.failure)
    with (
        listening() as stop,
        Calculator() as calculator,
        _launchers(launcher, at_once, root, slurm or []) as (launch_runs, launch_analyses),
    ):
        eta = eta_of(
            todo,
            analyses,
            jobs=at_once,
            machine=ThisMachine(calculator, at_once=at_once, seconds=0.0),
        )
        try:
            run_jobs = [run.job(_start) for run in todo]
            failed = _carry_out(title, launch_runs, run_jobs, eta, stop, study)
            not_started = [run for run in unfinished(runs) if not run.folder.failure]
            possible = [one for one in analyses if one.run.folder.finished]
            eta.leave_out(run.label for run in not_started)
            eta.leave_out(one.label for one in analyses if one not in possible)
            eta.jobs = at_once if launcher is Launcher.here else 1
            analysis_jobs = [_analysis_job(one) for one in possible]
            failed += _carry_out(f"{title}, analyses", launch_analyses, analysis_jobs, eta, stop)
        except Interrupted as reason:
            raise Interrupted(_resume_hint(launcher)) from reason
    _print_results(runs, failed)
    if study:
        study.print_left_out(len(not_started))
    words = ["fedlens", "report", str(root), "--out", "report"]
    if declared.contrasts:
        words += ["--suite", shlex.join([name, *(overrides or [])])]
    out.print(f"Next: {shlex.join(words)}", **PLAIN)
    if failed:
        raise FedlensError(f"{len(failed)} failed (see above); all other runs have finished.")


def _cells(
    declared: "Suite", overrides: list[str], seeds: int | None, texts: list[str], *, budgeted: bool
) -> "list[Cell]":
    """The cells of a suite, all that a budget may choose from; refuses what would fail later."""
    from fedlens.suites.budget import SEEDS
    from fedlens.suites.suite import only

    if budgeted and seeds is None:
        seeds = max(SEEDS, declared.seeds or 1)
    cells = only(declared.cells(overrides, seeds=seeds), texts)
    for command in dict.fromkeys(command for cell in cells for command in cell.analyses):
        _check_analysis(command)
    return cells


def _machine(
    calculator: "Calculator",
    elsewhere: "KnownMachine | None",
    at_once: int,
    *,
    separate: bool,
    began: float,
    patience: float,
) -> "Machine":
    """What estimates are for; `separate`: each run has a machine of its own."""
    from fedlens.suites.estimates.machines import Elsewhere, ThisMachine

    if elsewhere is not None:
        return Elsewhere(elsewhere, calculator)
    return ThisMachine(
        calculator,
        at_once=1 if separate else at_once,
        began=began,
        patience=patience,
    )


def _at_once(jobs: int | None, launcher: Launcher, todo: "Sequence[PlannedRun]") -> int:
    return jobs or (max(1, len(todo)) if launcher is Launcher.slurm else 1)


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
            state = f"{eta.finished} of {eta.count}, {time_left_text(eta.seconds_left())}"
            if outcome.failure:
                failed.append(outcome)
                log.warning("failed: %s: %s (%s)", outcome.job.label, outcome.failure, state)
            else:
                log.info("finished: %s (%s)", outcome.job.label, state)
    return failed


def _start(config: "Config") -> None:
    from fedlens.experiments.run import start

    start(config)


def _analysis_job(analysis: "PlannedAnalysis") -> "Job":
    from fedlens.suites.launch import Job

    words = analysis.words
    call = partial(_analyse, words)
    return Job(analysis.label, ["arithmetic", *words], call, analysis.run.folder)


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


def _print_estimate(runs: "Sequence[PlannedRun]", at_once: int, machine: "Machine") -> None:
    from fedlens.reporting.terminal.suites import PlannedLine, estimate_text, plan_table
    from fedlens.suites.eta import makespan
    from fedlens.suites.plan import analyses_of, analysis_estimates, estimates, unique_runs

    unique = unique_runs(runs)
    todo = [run for run in unique if not run.folder.finished]
    analyses = [one for one in analyses_of(runs) if not one.done]
    seconds = dict(zip([run.label for run in todo], estimates(todo, machine), strict=True))
    later = analysis_estimates(analyses, machine)
    memory = {run.label: machine.peak_memory(run.cell.config) for run in todo}
    lines = [
        PlannedLine(run.cell, run.state(), run.units, run.unit, seconds.get(run.label))
        for run in unique
    ]
    out.print(plan_table(lines))
    total = makespan([*seconds.values(), *later], at_once)
    out.print(estimate_text(len(unique), len(todo), len(analyses), total, at_once, memory), **PLAIN)
    largest = max(memory.values(), default=0)
    if machine.memory is not None and largest > machine.memory:
        log.warning(
            "This is more than the %s of memory that the machine has.", size_text(machine.memory)
        )
    out.print(
        f"{machine.sentence()} The estimate assumes an empty cache and no early stopping.", **PLAIN
    )


def _print_results(runs: "Sequence[PlannedRun]", failed: "Sequence[Outcome]") -> None:
    from fedlens.reporting.terminal.suites import suite_table

    for section in dict.fromkeys(run.cell.section for run in runs):
        table = suite_table([(r.cell, r.folder) for r in runs if r.cell.section == section])
        out.print(table)
        out.print()
    for outcome in failed:
        out.print(f"failed: {outcome.job.label}: {outcome.failure}", style="red", **PLAIN)
        out.print(f"  run it again: {shlex.join(['fedlens', *outcome.job.arguments])}", **PLAIN)


def _resume_hint(launcher: Launcher) -> str:
    command = shlex.join(["fedlens", *sys.argv[1:]])
    if launcher is Launcher.slurm:
        return f"submitted jobs continue; run the same command again to watch them: {command}"
    return f"run the same command again to resume: {command}"
