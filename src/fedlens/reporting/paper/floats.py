"""Which tables and figures a paper of few pages has room for, and their LaTeX.

Every section gets one before any gets two; what is left out is named by its file.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from fedlens.reporting.figures.report import Drawing
from fedlens.reporting.paper import prose
from fedlens.reporting.study import captions, tables
from fedlens.reporting.study.content import Grid

TABLES = 8  # in one column, of results; one over both counts as two
FIGURES = 11  # counted likewise
TEXT = 12_500  # characters of LaTeX on results
ROWS, COLUMNS = 8, 6  # of a table, at most
LETTERS = 80  # in a line of a table that is readable in one column
COLUMN = 3.6 * 72  # points: wider figures span both columns

Item = TypeVar("Item")


@dataclass(frozen=True)
class Placed:
    """A table or a figure with its label, as LaTeX."""

    setting: str
    label: str
    body: str

    @property
    def columns(self) -> int:
        return 2 if "*" in self.body.partition("\n")[0] else 1


def shared_out(
    wanted: Mapping[str, Sequence[Item]], room: int, size: Callable[[Item], int] = lambda item: 1
) -> dict[str, list[Item]]:
    """One for each section in turn, then a second, until the next of each has no room."""
    shares: dict[str, list[Item]] = {section: [] for section in wanted}
    waiting = {section: list(items) for section, items in wanted.items()}
    while waiting := {section: items for section, items in waiting.items() if items}:
        for section, items in waiting.items():
            item = items.pop(0)
            room -= size(item)
            if room >= 0:
                shares[section].append(item)
            else:
                room += size(item)
                items.clear()
    return shares


def table(grid: Grid, setting: str) -> Placed:
    """Without learning rates, which are in the file: with them few tables would fit."""
    shown = replace(
        grid,
        corner=prose.printable(grid.corner),
        rows=[prose.printable(row) for row in grid.rows[:ROWS]],
        columns=[prose.printable(column) for column in grid.columns[:COLUMNS]],
        cells=[
            [cell and replace(cell, lr=None) for cell in row[:COLUMNS]] for row in grid.cells[:ROWS]
        ],
    )
    caption = f"{prose.tex(grid.title)} ({prose.tex(setting)}): test accuracy in \\%, "
    caption += f"$n$ = {captions.seeds(shown)}. "
    caption += prose.sentences(prose.tex(grid.note))
    if len(grid.rows) > ROWS or len(grid.columns) > COLUMNS:
        caption += f" Shortened; the whole table is in {prose.file(f'tables/{grid.name}.csv')}."
    kind = "table*" if _letters(shown) > LETTERS else "table"
    body = rf"\fitted{{{tables.latex(shown)}}}"
    if notes := tables.latex_notes(shown):
        body += rf"\par\smallskip{{\footnotesize {notes}\par}}"
    return _float(setting, kind, f"tab:{grid.name}", caption, body)


def _letters(grid: Grid) -> int:
    """The approximate number of letters in a line."""
    value = 13 if any(cell.half is not None for cell in captions.cells(grid)) else 7
    return max(map(len, grid.rows)) + sum(max(len(c) + 1, value) for c in grid.columns)


def figure(drawing: Drawing, figures: Path, folder: Path) -> Placed:
    path = figures / f"{drawing.name}.pdf"
    wide = _width(path) > COLUMN
    size = r"width=\textwidth,height=0.27\textheight" if wide else (
        r"width=\columnwidth,height=0.33\textheight"
    )  # fmt: skip
    where = path.relative_to(folder).as_posix()
    body = rf"\includegraphics[{size},keepaspectratio]{{{where}}}"
    return _float(
        drawing.setting,
        "figure*" if wide else "figure",
        f"fig:{drawing.name}",
        f"{prose.sentences(prose.tex(drawing.caption))} ({prose.tex(drawing.setting)}.)",
        body,
    )


def _float(setting: str, kind: str, label: str, caption: str, body: str) -> Placed:
    above = rf"\caption{{{caption}}}\label{{{label}}}"
    parts = [above, body] if kind.startswith("table") else [body, above]
    lines = [rf"\begin{{{kind}}}[t]", r"\centering", *parts, rf"\end{{{kind}}}"]
    return Placed(setting, label, "\n".join(lines))


def _width(path: Path) -> float:
    """Of a PDF's first page, in points."""
    match = re.search(rb"/MediaBox\s*\[\s*\S+\s+\S+\s+(\S+)", path.read_bytes())
    return float(match[1]) if match else 0.0


def references(placed: Iterable[Placed]) -> list[str]:
    names = {"tab": "Table", "fig": "Figure"}
    return [rf"{names[one.label[:3]]}~\ref{{{one.label}}}" for one in placed]
