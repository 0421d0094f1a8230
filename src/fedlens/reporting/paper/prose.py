"""Sentences about accuracies, as LaTeX; every number in them is written by `number`.

They state what each method reaches and claim no ordering; for that see `differences`.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TypeVar

from fedlens.reporting.study import captions
from fedlens.reporting.study.content import Cell, Grid
from fedlens.reporting.study.tables import escape

LISTED = 4  # items in a sentence; the others are in the tables
EUROPEAN = {*map(chr, range(0xA1, 0x180)), *"–—‘’“”•€"} - set("ĦħĸŉŦŧſĿŀ\u00ad")  # in T1 and TS1

Item = TypeVar("Item")


def number(value: float, decimals: int | None = None) -> str:
    """The only place where numbers become text; without `decimals`, in their shortest form."""
    if decimals is None:
        text = str(value) if isinstance(value, int) else f"{value:.9f}".rstrip("0").rstrip(".")
    else:
        text = f"{value:.{decimals}f}"
    if float(text) == 0:
        text = text.removeprefix("-")
    return text.replace("-", "$-$")


def counted(count: int, word: str) -> str:
    return f"{number(count)} {word}{'' if count == 1 else 's'}"


def joined(items: Iterable[str]) -> str:
    """`a, b and c`."""
    *most, last = [*items]
    return f"{', '.join(most)} and {last}" if most else last


def listed(items: Sequence[str]) -> str:
    """As `joined`, but only the first of many."""
    rest = len(items) - LISTED
    return joined([*items[:LISTED], *([f"{number(rest)} more"] if rest > 0 else [])])


def tex(text: str) -> str:
    return escape(printable(text))


def printable(text: str) -> str:
    """Replaces letters that European fonts lack by their ASCII base, or `?`."""
    return "".join(c if c.isascii() or c in EUROPEAN or escape(c) != c else _base(c) for c in text)


def _base(letter: str) -> str:
    return unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode() or "?"


def emphasised(label: str) -> str:
    return rf"\emph{{{tex(label)}}}"


def breakable(text: str) -> str:
    """Names of runs are long: a line may end after any of their underscores."""
    return text.replace(r"\_", r"\_\allowbreak{}")


def sentences(text: str) -> str:
    """Each sentence begins with a capital letter, which labels lack."""
    return re.sub(r"(^|\. )([a-z])", lambda match: match[1] + match[2].upper(), text)


def file(path: str) -> str:
    return rf"\nolinkurl{{{path}}}"


def spread(half: float | None) -> str:
    return "" if half is None else rf" $\pm$ {number(half, 2)}"


def _accuracy(cell: Cell) -> str:
    return rf"{number(cell.mean, 2)}{spread(cell.half)}\,\%"


def _notes(*notes: str) -> str:
    """Notes in parentheses, without empty ones."""
    kept = [note for note in notes if note]
    return f" ({', '.join(kept)})" if kept else ""


def accuracies(cells: Sequence[tuple[str, Cell]]) -> str:
    """`54.69 ± 0.42 % (dense, 3 seeds) and 54.03 ± 0.45 % (sparse, 3 seeds)`."""
    return listed([
        f"{_accuracy(cell)}{_notes(tex(label), captions.untrained(cell) or _seeds(cell))}"
        for label, cell in cells
    ])  # fmt: skip


def _seeds(cell: Cell) -> str:
    return counted(len(cell.seeds), "seed")


def filled(grid: Grid) -> list[tuple[str, list[tuple[str, Cell]]]]:
    """Row by row the cells that have a run, with their columns."""
    rows = [
        (row, [(c, cell) for c, cell in zip(grid.columns, cells, strict=True) if cell is not None])
        for row, cells in zip(grid.rows, grid.cells, strict=True)
    ]
    return [(row, cells) for row, cells in rows if cells]


def models(grid: Grid) -> str:
    """Every cell of a headline, and those that have no run."""
    rows = [f"{accuracies(cells)} for {emphasised(row)}" for row, cells in filled(grid)]
    missing = [
        emphasised(f"{row}, {column}")
        for row, cells in zip(grid.rows, grid.cells, strict=True)
        for column, cell in zip(grid.columns, cells, strict=True)
        if cell is None
    ]
    lacking = f" There is no run of {joined(missing)}." if missing else ""
    return f"test accuracy is {'; '.join(rows)}.{lacking}" if rows else ""


def reached(grid: Grid) -> str:
    """Accuracies of the rows in the column that most of them have."""
    rows = filled(grid)
    shared = max(grid.columns, key=lambda c: sum(c in dict(cells) for _, cells in rows))
    here = [(row, dict(cells)[shared]) for row, cells in rows if shared in dict(cells)]
    where = f"In column {emphasised(shared)}, test" if len(grid.columns) > 1 else "Test"
    texts = [f"{accuracies([('', cell)])} for {emphasised(row)}" for row, cell in here]
    elsewhere = [emphasised(row) for row, cells in rows if shared not in dict(cells)]
    text = f"{where} accuracy is {listed(texts)}."
    return f"{text} Without a run there: {listed(elsewhere)}." if elsewhere else text


def across(grid: Grid) -> str:
    """The first and the last row of a table, column by column."""
    rows = [f"{accuracies(cells)} for {emphasised(row)}" for row, cells in ends(filled(grid))]
    return f"Test accuracy is {'; '.join(rows)}."


def ends(items: Sequence[Item]) -> list[Item]:
    return [*items] if len(items) < 2 else [items[0], items[-1]]


def sent(grid: Grid, counting: str) -> str:
    """Megabytes of a run; `counting` says which. Rows that send the same are named together."""
    together: dict[str, list[str]] = {}
    for row, cells in filled(grid):
        amounts = [
            rf"{number(cell.megabytes, 2)}\,MB{_notes(tex(column))}"
            for column, cell in cells
            if cell.megabytes is not None
        ]
        if amounts:
            together.setdefault(listed(amounts), []).append(emphasised(row))
    texts = [f"{amounts} for {listed(rows)}" for amounts, rows in together.items()]
    return f"A run sends ({tex(counting)}) {'; '.join(texts[:LISTED])}." if texts else ""


def accuracy_by_megabytes(grid: Grid) -> str:
    """Megabytes and accuracy side by side, in the first and the last row that have both."""
    texts = []
    for row, cells in filled(grid):
        amounts = [
            rf"{number(cell.megabytes, 2)}\,MB for {accuracies([(column, cell)])}"
            for column, cell in cells
            if cell.megabytes is not None
        ]
        texts += [f"{emphasised(row)}: {listed(amounts)}"] if amounts else []
    return f"For {'; for '.join(ends(texts))}." if texts else ""
