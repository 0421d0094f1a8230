"""Plan a study into a given time: one level for all runs, then the runs in order of priority.

The level is the best at which the headline runs fit with three seeds and all other runs with one.
Time that is left goes to more seeds; where no level fits, the last runs in order are left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from fedlens.errors import FedlensError
from fedlens.runtime.units import duration_text
from fedlens.suites.budget_rules import BudgetRules, Level
from fedlens.suites.eta import makespan
from fedlens.suites.suite import SLASH, Cell, first_match

SEEDS = 3  # of the headline runs, before others get a second one
RESERVE = 0.1  # of the time, for what an estimate misses

Timer = Callable[[Sequence[Cell]], list[float]]  # seconds that each run still takes, in this order
AtLevel = Callable[[Sequence[Cell], Level], list[Cell]]


@dataclass(frozen=True)
class BudgetPlan:
    """What runs, in this order, and what does not; `seconds` are estimates of each run."""

    level: Level
    cells: list[Cell]
    seconds: list[float]
    left_out: list[Cell]
    left_out_seconds: list[float]
    skipped: list[tuple[Level, float]]  # better levels, and what headline and first seeds take

    def total(self, at_once: int) -> float:
        return makespan(self.seconds, at_once)


class Phase(IntEnum):
    """In which order runs are planned."""

    HEADLINE = 0  # with three seeds
    FIRST = 1  # all other runs, with one seed
    FURTHER = 2  # all other seeds


def in_order(cells: Sequence[Cell], rules: BudgetRules) -> list[tuple[Phase, Cell]]:
    """By phase, then by seed, then by the suite's priority."""
    headline = _headline(cells, rules)
    ranks = _ranks(cells, rules.priority)
    numbers = _seed_numbers(cells)

    def phase(k: int) -> Phase:
        if headline[k] and numbers[k] < SEEDS:
            return Phase.HEADLINE
        return Phase.FIRST if numbers[k] == 0 else Phase.FURTHER

    order = sorted(range(len(cells)), key=lambda k: (phase(k), numbers[k], ranks[k], k))
    return [(phase(k), cells[k]) for k in order]


def make(
    cells: Sequence[Cell],
    rules: BudgetRules,
    time: float,
    *,
    at_once: int,
    at_level: AtLevel,
    timer: Timer,
    rough_timer: Timer,
    level: Level | None = None,
) -> BudgetPlan:
    """The plan for `time` seconds; `level` is that of an earlier plan, which is kept.

    `rough_timer` rules levels out, `timer` confirms the one that is chosen.
    """
    phases, ordered = zip(*in_order(cells, rules), strict=True)
    needed = ordered[: sum(phase < Phase.FURTHER for phase in phases)]
    available = time * (1 - RESERVE)
    *better, last = (level,) if level else rules.levels
    chosen, skipped = last, []
    before: list[Cell] = []
    for one in better:
        if (runs := at_level(needed, one)) == before:  # it changes nothing in this study
            continue
        before, need = runs, makespan(rough_timer(runs), at_once)
        if need <= available:
            need = makespan(timer(runs), at_once)
        if need <= available:
            chosen = one
            break
        skipped.append((one, need))
    runs = at_level(ordered, chosen)
    kept, left_out = _fitting(runs, phases, timer(runs), available, at_once)
    if not kept:
        shortest = min(timer([run])[0] for run in runs[: len(needed)])
        raise FedlensError(
            f"A budget of {duration_text(time)} is too short for any run of this study, even with "
            f"{chosen.text}: the shortest takes about {duration_text(shortest / (1 - RESERVE))}."
        )
    seconds = timer([*kept, *left_out])
    return BudgetPlan(chosen, kept, seconds[: len(kept)], left_out, seconds[len(kept) :], skipped)


def _fitting(
    runs: Sequence[Cell],
    phases: Sequence[Phase],
    seconds: Sequence[float],
    available: float,
    at_once: int,
) -> tuple[list[Cell], list[Cell]]:
    """The runs that fit, and the others; further seeds only where the headline has its three."""
    kept: list[Cell] = []
    left_out: list[Cell] = []
    used: list[float] = []
    headline_fits = True
    for run, phase, duration in zip(runs, phases, seconds, strict=True):
        allowed = phase < Phase.FURTHER or headline_fits
        if allowed and makespan([*used, duration], at_once) <= available:
            kept.append(run)
            used.append(duration)
        else:
            left_out.append(run)
            headline_fits = headline_fits and phase > Phase.HEADLINE
    return kept, left_out


def _headline(cells: Sequence[Cell], rules: BudgetRules) -> list[bool]:
    if rules.headline:
        return [position is not None for _, position in first_match(cells, rules.headline)]
    first = cells[0].section.split(SLASH)[0] if cells else ""
    return [cell.section.split(SLASH)[0] == first for cell in cells]


def _ranks(cells: Sequence[Cell], priority: Sequence[str]) -> list[int]:
    return [
        len(priority) if position is None else position
        for _, position in first_match(cells, priority)
    ]


def _seed_numbers(cells: Sequence[Cell]) -> list[int]:
    """0 for the first seed of a label, 1 for the second and so on."""
    counts: dict[str, int] = {}
    numbers = []
    for cell in cells:
        numbers.append(counts.get(cell.label, 0))
        counts[cell.label] = numbers[-1] + 1
    return numbers
