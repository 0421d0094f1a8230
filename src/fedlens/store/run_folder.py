"""A run is a folder, and the folder is all that is known of it.

config.yaml  manifest.json  metrics.jsonl  test_curve.jsonl  timings.jsonl  log.txt  checkpoints/
choice.json  result.json; partition.json where there are clients, masks.safetensors and masks.json
where not every weight is trained, updates/ where clients' are kept, arithmetic/ for what was done
afterwards, and failure.json where the last session failed. The three journals are append-only; what
the clock says goes to timings.jsonl, so that metrics.jsonl is equal byte for byte however often a
run was interrupted. No torch.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fedlens.errors import FedlensError, suggest
from fedlens.files import read_json, write_json

JOURNALS = ("metrics", "test_curve", "timings")


class Journal:
    """Append-only JSON lines whose length is remembered by checkpoints."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8", newline="\n") as stream:
            stream.write(json.dumps(record, allow_nan=False) + "\n")

    def sync(self) -> int:
        """Flushes to the disk; returns the length so far in bytes."""
        with self.path.open("ab") as stream:
            os.fsync(stream.fileno())
            return stream.tell()

    def rewind(self, length: int) -> None:
        """Forgets what was written after `length`, which a resumed run writes again."""
        with self.path.open("ab") as stream:
            if stream.tell() < length:
                raise FedlensError(
                    f"{self.path} is shorter than its checkpoint remembers: it was cut or lost; "
                    "start the run anew under another run.name."
                )
            stream.truncate(length)

    def read(self) -> list[dict[str, Any]]:
        """All whole lines; a line cut short by a kill is left out."""
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8").split("\n")[:-1]
        try:
            return [json.loads(line) for line in lines]
        except ValueError as error:
            raise FedlensError(f"{self.path} has a line that is not JSON ({error}).") from error


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def masks(self) -> Path:
        """Which weights are trained, where not all are."""
        return self.path / "masks.safetensors"

    @property
    def updates(self) -> Path:
        """What clients sent in the last rounds, where it was to be kept."""
        return self.path / "updates"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def result(self) -> dict[str, Any] | None:
        return self._json("result.json")

    @property
    def manifest(self) -> dict[str, Any] | None:
        return self._json("manifest.json")

    @property
    def partition(self) -> dict[str, Any] | None:
        """Who holds what, in a federated run."""
        return self._json("partition.json")

    @property
    def choice(self) -> dict[str, Any] | None:
        """What the test split was opened for, once it was."""
        return self._json("choice.json")

    @property
    def failure(self) -> str | None:
        """Why the last session stopped, if it failed."""
        found = self._json("failure.json")
        return None if found is None else str(found["message"])

    def journal(self, name: str) -> Journal:
        return Journal(self.path / f"{name}.jsonl")

    def write(self, name: str, value: Mapping[str, Any], *, indent: int | None = 2) -> None:
        write_json(self.path / f"{name}.json", value, indent=indent)

    def forget_failure(self) -> None:
        (self.path / "failure.json").unlink(missing_ok=True)

    def state(self) -> str:
        """finished | running | failed | interrupted"""
        if (self.path / "result.json").exists():
            return "finished"
        if (self.path / "run.lock").exists():
            try:
                with self.lock(patience=0):
                    pass
            except FedlensError:
                return "running"
            except OSError:  # a folder that can only be read: nobody runs here
                pass
        return "failed" if self.failure else "interrupted"

    @contextmanager
    def lock(self, *, patience: float = 2.0) -> Iterator[None]:
        """One process at a time; the kernel frees the lock of a process that dies.

        A run waits `patience` seconds, so that somebody's look at its state does not stop it.
        """
        held = FileLock(self.path / "run.lock")
        try:
            held.acquire(timeout=patience)
        except Timeout as error:
            raise FedlensError(f"{self.name} is being run by another process.") from error
        try:
            yield
        finally:
            held.release()

    def _json(self, name: str) -> dict[str, Any] | None:
        path = self.path / name
        if not path.exists():
            return None
        value: dict[str, Any] = read_json(path)
        return value


def runs(root: Path) -> list[RunFolder]:
    """Every run below `root`, in the order in which they were last begun or resumed."""
    found = [RunFolder(path.parent) for path in root.glob("*/config.yaml")]
    return sorted(found, key=lambda run: (run.config.stat().st_mtime, run.name))


def find_run(which: str, root: Path) -> RunFolder:
    """A run by its path, its name, or any part of its name that only one run has."""
    for path in (Path(which), root / which):
        if (path / "config.yaml").exists():
            return RunFolder(path if path.name else path.resolve())
    names = {run.name: run for run in runs(root)}
    matches = [name for name in names if which in name]
    if len(matches) == 1:
        return names[matches[0]]
    if matches:
        raise FedlensError(f"'{which}' fits {len(matches)} runs: {', '.join(sorted(matches))}.")
    if not names:
        raise FedlensError(f"No run '{which}': there are no runs in {root} yet.")
    raise FedlensError(f"No run '{which}' in {root} (`fedlens ls`): {suggest(which, names)}")
