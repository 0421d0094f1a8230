"""Two ways to do the same work, measured alternately in one process; the result is their ratio.

Other load on the machine then slows both sides alike. The median ratio is reported, after as many
repeats as it takes to be certain of it.
"""

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Comparison:
    """Units of work per second of each side in every repeat; the first side over the second."""

    speeds: dict[str, list[float]]

    @property
    def ratios(self) -> list[float]:
        first, second = self.speeds.values()
        return [ours / theirs for ours, theirs in zip(first, second, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def uncertainty(self) -> float:
        """About one standard error of the median ratio, relative to it."""
        if len(self.ratios) < 2:
            return math.inf
        low, _, high = statistics.quantiles(self.ratios, n=4)
        return (high - low) / math.sqrt(len(self.ratios)) / self.ratio

    def speed(self, side: str) -> float:
        return statistics.median(self.speeds[side])

    def row(self, setting: str) -> list[str]:
        """A row of a table: the setting, both speeds, their ratio, and the number of repeats."""
        speeds = [f"{self.speed(side):,.1f}" for side in self.speeds]
        return [setting, *speeds, f"{self.ratio:.3f}", str(len(self.ratios))]


def compare(
    sides: Mapping[str, Callable[[], int]],
    *,
    min_repeats: int = 5,
    max_repeats: int = 25,
    uncertainty: float = 0.02,
    clock: Callable[[], float] = time.perf_counter,
) -> Comparison:
    """Runs both sides alternately; each call does its work and returns how many units that was.

    The first call of each is a warm-up and not counted. The side that begins alternates. For work
    of one thread, `time.process_time` is the clock that other programs disturb least.
    """
    if len(sides) != 2:
        raise ValueError("a comparison has two sides")
    for work in sides.values():
        work()
    comparison = Comparison({name: [] for name in sides})
    for repeat in range(max_repeats):
        for name in list(sides)[:: 1 if repeat % 2 == 0 else -1]:
            start = clock()
            units = sides[name]()
            comparison.speeds[name].append(units / (clock() - start))
        if repeat + 1 >= min_repeats and comparison.uncertainty <= uncertainty:
            break
    return comparison


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in [header, ["-" * width for width in widths], *rows]:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def print_verdict(
    name: str, figures: Mapping[str, float], target: Mapping[str, float], met: bool
) -> None:
    """The last line of every benchmark: one JSON object for machines."""
    rounded = {figure: round(value, 3) for figure, value in figures.items()}
    print(json.dumps({"name": name, "figures": rounded, "target": dict(target), "met": met}))
