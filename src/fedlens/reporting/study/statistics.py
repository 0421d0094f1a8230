"""Statistics over seeds: mean ± t · s / √n (Student), paired differences, Holm's correction.

Differences are taken seed by seed, so an effect of the seed on both methods cancels. Holm (1979):
the k-th smallest of m p-values is multiplied by m − k + 1. One accuracy: Wilson (1927).
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, TypeVar

CONFIDENCE = 0.95  # of every interval
SIGNIFICANCE = 0.05  # a difference is significant if its corrected p is below this…
MIN_SEEDS = 3  # …over at least this many seeds: two may agree by accident

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Estimate:
    """`deviation` and `half` (half the interval's width) are None for a single value."""

    mean: float
    deviation: float | None
    half: float | None
    count: int


@dataclass(frozen=True)
class Difference:
    """Between two methods over the seeds they share; `p` is two-sided and uncorrected, or None."""

    estimate: Estimate
    p: float | None


def estimate(values: Sequence[float]) -> Estimate:
    count = len(values)
    if not count:
        raise ValueError("an estimate needs at least one value")
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, None, None, 1)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    quantile = float(_student().ppf((1 + CONFIDENCE) / 2, count - 1))
    return Estimate(mean, deviation, quantile * deviation / math.sqrt(count), count)


def proportion(share: float, count: int) -> tuple[float, float]:
    """Wilson's interval of a share of `count` independent trials, such as an accuracy."""
    if count < 1:
        raise ValueError("an interval needs at least one trial")
    z2 = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) ** 2
    centre = share + z2 / (2 * count)
    half = math.sqrt(z2 * (share * (1 - share) / count + z2 / (4 * count**2)))
    scale = 1 + z2 / count
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def difference(first: Mapping[int, float], second: Mapping[int, float]) -> Difference | None:
    """`first` minus `second`, each seed → value; None if they share no seed."""
    shared = sorted(first.keys() & second.keys())
    if not shared:
        return None
    paired = estimate([first[seed] - second[seed] for seed in shared])
    return Difference(paired, _p_value(paired))


def _p_value(paired: Estimate) -> float | None:
    """Of Student's paired test; it is undefined if all differences are equal."""
    if not paired.deviation:
        return None
    t = abs(paired.mean) / (paired.deviation / math.sqrt(paired.count))
    return float(2 * _student().sf(t, paired.count - 1))


def _student() -> Any:
    """Student's distribution, imported when it is first used: it would slow every command down."""
    from scipy import stats

    return stats.t


def significant(corrected: float | None, count: int) -> bool:
    """Whether a difference over `count` seeds is significant, given its corrected p."""
    return corrected is not None and corrected < SIGNIFICANCE and count >= MIN_SEEDS


def holm(p_values: Mapping[Key, float], *, tests: int | None = None) -> dict[Key, float]:
    """The same keys with corrected values: never below that of a smaller p, at most 1.

    `tests` is the size of the family: p-values that are not known yet count as 1.
    """
    corrected: dict[Key, float] = {}
    before, count = 0.0, tests if tests is not None else len(p_values)
    for place, (key, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        before = max(before, min(1.0, p * (count - place)))
        corrected[key] = before
    return {key: corrected[key] for key in p_values}
