"""Suites as tables in a terminal: what is planned, and test accuracies over seeds."""

from collections.abc import Iterable, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fedlens.reporting.study.labels import NONE
from fedlens.reporting.study.statistics import estimate
from fedlens.store.run_folder import RunFolder
from fedlens.suites.suite import Cell


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
    if not tested:
        return NONE if len(results) == len(folders) else Text("failed", style="red")
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
