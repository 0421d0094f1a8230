"""The sections of the paper: the sentences that each has on a setting, its tables and figures.

Questions with a place in the template have a section here; every other question gets a section of
its own. A section without data is left out.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fedlens.reporting.paper import analyses, differences, prose
from fedlens.reporting.study import captions
from fedlens.reporting.study.content import Chapter, Content, Grid
from fedlens.reporting.study.curves import cell_label

ANALYSES = 2  # of one kind, in sentences
OBSERVED = ("six_models", "heterogeneity", "local_steps", "mask_rules", "algorithms")
SENT = ("six_models", "mask_rules", "algorithms", "local_steps", "heterogeneity")


class Source(NamedTuple):
    """A setting, and those of its tables that a section is about."""

    chapter: Chapter
    grids: list[Grid]


@dataclass(frozen=True)
class Section:
    """`speak` makes sentences of a setting and its tables; no sentence means no data."""

    speak: Callable[[Source], list[str]]
    questions: tuple[str, ...] = ()
    figures: tuple[tuple[str, str], ...] = ()  # (kind, topic or first word of the name)
    title: str = ""  # of a section that the template does not name
    cites_table: bool = True  # whether its first table has the numbers of its sentences

    def grids(self, chapter: Chapter) -> list[Grid]:
        grids = captions.grids(chapter)
        return [grid for name in self.questions for grid in grids if grid.question == name]

    def sentences(self, chapter: Chapter) -> list[str]:
        return [text for text in self.speak(Source(chapter, self.grids(chapter))) if text]


def _models(source: Source) -> list[str]:
    texts = [(prose.models(grid), differences.contrasts(grid)) for grid in source.grids]
    return [text for models, tested in texts if models for text in (f"The {models}", *tested)]


def _compared(source: Source) -> list[str]:
    """The differences in the first table, or its values if it has none; then the other tables."""
    if not source.grids:
        return []
    first, *others = source.grids
    texts = differences.contrasts(first) or [prose.reached(first), *_untested(first)]
    return [*texts, *_elsewhere(others)]


def _untested(grid: Grid) -> list[str]:
    if len(captions.cells(grid)) < 2:
        return []
    return ["These numbers were not compared by a paired test: they support no ordering."]


def _elsewhere(grids: list[Grid]) -> list[str]:
    """Other tables of the same question, by their files."""
    if not grids:
        return []
    named = [prose.file(f"tables/{grid.name}.csv") for grid in grids[:2]]
    more = [prose.number(len(grids) - 2) + " more"] if len(grids) > 2 else []
    return [f"The same question under other conditions: {prose.joined([*named, *more])}."]


def _steps(source: Source) -> list[str]:
    if not source.grids:
        return []
    return [
        prose.across(source.grids[0]),
        "All columns have the same total number of local steps.",
        *differences.contrasts(source.grids[0], turned=True),
    ]


def _arithmetic(source: Source) -> list[str]:
    texts = [analyses.scaled(curve) for curve in source.chapter.alphas[:ANALYSES]]
    rest = len(source.chapter.alphas) - ANALYSES
    if rest > 0:
        texts.append(f"{prose.counted(rest, 'more sweep')} in {prose.file('content.json')}.")
    return texts


class _Observed(NamedTuple):
    rate: float | None
    seeds: int
    text: str


def _drift(source: Source) -> list[str]:
    """Two methods that differ in one thing, and in their learning rates only if all such pairs do.

    Of several pairs, the one with the most seeds.
    """
    lines = [(grid, line) for grid in source.grids for line in _lines(source.chapter, grid)]
    pairs = [(grid, line) for grid, line in lines if len(line) > 1]
    alike = [
        (grid, mine) for grid, line in pairs for rate in dict.fromkeys(one.rate for one in line)
        if len(mine := [one for one in line if one.rate == rate]) > 1
    ]  # fmt: skip
    for some in (alike, pairs, lines):
        if some:
            ends = [(grid, prose.ends(line)) for grid, line in some]
            grid, pair = max(ends, key=lambda one: min(line.seeds for line in one[1]))
            rates_differ = len({one.rate for one in pair}) > 1
            shared = f" ({prose.tex(grid.note.rstrip('.'))})" if grid.note else ""
            return [
                f"From {prose.emphasised(grid.title)}{shared}:",
                *(one.text for one in pair),
                *(["Their learning rates differ, which changes drift."] if rates_differ else []),
            ]
    return []


def _lines(chapter: Chapter, grid: Grid) -> Iterator[list[_Observed]]:
    """Column by column, then row by row: learning rates and observations."""
    sets = [one for one in chapter.curves if one.name == grid.name]
    observations = {one.label: one for curve_set in sets for one in curve_set.observations}
    places = [[(row, column) for column in grid.columns] for row in grid.rows]
    cells = {place: cell for line, row in zip(places, grid.cells, strict=True)
             for place, cell in zip(line, row, strict=True) if cell}  # fmt: skip
    for line in [*zip(*places, strict=True), *places]:
        labels = {place: cell_label(grid.rows, grid.columns, place) for place in line}
        observed = [
            _Observed(rate := cells[place].lr, len(one.runs), analyses.observed(one, rate))
            for place, label in labels.items()
            if place in cells and (one := observations.get(label))
        ]
        if kept := [one for one in observed if one.text]:
            yield kept


def _sent(source: Source) -> list[str]:
    """Of the first table whose methods sent anything."""
    texts = (prose.sent(grid, captions.sent(source.chapter, grid)) for grid in source.grids)
    return [next((text for text in texts if text), "")]


def _accuracy_by_megabytes(source: Source) -> list[str]:
    texts = (prose.accuracy_by_megabytes(grid) for grid in source.grids)
    return [next((text for text in texts if text), "")]


def _interference(source: Source) -> list[str]:
    return [
        analyses.interfered(finding, captions.classes(source.chapter, finding.label))
        for finding in source.chapter.findings
        if finding.kind == "interference"
    ][:1]


def _findings(*kinds: str) -> Callable[[Source], list[str]]:
    def speak(source: Source) -> list[str]:
        texts = []
        for kind in kinds:
            mine = [finding for finding in source.chapter.findings if finding.kind == kind]
            texts += [analyses.analysed(finding) for finding in mine[:1]]
        return texts

    return speak


def _aggregators(source: Source) -> list[str]:
    return [*_compared(source), *_findings("merge", "compose")(source)]


SECTIONS = {  # in the order in which they get room; names are those in the template
    "models": Section(_models, ("six_models",), (("curves", "six_models"),)),
    "heterogeneity": Section(
        _compared,
        ("local_steps", "heterogeneity"),
        (("grid", "local_steps"), ("grid", "heterogeneity")),
    ),
    "rules": Section(_compared, ("mask_rules",), (("grid", "mask_rules"), ("mask", ""))),
    "aggregators": Section(
        _aggregators,
        ("algorithms",),
        (("grid", "algorithms"), ("finding", "merge"), ("finding", "compose")),
    ),
    "arithmetic": Section(_arithmetic, (), (("alpha", ""),)),
    "conflicts": Section(_interference, figures=(("finding", "interference"),)),
    "steps": Section(_steps, ("local_steps",)),
    "density": Section(_compared, ("sparsity",), (("grid", "sparsity"),)),
    "drift": Section(
        _drift,
        OBSERVED,
        tuple(("observations", name) for name in OBSERVED),
        cites_table=False,
    ),
    "clients": Section(
        _findings("clients", "forget"),
        figures=(("finding", "clients"), ("finding", "forget")),
    ),
    "calibration": Section(_compared, ("calibration_rounds",)),
    "heads": Section(_compared, ("heads",)),
    "under_heads": Section(_compared, ("under_heads",)),
    "schedules": Section(_compared, ("schedules",)),
    "central": Section(_compared, ("central",)),
    "communication": Section(_sent, SENT),
    "bytes": Section(_accuracy_by_megabytes, SENT, tuple(("bytes", name) for name in SENT)),
}


def sections(content: Content) -> dict[str, Section]:
    """All sections, those of questions without a place in the template last."""
    placed = {name for section in SECTIONS.values() for name in section.questions}
    others = {
        f"question {one.name}": Section(
            _compared, (one.name,), (("grid", one.name),), title=one.label
        )
        for one in content.questions
        if one.name not in placed
    }
    return SECTIONS | others


def spoken(section: Section, chapters: Sequence[Chapter]) -> list[tuple[Chapter, list[str]]]:
    """Settings with data for a section, and the sentences on each."""
    texts = [(chapter, section.sentences(chapter)) for chapter in chapters]
    return [(chapter, sentences) for chapter, sentences in texts if sentences]
