"""`fedlens suite --budget`: plan a study into a given time, and carry the plan out or resume it."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fedlens.cli.shared import PLAIN, out
from fedlens.runtime.units import counted, duration_text, size_text

if TYPE_CHECKING:
    from fedlens.suites.budget import BudgetPlan, Phase
    from fedlens.suites.budget_rules import BudgetRules
    from fedlens.suites.estimates.machines import Machine
    from fedlens.suites.plan import PlannedRun
    from fedlens.suites.plan_file import Request, StoredPlan
    from fedlens.suites.suite import Cell


class BudgetedStudy:
    """The runs of a plan, and the clock of its budget; a context saves the time it took."""

    def __init__(
        self, plan: "StoredPlan", cells: "list[Cell]", path: Path, request: "Request"
    ) -> None:
        self.plan = plan
        self.cells = cells
        self.path = path
        self.request = request
        self._started = time.monotonic()

    def __enter__(self) -> "BudgetedStudy":
        return self

    def __exit__(self, *error: object) -> None:
        self.save()

    @property
    def until(self) -> float:
        """When the budget is used up, in seconds of `time.monotonic`."""
        return self._started + self.plan.seconds_left

    def save(self) -> None:
        """Writes the plan with the time used so far."""
        elapsed = time.monotonic() - self._started
        self.plan.used(self.plan.used_seconds + elapsed).write(self.path, self.request)

    def print_left_out(self, not_started: int) -> None:
        if not_started:
            out.print(
                f"The budget of {duration_text(self.plan.seconds)} is used up: "
                f"{_runs_were(not_started, 'planned run')} not started.",
                **PLAIN,
            )
        if count := not_started + len(self.plan.left_out):
            out.print(
                f"{_runs_were(count, 'run')} left out so far. Run the same command again, or with "
                "another --budget, to continue.",
                **PLAIN,
            )


def budgeted(
    rules: "BudgetRules",
    cells: "Sequence[Cell]",
    request: "Request",
    budget: float,
    make_machine: "Callable[[int], Machine]",
    *,
    at_once: int,
    dry_run: bool,
) -> BudgetedStudy:
    """The study of an unfinished plan with this budget, else of a new plan; prints either."""
    from fedlens.suites import budget as planner
    from fedlens.suites import plan_file
    from fedlens.suites.levels import Cutter
    from fedlens.suites.plan import plan, remaining_costs, run_costs

    path = request.path(Path(cells[0].config.run.root))
    cut = Cutter(cells, fixed={word.partition("=")[0] for word in request.overrides})
    folders = {plan_file.named(run.cell): run.folder.path for run in plan(cells)}
    ordered = _each_run_once(planner.in_order(cells, rules), folders)
    stored = plan_file.read(path)

    def study(found: "StoredPlan") -> BudgetedStudy:
        """In the plan's order, with every cell of the suite that has one of its runs."""
        chosen = [folders[name] for name in plan_file.checked(found.runs, folders, path)]
        places = {folder: place for place, folder in enumerate(chosen)}
        in_plan = [cell for cell in cells if folders[plan_file.named(cell)] in places]
        in_plan.sort(key=lambda cell: places[folders[plan_file.named(cell)]])
        return BudgetedStudy(found, cut(in_plan, found.level), path, request)

    if stored is not None and stored.seconds == budget and stored.seconds_left:
        resumed = study(stored)
        if _unfinished(resumed.cells):
            _print_resumed(resumed)
            return resumed
    machine = make_machine(at_once)
    made = planner.make(
        ordered,
        rules.levels if stored is None else [stored.level],
        budget,
        at_once=at_once,
        at_level=cut,
        timer=partial(remaining_costs, machine=machine),
        rough_timer=partial(run_costs, machine=machine.without_timing()),
    )
    print_plan(made, budget, at_once, machine)
    kept, left_out = (tuple(map(plan_file.named, some)) for some in (made.cells, made.left_out))
    new = plan_file.StoredPlan(made.level, budget, kept, left_out)
    if not dry_run:
        new.write(path, request)
        out.print(f"The plan is in {path}.", **PLAIN)
    return study(new)


def _each_run_once(
    ordered: "Sequence[tuple[Phase, Cell]]", folders: Mapping[str, Path]
) -> "list[tuple[Phase, Cell]]":
    """The first cell of each run, with the analyses of all cells that have the run."""
    from fedlens.suites.plan_file import named

    first: dict[Path, tuple[Phase, Cell]] = {}
    for phase, cell in ordered:
        folder = folders[named(cell)]
        before, same = first.setdefault(folder, (phase, cell))
        analyses = list(dict.fromkeys([*same.analyses, *cell.analyses]))
        first[folder] = (before, replace(same, analyses=analyses))
    return list(first.values())


def print_plan(made: "BudgetPlan", budget: float, at_once: int, machine: "Machine") -> None:
    from fedlens.reporting.terminal.suites import budget_table, skipped_table
    from fedlens.suites.budget import SEEDS
    from fedlens.suites.levels import setting_text

    pace = "one run at a time" if at_once == 1 else f"{at_once} runs at a time"
    out.print(
        f"A plan for {duration_text(budget)}, {pace}.\n"
        f"All runs: {setting_text(made.cells)}.\n"
        f"Level: {made.level.text}.\n",
        **PLAIN,
    )
    out.print(budget_table(made, at_once))
    if made.skipped:
        out.print()
        out.print(skipped_table(made.skipped))
    if made.headline_left_out:
        out.print(
            f"\nOf the headline with {SEEDS} seeds, {_runs_were(made.headline_left_out, 'run')} "
            "left out: continue with another budget before you compare its results.",
            **PLAIN,
        )
    if made.passed_over:
        out.print(
            f"\n{_runs_were(made.passed_over, 'run')} left out because they are too long, although "
            "shorter ones of lower priority are in the plan: a larger --budget includes them.",
            **PLAIN,
        )
    memory = max(machine.peak_memory(cell.config) for cell in made.cells)
    out.print(
        f"\n{counted(len(made.cells), 'run')}: about {duration_text(made.total(at_once))}, at most "
        f"{size_text(memory)} of memory in the largest. {machine.sentence()}",
        **PLAIN,
    )


def _runs_were(count: int, noun: str) -> str:
    return f"{counted(count, noun)} {'was' if count == 1 else 'were'}"


def _print_resumed(study: BudgetedStudy) -> None:
    plan, left = study.plan, len(_unfinished(study.cells))
    out.print(
        f"Resuming the plan {study.path}: {len(plan.runs) - left} of {len(plan.runs)} runs have "
        f"finished, {duration_text(plan.used_seconds)} of {duration_text(plan.seconds)} used.",
        **PLAIN,
    )


def _unfinished(cells: "Sequence[Cell]") -> "list[PlannedRun]":
    """Runs of a plan that neither finished nor failed."""
    from fedlens.suites.plan import plan, unfinished

    return [run for run in unfinished(plan(cells)) if not run.folder.failure]
