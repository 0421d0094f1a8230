"""What several seeds say: mean, sample deviation, 95 % interval; paired differences; Holm.

The interval is Student's, mean ± t · s / √n; one seed has none. Differences are taken seed by seed,
so what a seed does to both methods cancels; their p-values are corrected for how many were asked
(Holm, 1979): the k-th smallest of m is multiplied by m − k + 1.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from scipy import stats

LEVEL = 0.95  # of every interval
DECIDED = 0.05  # a difference is decided where its corrected p is below this…
FEWEST = 3  # …over at least so many seeds: two may agree by accident

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Estimate:
    """`deviation` and `half` (of the interval's width) are None where one value is all there is."""

    mean: float
    deviation: float | None
    half: float | None
    count: int


@dataclass(frozen=True)
class Difference:
    """Of two methods over the seeds they share; `p` is two-sided, uncorrected, or None."""

    estimate: Estimate
    p: float | None


def estimate(values: Sequence[float]) -> Estimate:
    count = len(values)
    if not count:
        raise ValueError("there is nothing to estimate from")
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, None, None, 1)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    quantile = float(stats.t.ppf((1 + LEVEL) / 2, count - 1))
    return Estimate(mean, deviation, quantile * deviation / math.sqrt(count), count)


def difference(first: Mapping[int, float], second: Mapping[int, float]) -> Difference | None:
    """`first` minus `second`, each seed → value; None where they share no seed."""
    shared = sorted(first.keys() & second.keys())
    if not shared:
        return None
    found = estimate([first[seed] - second[seed] for seed in shared])
    return Difference(found, _p_value(found))


def _p_value(found: Estimate) -> float | None:
    """Of Student's paired test; it knows nothing of differences that are all the same."""
    if not found.deviation:
        return None
    t = abs(found.mean) / (found.deviation / math.sqrt(found.count))
    return float(2 * stats.t.sf(t, found.count - 1))


def decided(corrected: float | None, count: int) -> bool:
    """Whether so many seeds tell a difference from none."""
    return corrected is not None and corrected < DECIDED and count >= FEWEST


def holm(p_values: Mapping[Key, float]) -> dict[Key, float]:
    """The same keys with corrected values: never below that of a smaller p, at most 1."""
    corrected: dict[Key, float] = {}
    before = 0.0
    for place, (key, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        before = max(before, min(1.0, p * (len(p_values) - place)))
        corrected[key] = before
    return {key: corrected[key] for key in p_values}
