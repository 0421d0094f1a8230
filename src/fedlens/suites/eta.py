"""Progress of a suite and the time left: seconds ≈ overhead + Σ over kinds of steps of c · cost.

Costs come from configs, in seconds if steps were timed. The factor c of each kind is learned from
the jobs of this session, finished or active: Lucy's iteration for Poisson counts (1974), drawn
towards the factor of all kinds together where a kind was hardly seen.
"""

import heapq
import logging
import math
import threading
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fedlens.store.run_folder import RunFolder
from fedlens.suites.estimates.cost import OVERHEAD_S

log = logging.getLogger(__name__)

PRIOR = 0.02  # of the whole suite's cost: how much a kind must do until its own factor counts half
ITERATIONS = 30

Costs = Mapping[Hashable, float]  # kind of step → cost


@dataclass(frozen=True)
class Parts:
    """The cost of a job: `own` is spread over its epochs or rounds.

    `first` comes before them, and `last`, such as the final test, after them.
    """

    own: Costs
    first: Costs = field(default_factory=dict)
    last: Costs = field(default_factory=dict)

    @property
    def total(self) -> float:
        return math.fsum((*self.own.values(), *self.first.values(), *self.last.values()))

    def between(self, begin: float, end: float, *, ended: bool) -> dict[Hashable, float]:
        """What is done between two fractions of the epochs; what comes first, if begin is 0.

        If `ended`, also what comes last.
        """
        share = {kind: cost * (end - begin) for kind, cost in self.own.items()}
        beside = [*([self.first] if not begin else []), *([self.last] if ended else [])]
        for kind, cost in (item for costs in beside for item in costs.items()):
            share[kind] = share.get(kind, 0.0) + cost
        return share


@dataclass(frozen=True)
class ActiveRun:
    label: str
    folder: RunFolder
    started_at: float
    done_before: int  # epochs or rounds of earlier sessions

    def done(self) -> int:
        return self.folder.position()


@dataclass(frozen=True)
class Observed:
    """So many seconds were spent on these costs."""

    seconds: float
    costs: Costs


class Eta:
    """Is notified when jobs start and end; any thread may ask for the state and the time left."""

    def __init__(
        self,
        parts: Mapping[str, Parts],
        totals: Mapping[str, int],
        *,
        jobs: int = 1,
        in_seconds: bool = False,
    ) -> None:
        """`parts` maps the label of each job to its cost, `totals` to its epochs or rounds.

        `jobs` is how many are carried out at a time. `in_seconds`: costs are seconds, as timed, so
        the time left is known before anything has finished.
        """
        self.parts = parts
        self.totals = totals
        self.jobs = jobs
        self.in_seconds = in_seconds
        self.finished = 0
        self.running: dict[str, ActiveRun] = {}
        self._waiting = dict.fromkeys(parts)
        self._observed: list[Observed] = []
        self._lock = threading.Lock()

    def start(self, label: str, folder: RunFolder) -> None:
        log.info("started: %s", label)
        run = ActiveRun(label, folder, time.monotonic(), folder.position())
        with self._lock:
            self._waiting.pop(label, None)
            self.running[label] = run

    def end(self, label: str, *, failed: bool = False) -> None:
        """A failed job did only a part of its work: nothing is learned from it."""
        with self._lock:
            run = self.running.pop(label)
            self.finished += 1
            if not failed:
                self._observed.append(self._observation(run, 1.0, ended=True))

    def leave_out(self, labels: Iterable[str]) -> None:
        """Jobs that will not be carried out, such as the analyses of a failed run."""
        with self._lock:
            for label in labels:
                self._waiting.pop(label, None)

    @property
    def count(self) -> int:
        """Of all jobs but those left out."""
        with self._lock:
            return self.finished + len(self.running) + len(self._waiting)

    def active(self) -> list[tuple[str, int, int]]:
        """Label, epochs or rounds done, and their total, of all jobs that run now."""
        with self._lock:
            runs = list(self.running.values())
        return [(run.label, run.done(), self.totals.get(run.label, 0)) for run in runs]

    def seconds_left(self) -> float | None:
        """None before anything was measured."""
        with self._lock:
            runs, waiting = list(self.running.values()), list(self._waiting)
            observed = list(self._observed)
        fractions = {run.label: self._fraction(run, run.done()) for run in runs}
        observed += [
            self._observation(run, fractions[run.label], ended=False)
            for run in runs
            if fractions[run.label] > self._fraction(run, run.done_before)
        ]
        if not self.in_seconds and not any(one.costs for one in observed):
            return None
        factors = Factors(observed, self._prior_weight(), default=1.0 if self.in_seconds else None)
        active = [self._rest(run, fractions[run.label], factors) for run in runs]
        later = [
            OVERHEAD_S + factors.seconds(self.parts[label].between(0, 1, ended=True))
            for label in waiting
        ]
        return makespan(later, self.jobs, active)

    def _rest(self, run: ActiveRun, done: float, factors: "Factors") -> float:
        """Seconds left of an active job; before its first epoch it is known by the clock alone."""
        before = self._fraction(run, run.done_before)
        parts = self.parts[run.label]
        rest = factors.seconds(parts.between(max(done, 1e-9), 1, ended=True))
        if done > before:
            return rest
        whole = OVERHEAD_S + factors.seconds(parts.between(before, 1, ended=True))
        # An analysis has no epochs: where it takes longer than predicted, a little is left.
        spent = time.monotonic() - run.started_at
        least = rest if self.totals.get(run.label) else 0.05 * whole
        return max(least, whole - spent)

    def _observation(self, run: ActiveRun, done: float, *, ended: bool) -> Observed:
        spent = max(0.0, time.monotonic() - run.started_at - OVERHEAD_S)
        before = self._fraction(run, run.done_before)
        return Observed(spent, self.parts[run.label].between(before, done, ended=ended))

    def _prior_weight(self) -> float:
        return PRIOR * math.fsum(part.total for part in self.parts.values())

    def _fraction(self, run: ActiveRun, done: int) -> float:
        total = self.totals.get(run.label, 0)
        return min(1.0, done / total) if total else 0.0


class Factors:
    """Seconds per unit of cost, for each kind of step.

    The prior of every kind is the factor of all together, worth `weight` units of cost.
    """

    def __init__(
        self, observed: Sequence[Observed], weight: float, *, default: float | None = None
    ) -> None:
        """`default` is expected of kinds in general before much was observed."""
        seconds = math.fsum(one.seconds for one in observed)
        costs: dict[Hashable, float] = {}
        for one in observed:
            for kind, cost in one.costs.items():
                costs[kind] = costs.get(kind, 0.0) + cost
        total = math.fsum(costs.values())
        expected = 0.0 if default is None else weight
        self.mean = (seconds + expected * (default or 0.0)) / max(total + expected, 1e-300)
        self.of = dict.fromkeys(costs, self.mean)
        for _ in range(ITERATIONS if len(costs) > 1 else 0):
            self.of = self._iterated(observed, costs, weight)

    def _iterated(
        self, observed: Sequence[Observed], costs: Costs, weight: float
    ) -> dict[Hashable, float]:
        """Each job's seconds are divided among its kinds as the factors say, then summed anew."""
        given = dict.fromkeys(costs, weight * self.mean)
        for one in observed:
            predicted = self.seconds(one.costs)
            for kind, cost in one.costs.items() if predicted else ():
                given[kind] += one.seconds * self.of[kind] * cost / predicted
        return {kind: given[kind] / max(costs[kind] + weight, 1e-300) for kind in costs}

    def seconds(self, costs: Costs) -> float:
        return math.fsum(self.of.get(kind, self.mean) * cost for kind, cost in costs.items())


def makespan(durations: Sequence[float], at_once: int, active: Sequence[float] = ()) -> float:
    """When the last job ends, if each begins in turn as soon as one of `at_once` places is free.

    `active` are the rests of jobs that run now, each in a place of its own.
    """
    places = [*active, *[0.0] * max(0, at_once - len(active))]
    heapq.heapify(places)
    for seconds in durations:
        heapq.heapreplace(places, places[0] + seconds)
    return max(places, default=0.0)
