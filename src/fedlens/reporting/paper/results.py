"""The results of the paper as LaTeX: each section's text, tables and figures."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from fedlens.reporting.figures.report import Drawing
from fedlens.reporting.paper import floats, prose
from fedlens.reporting.paper.floats import Placed
from fedlens.reporting.paper.sections import Section, sections, spoken
from fedlens.reporting.study import captions
from fedlens.reporting.study.content import Chapter, Content, Grid

SETTINGS = 2  # in the text of a section
ENOUGH = 2  # cells that need no table and no figure: a sentence states them


def placed_figures(
    content: Content, drawings: Sequence[Drawing], pictures: Path, folder: Path
) -> dict[str, list[Placed]]:
    """For each section a drawing that fits it, as far as there is room; none twice."""
    chapters = content.chapters
    taken = {grid.name for c in chapters for grid in c.grids if not _worth_showing(grid)}
    wanted: dict[str, list[Placed]] = {}
    for name, section in sections(content).items():
        settings = {chapter.setting for chapter, _ in spoken(section, chapters)[:SETTINGS]}
        fitting = [
            drawing for kind, word in section.figures for drawing in drawings
            if drawing.kind == kind and word in ("", drawing.topic, drawing.name.split("-")[0])
            and drawing.setting in settings and drawing.name not in taken
        ][:1]  # fmt: skip
        taken |= {drawing.name for drawing in fitting}
        wanted[name] = [floats.figure(drawing, pictures, folder) for drawing in fitting]
    return floats.shared_out(wanted, floats.FIGURES, size=lambda placed: placed.columns)


def results(content: Content, figures: Mapping[str, list[Placed]]) -> dict[str, dict[str, str]]:
    """For each section its title and text, and apart from them its floats, which may come first.

    The text of a section without data is empty: the paper leaves such sections out.
    """
    chapters, every = content.chapters, sections(content)
    tables = _tables(every, chapters)
    shown = {placed.label: placed for mine in tables.values() for placed in mine}
    kept = _sentences(every, chapters)
    return {
        name: {
            "title": prose.tex(section.title),
            "text": _text(section, chapters, kept[name], shown, figures.get(name, [])),
            "floats": "\n".join(placed.body for placed in [*tables[name], *figures.get(name, [])]),
        }
        for name, section in every.items()
    }


def _tables(every: Mapping[str, Section], chapters: Sequence[Chapter]) -> dict[str, list[Placed]]:
    """For each section its tables, as far as there is room; a table is in one section only."""
    taken = set[str]()
    wanted: dict[str, list[Placed]] = {}
    for name, section in every.items():
        wanted[name] = []
        for chapter, _ in spoken(section, chapters)[:SETTINGS]:
            for grid in section.grids(chapter)[:1]:
                if grid.name not in taken and _worth_showing(grid):
                    wanted[name].append(floats.table(grid, chapter.setting))
                    taken.add(grid.name)
    return floats.shared_out(wanted, floats.TABLES, size=lambda placed: placed.columns)


def _worth_showing(grid: Grid) -> bool:
    return len(captions.cells(grid)) > ENOUGH


def _sentences(
    every: Mapping[str, Section], chapters: Sequence[Chapter]
) -> dict[str, list[tuple[str, str]]]:
    """For each section the sentences that there is room for, each with its setting."""
    wanted: dict[str, list[tuple[str, str]]] = {}
    for name, section in every.items():
        texts = spoken(section, chapters)[:SETTINGS]
        turns = zip_longest(*([(c.setting, text) for text in mine] for c, mine in texts))
        wanted[name] = [one for turn in turns for one in turn if one]
    return floats.shared_out(wanted, floats.TEXT, size=lambda one: len(one[1]))


def _text(
    section: Section,
    chapters: Sequence[Chapter],
    sentences: Sequence[tuple[str, str]],
    shown: dict[str, Placed],
    figures: Sequence[Placed],
) -> str:
    answered = spoken(section, chapters)
    if not answered:
        return ""
    parts = []
    for chapter, every in answered[:SETTINGS]:
        kept = [text for setting, text in sentences if setting == chapter.setting]
        if len(kept) < len(every):
            kept.append("The HTML page has more.")
        cited = section.grids(chapter)[:1] if section.cites_table else []
        labels = [f"tab:{grid.name}" for grid in cited]
        named = [shown[label] for label in labels if label in shown]
        named += [placed for placed in figures if placed.setting == chapter.setting]
        if named:
            kept.append(f"See {prose.joined(floats.references(named))}.")
        opening = rf"\textbf{{{prose.tex(chapter.setting)}.}} " if len(chapters) > 1 else ""
        parts.append(opening + " ".join(kept))
    if len(answered) > SETTINGS:
        rest = prose.counted(len(answered) - SETTINGS, "more setting")
        parts.append(f"For {rest} see the HTML page.")
    return "\n\n".join(parts)
