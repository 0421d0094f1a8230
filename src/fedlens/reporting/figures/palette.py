"""Which colour, marker and dash stand for what: the same in all figures of a report.

Partitions go by evenness over the whole report, rules by name; dense training is black.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedlens.reporting.figures.style import BLACK, GREY, LOOKS, Look
from fedlens.reporting.study.content import Content, Grid

DOTTED = (0, (1.2, 1.6))
NAMED = {
    "dense": Look(BLACK, "X"),
    "sparse": LOOKS[1],
    "central": Look(BLACK, "*"),
    "ridge head alone": Look(GREY, "D", DOTTED),
    "least sensitive": LOOKS[0],
    "most sensitive": LOOKS[1],
    "lowest magnitude": LOOKS[2],
    "highest magnitude": LOOKS[3],
    "random": LOOKS[4],
}
EVENNESS = (r"IID", r"sizes σ=(\S+)", r"Dirichlet (\S+)", r"Nc=(\S+)")
PREFIX = "FedAvg, "  # of the six models' rows


@dataclass(frozen=True)
class Looks:
    partitions: tuple[str, ...]

    def of(self, label: str, among: Sequence[str] = ()) -> Look:
        """`among` are the labels of a table, whose places tell what has no colour of its own."""
        bare = label.removeprefix(PREFIX)
        if bare in NAMED:
            return NAMED[bare]
        if bare in self.partitions:
            return LOOKS[self.partitions.index(bare) % len(LOOKS)]
        others = [other for other in among if other not in NAMED]
        return LOOKS[others.index(label) % len(LOOKS)]


def looks(content: Content) -> Looks:
    found: set[str] = set()
    for chapter in content.chapters:
        found |= {picture.label for picture in chapter.partitions}
        grids = [chapter.headline, *chapter.grids]
        found |= {label.removeprefix(PREFIX) for grid in grids if grid for label in _labels(grid)}
    known = {label: place for label in found if (place := evenness(label)) is not None}
    return Looks(tuple(sorted(known, key=lambda label: known[label])))


def evenness(label: str) -> tuple[int, float] | None:
    """From even to the most skewed; None for what is no partition."""
    for place, pattern in enumerate(EVENNESS):
        if match := re.fullmatch(pattern, label):
            number = float(match[1]) if match.groups() else 0.0
            return place, number if "σ" in pattern else -number
    return None


def _labels(grid: Grid) -> Iterable[str]:
    return [*grid.rows, *grid.columns]
