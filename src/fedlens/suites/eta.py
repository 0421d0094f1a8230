"""How far a suite is, and how long it will take: seconds ≈ overhead + pace × weight, for each run.

Weights come from what the runs are to do (cost.py); the pace is learned from what was done since
the suite was started, finished or under way.
"""

import json
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from fedlens.store.run_folder import RunFolder
from fedlens.suites.cost import OVERHEAD

log = logging.getLogger(__name__)

TAIL = 2**16  # bytes at the end of a journal, enough for its last line


@dataclass(frozen=True)
class Underway:
    label: str
    folder: RunFolder
    began: float
    already: int  # units an earlier session had done

    def done(self) -> int:
        return position(self.folder)


class Outlook:
    """Told of beginnings and ends; asked, by another thread too, how things stand."""

    def __init__(
        self, weights: Mapping[str, float], totals: Mapping[str, int], *, at_once: int = 1
    ) -> None:
        """Of what is to be done: label → weight, and label → rounds or epochs of a run."""
        self.weights = weights
        self.totals = totals
        self.at_once = at_once
        self.finished = 0
        self.running: dict[str, Underway] = {}
        self._waiting = dict.fromkeys(weights)
        self._seconds = self._weight = 0.0  # of what is finished, without overhead
        self._lock = threading.Lock()

    def begins(self, label: str, folder: RunFolder) -> None:
        log.info("begins: %s", label)
        begun = Underway(label, folder, time.monotonic(), position(folder))
        with self._lock:
            self._waiting.pop(label, None)
            self.running[label] = begun

    def ends(self, label: str, *, failed: bool = False) -> None:
        """One that failed did not do all it was to: the pace is not learned from it."""
        with self._lock:
            ended = self.running.pop(label)
            self.finished += 1
            if failed:
                return
            self._seconds += max(0.0, time.monotonic() - ended.began - OVERHEAD)
            self._weight += self.weights[label] * (1 - self._share(ended, ended.already))

    def underway(self) -> list[tuple[str, int, int]]:
        """Label, units done, and of how many, of all that runs now."""
        with self._lock:
            now = list(self.running.values())
        return [(run.label, run.done(), self.totals.get(run.label, 0)) for run in now]

    def left(self) -> float | None:
        """Seconds to go, or None before anything is known."""
        with self._lock:
            now, waiting = list(self.running.values()), list(self._waiting)
            seconds, weight = self._seconds, self._weight
        shares = {run.label: self._share(run, run.done()) for run in now}
        for run in now:
            progressed = shares[run.label] - self._share(run, run.already)
            if progressed > 0:
                seconds += max(0.0, time.monotonic() - run.began - OVERHEAD)
                weight += self.weights[run.label] * progressed
        if weight <= 0:
            return None
        pace = seconds / weight
        togo = sum(OVERHEAD + pace * self.weights[label] for label in waiting)
        each = [pace * self.weights[label] * (1 - share) for label, share in shares.items()]
        return max([(togo + sum(each)) / self.at_once, *each])

    def _share(self, run: Underway, done: int) -> float:
        total = self.totals.get(run.label, 0)
        return min(1.0, done / total) if total else 0.0


def position(folder: RunFolder) -> int:
    """Epochs or rounds on record: the first number of the journal's last whole line."""
    try:
        with folder.journal("metrics").path.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - TAIL))
            last = stream.read().split(b"\n")[-2]
        return int(next(iter(json.loads(last).values())))
    except (OSError, IndexError, ValueError):
        return 0
