"""Suites as tables in a terminal: what is planned, and test accuracies over seeds."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fedlens.reporting.study.labels import NONE
from fedlens.reporting.study.statistics import estimate
from fedlens.runtime.units import counted, duration_text, size_text
from fedlens.store.run_folder import RunFolder
from fedlens.suites.budget import BudgetPlan
from fedlens.suites.budget_rules import Level
from fedlens.suites.suite import SLASH, Cell

MOST_LINES = 40  # of a plan that lists every run


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
    seeds = f"{accuracy.count}{of_all} seeds" if of_all else counted(accuracy.count, "seed")
    return text + (f" ({seeds})" if few else "")


@dataclass(frozen=True)
class PlannedLine:
    """A planned run: its state, its length, and the seconds it may take if it is not finished."""

    cell: Cell
    state: str
    units: int
    unit: str
    seconds: float | None

    @property
    def length(self) -> str:
        return counted(self.units, self.unit)


def plan_table(lines: Sequence[PlannedLine]) -> Table:
    """Every run on a line, or where there are many, every row of the suite."""
    if len(lines) <= MOST_LINES:
        table = _table("run", "state", "length", "time")
        for one in lines:
            label = f"{one.cell.label}, seed {one.cell.config.seed}"
            table.add_row(label, one.state, one.length, _time([one]))
        return table
    table = _table("row", "runs", "seeds", "to do", "length", "time")
    for section in dict.fromkeys(one.cell.section for one in lines):
        of_section = [one for one in lines if one.cell.section == section]
        if section:
            table.add_row(Text(section, style="bold"), *[""] * 4, _time(of_section))
        for row in dict.fromkeys(one.cell.row for one in of_section):
            of_row = [one for one in of_section if one.cell.row == row]
            label = f"  {row}" if section else row
            seeds = len({one.cell.config.seed for one in of_row})
            todo = sum(one.seconds is not None for one in of_row)
            table.add_row(label, str(len(of_row)), str(seeds), str(todo), _length(of_row),
                          _time(of_row))  # fmt: skip
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


def estimate_text(
    runs: int, todo: int, analyses: int, seconds: float, at_once: int, memory: Mapping[str, int]
) -> str:
    """What is to do, how long it may take, and the memory of the largest run by its label."""
    if not todo and not analyses:
        return f"Nothing to do: {counted(runs, 'run')} finished."
    more = f" and {counted(analyses, 'analysis')}" if analyses else ""
    pace = "one at a time" if at_once == 1 else f"{at_once} at a time"
    text = f"{todo} of {counted(runs, 'run')}{more} to do: about {duration_text(seconds)}, {pace}"
    if not memory:
        return f"{text}."
    largest = max(memory, key=lambda label: memory[label])
    together = ""
    if at_once > 1 and len(memory) > 1:
        most = sum(sorted(memory.values())[-at_once:])
        together = f", {size_text(most)} for {min(at_once, len(memory))} together"
    most_text = f"at most {size_text(memory[largest])} of memory in the largest run"
    return f"{text}; {most_text}{together}: {largest}."


def _table(label: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(label, overflow="fold")
    for name in others:
        numeric = name not in ("state", "length")
        table.add_column(name, justify="right" if numeric else "left", no_wrap=name != "state")
    return table


def _length(lines: Sequence[PlannedLine]) -> str:
    """500 rounds, or 125 to 2000 rounds where the columns differ."""
    lengths = sorted({one.units for one in lines})
    if len(lengths) == 1 or len({one.unit for one in lines}) > 1:
        return lines[0].length
    return f"{lengths[0]} to {counted(lengths[-1], lines[0].unit)}"


def _time(lines: Sequence[PlannedLine]) -> str:
    seconds = [one.seconds for one in lines if one.seconds is not None]
    return duration_text(sum(seconds)) if seconds else NONE
