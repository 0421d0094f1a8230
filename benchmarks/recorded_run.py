"""A run and what its folder records: how long its rounds took, when each ended, bytes sent."""

import statistics
import time
from dataclasses import dataclass
from typing import Any

from fedlens.config.schema import Config
from fedlens.experiments.run import start
from fedlens.store.run_folder import RunFolder
from wiretap import Traffic, Wiretap

PHASES = ("prepare_seconds", "train_seconds", "aggregate_seconds")


@dataclass(frozen=True)
class RecordedRun:
    """A finished run, and how long it took."""

    folder: RunFolder
    began: int  # ns since the epoch
    total_seconds: float  # from the config to the result

    @property
    def rounds(self) -> list[float]:
        """Seconds of each round."""
        return [sum(line[key] for key in PHASES) for line in self._journal("timings")]

    @property
    def seconds(self) -> float:
        """Of a round, the first one left out: it includes what happens only once."""
        return statistics.median(self.rounds[1:])

    @property
    def start_up(self) -> float:
        return self.total_seconds - self.seconds * len(self.rounds)

    @property
    def parameters(self) -> str:
        """The digest of the final parameters."""
        result = self.folder.result
        assert result is not None
        return str(result["choice"]["parameters"])

    @property
    def ends(self) -> list[int]:
        """When each round ended: its checkpoint was written before the next one began."""
        names = [f"round-{number:06d}" for number in range(1, len(self.rounds) + 1)]
        files = [self.folder.checkpoints / name / "state.json" for name in names]
        return [file.stat().st_mtime_ns for file in files]

    @property
    def recorded_traffic(self) -> Traffic:
        """Per round, as the run's records have it."""
        records = self._journal("metrics")[1:]
        up, down = (statistics.mean(r[key] for r in records) for key in ("bytes_up", "bytes_down"))
        return Traffic(round(up), round(down))

    def _journal(self, name: str) -> list[dict[str, Any]]:
        """Without round 0, the model before training."""
        return [line for line in self.folder.journal(name).read() if line["round"]]


def run(config: Config) -> RecordedRun:
    began, clock = time.time_ns(), time.monotonic()
    folder = start(config)
    return RecordedRun(folder, began, time.monotonic() - clock)


def traffic(run: RecordedRun, tap: Wiretap) -> dict[str, Traffic]:
    """Bytes of a round but the first: on the wire and as recorded; and what a run adds once."""
    first, *_, last = run.ends
    total = tap.between(first, last)
    each = Traffic(*(round(n / (len(run.ends) - 1)) for n in (total.up, total.down)))
    before = tap.between(run.began, first)
    set_up = Traffic(before.up - each.up, before.down - each.down)
    return {"wire": each, "recorded": run.recorded_traffic, "set_up": set_up}
