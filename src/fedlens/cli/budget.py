"""`fedlens suite --budget`: plan a study into a given time, and carry the plan out or resume it."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedlens.cli.shared import PLAIN, out
from fedlens.runtime.units import duration_text

if TYPE_CHECKING:
    from fedlens.suites.budget import BudgetPlan
    from fedlens.suites.plan import PlannedRun
    from fedlens.suites.plan_file import Request, StoredPlan
    from fedlens.suites.suite import Cell, Suite

    Seconds = Callable[[Sequence[PlannedRun]], list[float]]


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
    suite: "Suite",
    cells: "Sequence[Cell]",
    request: "Request",
    budget: float,
    *,
    at_once: int,
    seconds: "Seconds",
    dry_run: bool,
    where: str,
) -> BudgetedStudy:
    """The study of an unfinished plan with this budget, else of a new plan; prints either.

    `seconds` estimates the time of each run, `where` says on which machine.
    """
    from fedlens.suites import budget as planner
    from fedlens.suites import plan_file
    from fedlens.suites.levels import at_level

    root = Path(cells[0].config.run.root)
    path = request.path(root)
    fixed = {word.partition("=")[0] for word in request.overrides}
    stored = plan_file.read(path)
    if stored is not None:
        known = at_level(cells, stored.level, fixed)
        runs = plan_file.chosen(stored.runs, known, path)
        if stored.seconds == budget and stored.seconds_left and _unfinished(runs):
            _print_resumed(stored, runs, path)
            return BudgetedStudy(stored, runs, path, request)
    made = planner.make(
        cells,
        suite.budget,
        budget,
        at_once=at_once,
        at_level=lambda some, level: at_level(some, level, fixed),
        timer=lambda some: _remaining(some, seconds),
        level=stored.level if stored else None,
    )
    print_plan(made, budget, at_once, where)
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


def print_plan(made: "BudgetPlan", budget: float, at_once: int, where: str) -> None:
    from fedlens.reporting.terminal.suites import budget_table, skipped_table
    from fedlens.suites.levels import setting_text

    out.print(
        f"Plan for {duration_text(budget)} on {where}, {_at_a_time(at_once)}.\n"
        f"All runs: {setting_text(made.cells)} ({made.level.text}).",
        **PLAIN,
    )
    out.print()
    out.print(budget_table(made, at_once))
    if made.skipped:
        out.print()
        out.print(skipped_table(made.skipped))
    out.print()
    out.print(
        f"{len(made.cells)} runs, about {duration_text(made.total(at_once))} in all; "
        f"{len(made.left_out)} left out.",
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


def _remaining(cells: "Sequence[Cell]", seconds: "Seconds") -> list[float]:
    """Seconds that each cell still takes; 0 where its run has finished or stands before it."""
    from fedlens.suites.plan import plan, unfinished

    runs = plan(cells)
    todo = unfinished(runs)
    left = {run.label: took for run, took in zip(todo, seconds(todo), strict=True)}
    return [left.pop(run.label, 0.0) for run in runs]


def _at_a_time(at_once: int) -> str:
    return "one run at a time" if at_once == 1 else f"{at_once} runs at a time"
