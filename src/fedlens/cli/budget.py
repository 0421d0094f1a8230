"""`fedlens suite --budget`: plan a study into a given time, and carry the plan out or resume it."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from fedlens.cli.shared import PLAIN, out
from fedlens.runtime.units import duration_text, size_text

if TYPE_CHECKING:
    from fedlens.suites.budget import BudgetPlan
    from fedlens.suites.budget_rules import BudgetRules
    from fedlens.suites.machines import Machine
    from fedlens.suites.plan import PlannedRun
    from fedlens.suites.plan_file import Request, StoredPlan
    from fedlens.suites.suite import Cell

    class MakeMachine(Protocol):
        def __call__(self, at_once: int, *, timing: bool = True) -> Machine: ...


class BudgetedStudy:
    """The runs of a plan, and the clock of its budget; a context saves the time it took."""

    def __init__(
        self, plan: "StoredPlan", cells: "Sequence[Cell]", path: Path, request: "Request"
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
                f"The budget of {duration_text(self.plan.seconds)} is used up: {not_started} "
                "planned runs were not started.",
                **PLAIN,
            )
        if count := not_started + len(self.plan.left_out):
            out.print(
                f"{count} runs are left out so far. Run the same command again, or with another "
                "--budget, to continue with them.",
                **PLAIN,
            )


def budgeted(
    rules: "BudgetRules",
    cells: "Sequence[Cell]",
    request: "Request",
    budget: float,
    make_machine: "MakeMachine",
    *,
    at_once: int,
    dry_run: bool,
) -> BudgetedStudy:
    """The study of an unfinished plan with this budget, else of a new plan; prints either."""
    from fedlens.suites import budget as planner
    from fedlens.suites import plan_file
    from fedlens.suites.levels import at_level
    from fedlens.suites.plan import remaining_seconds

    path = request.path(Path(cells[0].config.run.root))
    fixed = {word.partition("=")[0] for word in request.overrides}
    stored = plan_file.read(path)
    if stored is not None:
        runs = plan_file.chosen(stored.runs, at_level(cells, stored.level, fixed), path)
        if stored.seconds == budget and stored.seconds_left and _unfinished(runs):
            _print_resumed(stored, runs, path)
            return BudgetedStudy(stored, runs, path, request)
    machine = make_machine(at_once)
    made = planner.make(
        cells,
        rules,
        budget,
        at_once=at_once,
        at_level=partial(at_level, fixed=fixed),
        timer=partial(remaining_seconds, machine=machine),
        rough_timer=partial(remaining_seconds, machine=make_machine(at_once, timing=False)),
        level=stored.level if stored else None,
    )
    print_plan(made, budget, at_once, machine)
    plan = plan_file.StoredPlan(
        made.level,
        budget,
        tuple(map(plan_file.named, made.cells)),
        tuple(map(plan_file.named, made.left_out)),
    )
    if not dry_run:
        plan.write(path, request)
        out.print(f"The plan is in {path}.", **PLAIN)
    return BudgetedStudy(plan, made.cells, path, request)


def print_plan(made: "BudgetPlan", budget: float, at_once: int, machine: "Machine") -> None:
    from fedlens.reporting.terminal.suites import budget_table, skipped_table
    from fedlens.suites.levels import setting_text

    pace = "one run at a time" if at_once == 1 else f"{at_once} runs at a time"
    out.print(
        f"A plan for {duration_text(budget)}, {pace}.\n"
        f"All runs: {setting_text(made.cells)}.\n"
        f"Cut down from the suite: {made.level.text}.\n",
        **PLAIN,
    )
    out.print(budget_table(made, at_once))
    if made.skipped:
        out.print()
        out.print(skipped_table(made.skipped))
    memory = max(machine.peak_memory(cell.config) for cell in made.cells)
    out.print(
        f"\n{len(made.cells)} runs take about {duration_text(made.total(at_once))}, and at most "
        f"{size_text(memory)} of memory in the largest. {machine.sentence()}",
        **PLAIN,
    )


def _print_resumed(stored: "StoredPlan", cells: "Sequence[Cell]", path: Path) -> None:
    done = len(cells) - len(_unfinished(cells))
    out.print(
        f"Resuming the plan {path}: {done} of {len(cells)} runs finished, "
        f"{duration_text(stored.used_seconds)} of {duration_text(stored.seconds)} used.",
        **PLAIN,
    )


def _unfinished(cells: "Sequence[Cell]") -> "list[PlannedRun]":
    """Runs of a plan that neither finished nor failed."""
    from fedlens.suites.plan import plan, unfinished

    return [run for run in unfinished(plan(cells)) if not run.folder.failure]
