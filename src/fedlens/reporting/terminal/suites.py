"""Suites as tables in a terminal: what is planned, and test accuracies over seeds."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fedlens.reporting.study.labels import NONE
from fedlens.reporting.study.statistics import estimate
from fedlens.runtime.units import duration_text
from fedlens.store.run_folder import RunFolder
from fedlens.suites.budget import BudgetPlan
from fedlens.suites.budget_rules import Level
from fedlens.suites.suite import SLASH, Cell


def suite_table(runs: Sequence[tuple[Cell, RunFolder]]) -> Table:
    """Test accuracy in % of every row and column: mean ± half the 95 % interval over seeds."""
    columns = list(dict.fromkeys(cell.column for cell, _ in runs))
    title = runs[0][0].section or None
    heads = [column or "accuracy" for column in columns]
    table = Table("test top-1 in %", *heads, title=title, title_justify="left", box=None)
    for row in dict.fromkeys(cell.row for cell, _ in runs):
        folders = [
            [folder for cell, folder in runs if (cell.row, cell.column) == (row, column)]
            for column in columns
        ]
        table.add_row(row, *map(_over_seeds, folders))
    return table


def _over_seeds(folders: Sequence[RunFolder]) -> RenderableType:
    results = [result for folder in folders if (result := folder.result)]
    tested = [100 * result["test"]["top1"] for result in results if "test" in result]
    if not tested and len(results) < len(folders):
        failed = any(folder.failure for folder in folders)
        return Text("failed", style="red") if failed else Text("not run", style="dim")
    if not tested:
        return NONE
    accuracy = estimate(tested)
    text = f"{accuracy.mean:.2f}" + ("" if accuracy.half is None else f" ± {accuracy.half:.2f}")
    few = accuracy.count == 1 or accuracy.count < len(folders)
    of_all = f" of {len(folders)}" if accuracy.count < len(folders) else ""
    plural = "" if accuracy.count == 1 and not of_all else "s"
    return text + (f" ({accuracy.count}{of_all} seed{plural})" if few else "")


def plan_table(runs: Iterable[tuple[str, str, str, float | None]]) -> Table:
    """Runs with their state, their length and the seconds they may take."""
    table = Table("run", "state", "length", "minutes", box=None, pad_edge=False)
    for label, state, length, seconds in runs:
        table.add_row(label, state, length, NONE if seconds is None else f"{seconds / 60:.1f}")
    return table


def budget_table(plan: BudgetPlan, at_once: int) -> Table:
    """The parts of a study under a budget: what runs, with how many seeds, and what is left out."""
    columns = ("part", "runs", "seeds", "time", "left out", "would take")
    table = Table(*columns, box=None, pad_edge=False)
    planned = _by_part(plan.cells, plan.seconds)
    missing = _by_part(plan.left_out, plan.left_out_seconds)
    for part in dict.fromkeys((*planned, *missing)):
        runs, left = planned.get(part, _NO_RUNS), missing.get(part, _NO_RUNS)
        table.add_row(
            Text(part, overflow="ellipsis", no_wrap=True),
            *((str(runs.count), runs.seeds_text, duration_text(runs.seconds / at_once))
              if runs.count else (NONE, NONE, NONE)),
            *((f"{left.count}", duration_text(left.seconds / at_once))
              if left.count else (NONE, "")),
        )  # fmt: skip
    return table


def skipped_table(levels: Sequence[tuple[Level, float]]) -> Table:
    """Levels that do not fit, and what they would take."""
    table = Table("not chosen: it does not fit", "would take", box=None, pad_edge=False)
    for level, seconds in levels:
        table.add_row(level.text, duration_text(seconds))
    return table


@dataclass(frozen=True)
class _Runs:
    """Runs of one part of a study."""

    count: int
    seeds: tuple[int, ...]  # how many each cell has
    seconds: float

    @property
    def seeds_text(self) -> str:
        least, most = min(self.seeds), max(self.seeds)
        return str(least) if least == most else f"{least}–{most}"


_NO_RUNS = _Runs(0, (), 0.0)


def _by_part(cells: Sequence[Cell], seconds: Sequence[float]) -> dict[str, _Runs]:
    """By the outermost section, or by row in a suite of one table."""
    found: dict[str, list[tuple[Cell, float]]] = {}
    for cell, took in zip(cells, seconds, strict=True):
        found.setdefault(cell.section.split(SLASH)[0] or cell.row, []).append((cell, took))
    return {
        part: _Runs(
            len(runs),
            tuple(Counter(cell.label for cell, _ in runs).values()),
            math.fsum(took for _, took in runs),
        )
        for part, runs in found.items()
    }
