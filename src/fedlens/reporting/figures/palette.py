"""Colours, markers and dashes by label, the same in all figures of a report.

Partitions are coloured in their order over the whole report, mask rules in the registry's order;
dense and central training are black.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fedlens.registry import mask_rule
from fedlens.reporting.figures.style import BLACK, GREY, LOOKS, Look
from fedlens.reporting.study.captions import grids
from fedlens.reporting.study.content import Content
from fedlens.reporting.study.labels import CENTRAL, DENSE

DOTTED = (0, (1.2, 1.6))
BASELINES = {DENSE: Look(BLACK, "X"), "sparse": LOOKS[1], CENTRAL: Look(BLACK, "*")}
LEVEL = Look(GREY, "D", DOTTED)  # other rows that are drawn as lines of reference


@dataclass(frozen=True)
class Palette:
    partitions: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    levels: tuple[str, ...] = ()

    def of(self, label: str, among: Sequence[str] = ()) -> Look:
        """`among` are all labels of a table; what has no look of its own gets one by its place."""
        if look := self._known(label):
            return look
        others = [other for other in among if self._known(other) is None]
        return LOOKS[others.index(label) % len(LOOKS)]

    def _known(self, label: str) -> Look | None:
        if label in BASELINES:
            return BASELINES[label]
        if label in self.levels:
            return LEVEL
        if label in self.rules:
            return LOOKS[self.rules.index(label) % len(LOOKS)]
        for place, partition in enumerate(self.partitions):
            if label == partition or label.endswith(f", {partition}"):  # 'FedAvg, Nc=1'
                return LOOKS[place % len(LOOKS)]
        return None


def palette(content: Content) -> Palette:
    """Looks for what occurs in a report; rules that the registry does not know come last."""
    pictures = [picture.label for chapter in content.chapters for picture in chapter.partitions]
    masks = [one.rule for chapter in content.chapters for one in chapter.masks]
    known = [row.label for row in mask_rule]
    tables = [grid for chapter in content.chapters for grid in grids(chapter)]
    levels = dict.fromkeys(level for grid in tables for level in grid.levels)
    return Palette(
        partitions=tuple(dict.fromkeys(pictures)),
        rules=tuple(dict.fromkeys([*known, *sorted(set(masks) - set(known))])),
        levels=tuple(level for level in levels if level not in BASELINES),
    )
