"""Plan a study into a given time: one level for all runs, then the runs in order of priority.

The level is the best at which the headline runs fit with three seeds and all other runs with one.
Time that is left goes to more seeds. Where no level fits, it is the best that takes little longer
than the last, and the last runs in order are left out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from fedlens.errors import FedlensError
from fedlens.runtime.units import duration_text
from fedlens.suites.budget_rules import BudgetRules, Level
from fedlens.suites.eta import makespan
from fedlens.suites.suite import SLASH, Cell, first_match

SEEDS = 3  # of the headline runs, before others get a second one
LITTLE_LONGER = 1.25  # than the last level: cutting further would save next to nothing
RESERVE = 0.1  # of the time, for what an estimate misses


@dataclass(frozen=True)
class RunCost:
    """Seconds that a run still takes: its own work, and work that it shares, by key.

    Shared work is done by the first run that needs it.
    """

    own: float
    shared: Mapping[str, float] = field(default_factory=dict)


Timer = Callable[[Sequence[Cell]], list[RunCost]]
AtLevel = Callable[[Sequence[Cell], Level], list[Cell]]


class Clock:
    """Seconds of runs that are planned one after another; shared work counts once."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._done: set[str] = set()

    def of(self, cost: RunCost) -> float:
        """What the run takes after those planned so far."""
        return cost.own + sum(s for key, s in cost.shared.items() if key not in self._done)

    def add(self, cost: RunCost) -> None:
        self.seconds.append(self.of(cost))
        self._done |= cost.shared.keys()


def durations(costs: Sequence[RunCost]) -> list[float]:
    """Seconds of each run where all are carried out in this order."""
    clock = Clock()
    for cost in costs:
        clock.add(cost)
    return clock.seconds


@dataclass(frozen=True)
class BudgetPlan:
    """What runs, in this order, and what does not; `seconds` are estimates of each run."""

    level: Level
    cells: list[Cell]
    seconds: list[float]
    left_out: list[Cell]
    left_out_seconds: list[float]
    skipped: list[tuple[Level, float]]  # better levels, and what headline and first seeds take
    headline_left_out: int  # how many of the headline's three seeds are left out
    passed_over: int  # runs that are left out although shorter ones of lower priority are not

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
    ordered: Sequence[tuple[Phase, Cell]],
    levels: Sequence[Level],
    time: float,
    *,
    at_once: int,
    at_level: AtLevel,
    timer: Timer,
    rough_timer: Timer,
) -> BudgetPlan:
    """The plan of these runs for `time` seconds, at the best of the levels that fits.

    `rough_timer` rules levels out, `timer` confirms the one that is chosen.
    """
    phases, cells = zip(*ordered, strict=True)
    needed = cells[: sum(phase < Phase.FURTHER for phase in phases)]
    available = time * (1 - RESERVE)
    skipped: list[tuple[Level, float]] = []
    chosen: Level | None = None
    before: list[Cell] = []
    for level in levels:
        if (runs := at_level(needed, level)) == before:  # it changes nothing in this study
            continue
        before, need = runs, makespan(durations(rough_timer(runs)), at_once)
        if need <= available:
            need = makespan(durations(timer(runs)), at_once)
        if need <= available:
            chosen = level
            break
        skipped.append((level, need))
    if chosen is None:
        enough = LITTLE_LONGER * skipped[-1][1]
        place = next(k for k, (_, need) in enumerate(skipped) if need <= enough)
        chosen, skipped = skipped[place][0], skipped[:place]
    runs = at_level(cells, chosen)
    costs = timer(runs)
    fits = _fitting(phases, costs, available, at_once)
    if not any(fits):
        shortest = min(durations([cost])[0] for cost in costs) / (1 - RESERVE)
        raise FedlensError(
            f"A budget of {duration_text(time)} is too short for any run of this study, even with "
            f"{chosen.text}: the shortest takes about {duration_text(shortest)}."
        )
    kept, left_out = (
        [k for k, fit in enumerate(fits) if fit is wanted] for wanted in (True, False)
    )
    seconds = durations([costs[k] for k in (*kept, *left_out)])
    return BudgetPlan(
        chosen,
        [runs[k] for k in kept],
        seconds[: len(kept)],
        [runs[k] for k in left_out],
        seconds[len(kept) :],
        skipped,
        sum(phases[k] is Phase.HEADLINE for k in left_out),
        sum(k < max(kept) for k in left_out),
    )


def _fitting(
    phases: Sequence[Phase], costs: Sequence[RunCost], available: float, at_once: int
) -> list[bool]:
    """Which runs fit; further seeds only where the headline has its three."""
    clock, fits, headline_fits = Clock(), list[bool](), True
    for phase, cost in zip(phases, costs, strict=True):
        allowed = phase < Phase.FURTHER or headline_fits
        fits.append(allowed and makespan([*clock.seconds, clock.of(cost)], at_once) <= available)
        if fits[-1]:
            clock.add(cost)
        elif phase is Phase.HEADLINE:
            headline_fits = False
    return fits


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
