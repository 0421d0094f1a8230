"""The sections' results as LaTeX: what is said of each setting, and its tables and figures."""

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from fedlens.reporting.figures.report import Drawing
from fedlens.reporting.paper import floats, prose
from fedlens.reporting.paper.floats import Placed
from fedlens.reporting.paper.sections import TABLE, Section, spoken
from fedlens.reporting.study import captions
from fedlens.reporting.study.content import Chapter, Grid

SETTINGS = 2  # spoken of in a section
ENOUGH = 2  # cells that need no table and no figure: a sentence holds them


def placed_figures(
    chapters: Sequence[Chapter], drawings: Sequence[Drawing], pictures: Path, folder: Path
) -> dict[str, list[Placed]]:
    """For each section a drawing that fits it, as far as there is room; none twice."""
    taken = {grid.name for c in chapters for grid in c.grids if not _worth_showing(grid)}
    wanted: dict[str, list[Placed]] = {}
    for name, section in TABLE.items():
        settings = {chapter.setting for chapter, _ in spoken(section, chapters)[:SETTINGS]}
        fitting = [
            drawing for kind, word in section.figures for drawing in drawings
            if drawing.kind == kind and word in ("", drawing.chapter, drawing.name.split("-")[0])
            and drawing.setting in settings and drawing.name not in taken
        ][:1]  # fmt: skip
        taken |= {drawing.name for drawing in fitting}
        wanted[name] = [floats.figure(drawing, pictures, folder) for drawing in fitting]
    return floats.shared_out(wanted, floats.FIGURES, size=lambda placed: placed.columns)


def _tables(chapters: Sequence[Chapter]) -> dict[str, list[Placed]]:
    """For each section its tables, as far as there is room; a table stands in one section only."""
    taken = set[str]()
    wanted: dict[str, list[Placed]] = {}
    for name, section in TABLE.items():
        wanted[name] = []
        for chapter, _ in spoken(section, chapters)[:SETTINGS]:
            for grid in section.grids(chapter)[:1]:
                if grid.name not in taken and _worth_showing(grid):
                    wanted[name].append(floats.table(grid, chapter.setting))
                    taken.add(grid.name)
    return floats.shared_out(wanted, floats.TABLES, size=lambda placed: placed.columns)


def _worth_showing(grid: Grid) -> bool:
    return len(captions.cells(grid)) > ENOUGH


def results(
    chapters: Sequence[Chapter], figures: dict[str, list[Placed]]
) -> dict[str, dict[str, str]]:
    """For each section its text, and apart from it what floats: that may stand before it."""
    tables = _tables(chapters)
    shown = {placed.label: placed for mine in tables.values() for placed in mine}
    said = _said(chapters)
    return {
        name: {
            "text": _text(section, chapters, said[name], shown, figures[name]),
            "floats": "\n".join(placed.body for placed in [*tables[name], *figures[name]]),
        }
        for name, section in TABLE.items()
    }


def _said(chapters: Sequence[Chapter]) -> dict[str, list[tuple[str, str]]]:
    """For each section the sentences there is room for, each with its setting."""
    wanted: dict[str, list[tuple[str, str]]] = {}
    for name, section in TABLE.items():
        told = spoken(section, chapters)[:SETTINGS]
        turns = zip_longest(*([(c.setting, text) for text in texts] for c, texts in told))
        wanted[name] = [one for turn in turns for one in turn if one]
    return floats.shared_out(wanted, floats.TEXT, size=lambda one: len(one[1]))


def _text(
    section: Section,
    chapters: Sequence[Chapter],
    said: Sequence[tuple[str, str]],
    shown: dict[str, Placed],
    figures: Sequence[Placed],
) -> str:
    told = spoken(section, chapters)
    if not told:
        suite = rf"\texttt{{fedlens suite {prose.tex(section.suite)}}}"
        return f"No finished run answers this question: {suite} would."
    parts = []
    for chapter, sentences in told[:SETTINGS]:
        kept = [text for setting, text in said if setting == chapter.setting]
        if len(kept) < len(sentences):
            kept.append("There is more in the HTML page.")
        labels = [f"tab:{grid.name}" for grid in section.grids(chapter)[:1]]
        named = [shown[label] for label in labels if label in shown]
        named += [placed for placed in figures if placed.setting == chapter.setting]
        if named:
            kept.append(f"See {prose.joined(floats.references(named))}.")
        opening = rf"\textbf{{{prose.tex(chapter.setting)}.}} " if len(chapters) > 1 else ""
        parts.append(opening + " ".join(kept))
    if len(told) > SETTINGS:
        rest = prose.counted(len(told) - SETTINGS, "more setting")
        parts.append(f"For {rest} see the HTML page.")
    return "\n\n".join(parts)
