"""What each section of the paper says of each setting, as rows of one table.

A section speaks only where its setting has data; where no setting has any it names the suite that
would give it some.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fedlens.reporting.paper import analyses, differences, prose
from fedlens.reporting.study import captions
from fedlens.reporting.study.content import Chapter, Grid
from fedlens.reporting.study.curves import cell_label

ANALYSES = 2  # of one kind, spoken of
OBSERVED = ("headline", "heterogeneity", "local_steps", "mask_rules", "algorithms")
SENT = ("headline", "mask_rules", "algorithms", "local_steps", "heterogeneity")


class Found(NamedTuple):
    """A setting, and those of its tables that a section is about."""

    chapter: Chapter
    grids: list[Grid]


@dataclass(frozen=True)
class Section:
    """`speak` has a setting and its tables of these `chapters`; no sentence means no data."""

    suite: str
    speak: Callable[[Found], list[str]]
    chapters: tuple[str, ...] = ()
    figures: tuple[tuple[str, str], ...] = ()  # (kind, chapter or first word of name)

    def grids(self, chapter: Chapter) -> list[Grid]:
        found = captions.grids(chapter)
        return [grid for name in self.chapters for grid in found if grid.chapter == name]

    def sentences(self, chapter: Chapter) -> list[str]:
        return [said for said in self.speak(Found(chapter, self.grids(chapter))) if said]


def _models(found: Found) -> list[str]:
    told = [(prose.models(grid), differences.contrasts(grid)) for grid in found.grids]
    return [text for said, tested in told if said for text in (f"The {said}", *tested)]


def _compared(found: Found) -> list[str]:
    """The differences of the first table; of one without any, its values, which decide nothing."""
    if not found.grids:
        return []
    first, *others = found.grids
    told = differences.contrasts(first) or [prose.reached(first), *_untested(first)]
    return [*told, *_elsewhere(others)]


def _untested(grid: Grid) -> list[str]:
    several = len(captions.cells(grid)) > 1
    return ["No paired test belongs to these numbers: no ordering is claimed."] if several else []


def _elsewhere(grids: list[Grid]) -> list[str]:
    """Further tables of the same question, by their files."""
    if not grids:
        return []
    named = [prose.file(f"tables/{grid.name}.csv") for grid in grids[:2]]
    more = [prose.number(len(grids) - 2) + " more"] if len(grids) > 2 else []
    return [f"The same question under other conditions: {prose.joined([*named, *more])}."]


def _steps(found: Found) -> list[str]:
    if not found.grids:
        return []
    return [
        prose.across(found.grids[0]),
        "Columns are at the same number of local steps in all.",
        *differences.contrasts(found.grids[0], turned=True),
    ]


def _arithmetic(found: Found) -> list[str]:
    told = [analyses.scaled(curve) for curve in found.chapter.alphas[:ANALYSES]]
    rest = len(found.chapter.alphas) - ANALYSES
    if rest > 0:
        told.append(f"{prose.counted(rest, 'more sweep')} in {prose.file('content.json')}.")
    return told


class _Seen(NamedTuple):
    rate: float | None
    seeds: int
    text: str


def _drift(found: Found) -> list[str]:
    """Two methods that differ in one thing; in their learning rates too if all such pairs do.

    Of several pairs, that of the most seeds.
    """
    lines = [(grid, line) for grid in found.grids for line in _lines(found.chapter, grid)]
    pairs = [(grid, line) for grid, line in lines if len(line) > 1]
    alike = [
        (grid, mine) for grid, line in pairs for rate in dict.fromkeys(one.rate for one in line)
        if len(mine := [one for one in line if one.rate == rate]) > 1
    ]  # fmt: skip
    for some in (alike, pairs, lines):
        if some:
            ends = [(grid, prose.ends(line)) for grid, line in some]
            grid, told = max(ends, key=lambda found: min(one.seeds for one in found[1]))
            apart = len({one.rate for one in told}) > 1
            shared = f" ({prose.tex(grid.note.rstrip('.'))})" if grid.note else ""
            return [
                f"From {prose.emphasised(grid.title)}{shared}:",
                *(one.text for one in told),
                *(["Their learning rates differ, and drift with them."] if apart else []),
            ]
    return []


def _lines(chapter: Chapter, grid: Grid) -> Iterator[list[_Seen]]:
    """Column by column, then row by row: learning rates, and what was observed at them."""
    sets = [told for told in chapter.curves if told.name == grid.name]
    seen = {one.label: one for told in sets for one in told.observations}
    places = [[(row, column) for column in grid.columns] for row in grid.rows]
    cells = {place: cell for line, held in zip(places, grid.cells, strict=True)
             for place, cell in zip(line, held, strict=True) if cell}  # fmt: skip
    for line in [*zip(*places, strict=True), *places]:
        labels = {place: cell_label(grid.rows, grid.columns, place) for place in line}
        told = [
            _Seen(rate := cells[place].lr, len(one.runs), analyses.observed(one, rate))
            for place, label in labels.items() if place in cells and (one := seen.get(label))
        ]  # fmt: skip
        if kept := [one for one in told if one.text]:
            yield kept


def _sent(found: Found) -> list[str]:
    """Of the first table whose methods sent anything."""
    told = (prose.sent(grid, captions.sent(found.chapter, grid)) for grid in found.grids)
    return [next((text for text in told if text), "")]


def _bought(found: Found) -> list[str]:
    return [next((text for grid in found.grids if (text := prose.bought(grid))), "")]


def _conflicts(found: Found) -> list[str]:
    return [
        analyses.interfered(finding, captions.classes(found.chapter, finding.label))
        for finding in found.chapter.findings
        if finding.kind == "interference"
    ][:1]


def _findings(*kinds: str) -> Callable[[Found], list[str]]:
    def speak(found: Found) -> list[str]:
        told = []
        for kind in kinds:
            mine = [finding for finding in found.chapter.findings if finding.kind == kind]
            told += [analyses.told(finding) for finding in mine[:1]]
        return told

    return speak


def _aggregators(found: Found) -> list[str]:
    return [*_compared(found), *_findings("merge", "compose")(found)]


TABLE = {
    "models": Section("models", _models, ("headline",), (("curves", "headline"),)),
    "rules": Section(
        "mask_rules", _compared, ("mask_rules",), (("grid", "mask_rules"), ("mask", ""))
    ),
    "heterogeneity": Section(
        "heterogeneity",
        _compared,
        ("local_steps", "heterogeneity"),
        (("grid", "local_steps"), ("grid", "heterogeneity")),
    ),
    "steps": Section("local_steps", _steps, ("local_steps",)),
    "density": Section("sparsity", _compared, ("sparsity",), (("grid", "sparsity"),)),
    "arithmetic": Section("arithmetic", _arithmetic, (), (("alpha", ""),)),
    "aggregators": Section(
        "algorithms",
        _aggregators,
        ("algorithms",),
        (("grid", "algorithms"), ("finding", "merge"), ("finding", "compose")),
    ),
    "calibration": Section("calibration_rounds", _compared, ("calibration_rounds",)),
    "heads": Section("centralized", _compared, ("heads",)),
    "under_heads": Section("paper", _compared, ("under_heads",)),
    "schedules": Section("schedulers", _compared, ("schedules",)),
    "central": Section("centralized", _compared, ("central",)),
    "drift": Section(
        "models", _drift, OBSERVED, tuple(("observations", name) for name in OBSERVED)
    ),
    "communication": Section("models", _sent, SENT),
    "bytes": Section("models", _bought, SENT, tuple(("bytes", name) for name in SENT)),
    "clients": Section(
        "arithmetic",
        _findings("clients", "forget"),
        (),
        (("finding", "clients"), ("finding", "forget")),
    ),
    "conflicts": Section("arithmetic", _conflicts, (), (("finding", "interference"),)),
}  # in the order in which they are given room


def spoken(section: Section, chapters: Sequence[Chapter]) -> list[tuple[Chapter, list[str]]]:
    """Settings with data for it, and what is said of each."""
    told = [(chapter, section.sentences(chapter)) for chapter in chapters]
    return [(chapter, sentences) for chapter, sentences in told if sentences]
