"""Progress of a suite and the time left: seconds ≈ overhead + rate × cost, for each run.

A run's cost comes from its config (cost.py); the rate, in seconds per unit of cost, is measured on
the runs of this session, finished or active.
"""

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from fedlens.store.run_folder import RunFolder
from fedlens.suites.cost import OVERHEAD_S

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ActiveRun:
    label: str
    folder: RunFolder
    started_at: float
    done_before: int  # epochs or rounds of earlier sessions

    def done(self) -> int:
        return self.folder.position()


class Eta:
    """Is notified when jobs start and end; any thread may ask for the state and the time left."""

    def __init__(
        self, costs: Mapping[str, float], totals: Mapping[str, int], *, jobs: int = 1
    ) -> None:
        """`costs` maps the label of each job to its cost, `totals` to its epochs or rounds.

        `jobs` is how many are carried out at a time.
        """
        self.costs = costs
        self.totals = totals
        self.jobs = jobs
        self.finished = 0
        self.running: dict[str, ActiveRun] = {}
        self._waiting = dict.fromkeys(costs)
        self._seconds = self._cost = 0.0  # of finished jobs, without overhead
        self._lock = threading.Lock()

    def start(self, label: str, folder: RunFolder) -> None:
        log.info("started: %s", label)
        run = ActiveRun(label, folder, time.monotonic(), folder.position())
        with self._lock:
            self._waiting.pop(label, None)
            self.running[label] = run

    def end(self, label: str, *, failed: bool = False) -> None:
        """A failed job did only a part of its work: the rate is not measured on it."""
        with self._lock:
            run = self.running.pop(label)
            self.finished += 1
            if failed:
                return
            self._seconds += max(0.0, time.monotonic() - run.started_at - OVERHEAD_S)
            self._cost += self.costs[label] * (1 - self._fraction(run, run.done_before))

    def active(self) -> list[tuple[str, int, int]]:
        """Label, epochs or rounds done, and their total, of all jobs that run now."""
        with self._lock:
            runs = list(self.running.values())
        return [(run.label, run.done(), self.totals.get(run.label, 0)) for run in runs]

    def seconds_left(self) -> float | None:
        """None before anything was measured."""
        with self._lock:
            runs, waiting = list(self.running.values()), list(self._waiting)
            seconds, cost = self._seconds, self._cost
        fractions = {run.label: self._fraction(run, run.done()) for run in runs}
        for run in runs:
            progress = fractions[run.label] - self._fraction(run, run.done_before)
            if progress > 0:
                seconds += max(0.0, time.monotonic() - run.started_at - OVERHEAD_S)
                cost += self.costs[run.label] * progress
        if cost <= 0:
            return None
        rate = seconds / cost
        to_start = sum(OVERHEAD_S + rate * self.costs[label] for label in waiting)
        to_finish = [rate * self.costs[label] * (1 - done) for label, done in fractions.items()]
        return max([(to_start + sum(to_finish)) / self.jobs, *to_finish])

    def _fraction(self, run: ActiveRun, done: int) -> float:
        total = self.totals.get(run.label, 0)
        return min(1.0, done / total) if total else 0.0
