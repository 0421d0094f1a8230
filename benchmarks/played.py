"""A run and what its folder tells of it: seconds of its rounds, and when each was over."""

import statistics
import time
from dataclasses import dataclass
from typing import Any

from fedlens.config.schema import Config
from fedlens.experiments.run import start
from fedlens.store.run_folder import RunFolder
from wiretap import Traffic, Wiretap

CLOCKED = ("prepare_seconds", "train_seconds", "aggregate_seconds")


@dataclass(frozen=True)
class Played:
    """One run: what its rounds took, and all the rest of it."""

    folder: RunFolder
    began: int  # ns since the epoch
    whole: float  # seconds from the config to the result

    @property
    def rounds(self) -> list[float]:
        return [sum(line[key] for key in CLOCKED) for line in self._journal("timings")]

    @property
    def seconds(self) -> float:
        """Of a round; the first one, in which everything happens for the first time, apart."""
        return statistics.median(self.rounds[1:])

    @property
    def start_up(self) -> float:
        return self.whole - self.seconds * len(self.rounds)

    @property
    def parameters(self) -> str:
        result = self.folder.result
        assert result is not None
        return str(result["choice"]["parameters"])

    @property
    def ends(self) -> list[int]:
        """When each round was over: its checkpoint was written, and the next had not begun."""
        names = [f"round-{number:06d}" for number in range(1, len(self.rounds) + 1)]
        files = [self.folder.checkpoints / name / "state.json" for name in names]
        return [file.stat().st_mtime_ns for file in files]

    @property
    def recorded(self) -> Traffic:
        """Per round, as the records have it."""
        told = self._journal("metrics")[1:]
        up, down = (statistics.mean(r[key] for r in told) for key in ("bytes_up", "bytes_down"))
        return Traffic(round(up), round(down))

    def _journal(self, name: str) -> list[dict[str, Any]]:
        """Without round 0, the model before any step."""
        return [line for line in self.folder.journal(name).read() if line["round"]]


def played(config: Config) -> Played:
    began, clock = time.time_ns(), time.monotonic()
    folder = start(config)
    return Played(folder, began, time.monotonic() - clock)


def counted(run: Played, tap: Wiretap) -> dict[str, Traffic]:
    """Rounds but the first, on average; and what the run cost besides."""
    first, *_, last = run.ends
    total = tap.between(first, last)
    each = Traffic(*(round(n / (len(run.ends) - 1)) for n in (total.up, total.down)))
    before = tap.between(run.began, first)
    once = Traffic(before.up - each.up, before.down - each.down)
    return {"wire": each, "recorded": run.recorded, "once": once}
