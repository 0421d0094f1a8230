"""A run is a folder; everything known about the run is in its files. No torch.

Always config.yaml, manifest.json, metrics.jsonl, test_curve.jsonl, timings.jsonl (append-only),
log.txt, checkpoints/, choice.json, result.json; where they apply partition.json, masks.json,
masks.safetensors, head.json, head.safetensors (made from the answers of remote clients), updates/
(of clients), arithmetic/ (analyses), failure.json (last session), plugins/ (copies of the files
that its rows come from).
"""

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fedlens.errors import FedlensError, shown, suggest
from fedlens.files import TEMPORARY, discard, parse_json
from fedlens.store.archive import extracted
from fedlens.store.records import read_record, write_record

# Durations go to timings.jsonl only: metrics.jsonl is the same, byte for byte, in a resumed run.
CLOCK = "timings"
JOURNALS = ("metrics", "test_curve", CLOCK)
TAIL = 2**16  # bytes at the end of a journal, enough for its last line
MARKS = ("config.yaml", "result.json")  # a folder with one of them is a run, perhaps damaged
ROUND = re.compile(r"round-(\d+)")
FEW = 5  # run names in one sentence
HASH = re.compile(r".+_([0-9a-f]{8})")  # how the name that a config gives to its run ends
# What code that reads a record may raise where a record does not have the shape that it expects.
SHAPE_ERRORS = (
    OSError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
)  # fmt: skip

log = logging.getLogger(__name__)


class Unlockable(FedlensError):
    """A run's folder cannot be written to, or has no room."""


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
        """Removes what was written after `length`; a resumed run writes it again."""
        with self.path.open("ab") as stream:
            if stream.tell() < length:
                raise FedlensError(
                    f"{self.path} is shorter than its checkpoint says, so records are lost: start "
                    "the run again under another run.name."
                )
            stream.truncate(length)

    def rewind_or_clear(self, length: int) -> None:
        """The same for a journal that no result depends on: a damaged one is begun again."""
        if self.path.is_dir():
            discard(self.path)
        try:
            self.rewind(length)
        except FedlensError:
            log.warning("%s is damaged: starting it again", self.path)
            self.rewind(0)

    def read(self) -> list[dict[str, Any]]:
        """All complete lines; a last line without its end, left by a kill, is ignored."""
        if not self.path.exists():
            return []
        try:
            lines = self.path.read_text(encoding="utf-8").split("\n")[:-1]
            records = [parse_json(line) for line in lines]
        except OSError as error:
            reason = error.strerror or error
            raise FedlensError(f"{self.path} cannot be read ({reason}).") from error
        except ValueError as error:
            raise FedlensError(f"{self.path} has a line that is not JSON ({error}).") from error
        if not all(isinstance(record, dict) for record in records):
            raise FedlensError(f"{self.path} has a line that is not a record.")
        return records

    def last(self) -> dict[str, Any] | None:
        """The last complete line, read from the end of the file; None if there is none."""
        try:
            with self.path.open("rb") as stream:
                size = stream.seek(0, os.SEEK_END)
                stream.seek(max(0, size - TAIL))
                record = parse_json(stream.read().split(b"\n")[-2].decode())
        except (OSError, IndexError, ValueError):
            return None
        return record if isinstance(record, dict) else None


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def short_id(self) -> str:
        """The hash at the end of the name; of a name that the user chose, the name."""
        match = HASH.fullmatch(self.name)
        return match[1] if match else self.name

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def masks(self) -> Path:
        """Which weights are trained, if not all are."""
        return self.path / "masks.safetensors"

    @property
    def head(self) -> Path:
        """The head that remote clients fitted before anything else, if they did."""
        return self.path / "head.safetensors"

    @property
    def updates(self) -> Path:
        """Client updates of the last rounds, if the run keeps them."""
        return self.path / "updates"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def result(self) -> dict[str, Any] | None:
        result = self._json("result.json")
        if result == {}:
            raise FedlensError(f"{self.path / 'result.json'} is damaged: it has no values.")
        return result

    @property
    def finished(self) -> bool:
        """Whether its result is there and whole; resuming a run writes a damaged one again."""
        try:
            return self.result is not None
        except FedlensError:
            return False

    @property
    def manifest(self) -> dict[str, Any] | None:
        return self._json("manifest.json")

    @property
    def partition(self) -> dict[str, Any] | None:
        """Which client holds which examples, in a federated run."""
        return self._json("partition.json")

    @property
    def choice(self) -> dict[str, Any] | None:
        """The parameters that were chosen for the test split, once they are."""
        return self._json("choice.json")

    @property
    def failure(self) -> str | None:
        """Why the last session failed, if it did."""
        failure = self._json("failure.json")
        return None if failure is None else str(failure.get("message"))

    def read_config(self) -> dict[str, Any]:
        """config.yaml as nested dictionaries."""
        from fedlens import yaml_reader

        config = yaml_reader.read(self.config)
        if not isinstance(config, dict):
            raise FedlensError(f"{self.config} is not a config: it must have lines `key: value`.")
        return config

    def position(self) -> int:
        """The number of epochs or rounds on record: the first value of the last metrics."""
        record = self.journal("metrics").last()
        number = next(iter(record.values())) if record else 0
        if type(number) is not int:
            path = self.journal("metrics").path
            raise FedlensError(f"{path} has a line without the number of its epoch or round.")
        return number

    def kept_rounds(self) -> list[int]:
        """The rounds whose client updates are on disk."""
        return kept_rounds(self.updates)

    def journal(self, name: str) -> Journal:
        return Journal(self.path / f"{name}.jsonl")

    def write(self, name: str, value: Mapping[str, Any], *, indent: int | None = 2) -> None:
        write_record(self.path / f"{name}.json", value, indent=indent)

    def clear_failure(self) -> None:
        path = self.path / "failure.json"
        discard(path) if path.is_dir() else path.unlink(missing_ok=True)

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """What a record of another shape raises becomes one sentence that names the run."""
        try:
            yield
        except SHAPE_ERRORS as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise FedlensError(
                f"{self.path} has damaged records ({reason}): restore them from a copy, or run it "
                "again under another run.name."
            ) from error

    def state(self) -> str:
        """finished | running | failed | interrupted"""
        if self.finished:
            return "finished"
        if (self.path / "run.lock").exists():
            try:
                with self.lock(timeout=0):
                    pass
            except Unlockable:  # a read-only folder, where no run can be under way
                pass
            except FedlensError:
                return "running"
        return "failed" if self.failure else "interrupted"

    @contextmanager
    def lock(self, *, timeout: float = 2.0) -> Iterator[None]:
        """Lets one process in at a time; the kernel frees the lock of a process that dies.

        `timeout` seconds are enough for another process that only asks for the run's state.
        """
        lock = FileLock(self.path / "run.lock")
        try:
            lock.acquire(timeout=timeout)
        except Timeout as error:
            raise FedlensError(f"{self.name} is being run by another process.") from error
        except OSError as error:
            reason = error.strerror or error
            raise Unlockable(f"{self.path / 'run.lock'} cannot be locked ({reason}).") from error
        try:
            yield
        finally:
            lock.release()

    def _json(self, name: str) -> dict[str, Any] | None:
        path = self.path / name
        return read_record(path) if path.exists() else None


def runs(root: Path) -> list[RunFolder]:
    """Every run in a folder or an archive, in the order in which they were begun or resumed."""
    root = _folder(root)
    names = {path.parent for file in MARKS for path in root.glob(f"*/{file}")}
    folders = [RunFolder(path) for path in names if not path.name.startswith(TEMPORARY)]
    return sorted(folders, key=lambda run: (_begun(run), run.name))


def find_run(name: str, root: Path) -> RunFolder:
    """A run by its path, name or short id, else the newest run with `name` in its name."""
    for path in (Path(name), _folder(root) / name):
        if _is_run(path):
            return RunFolder(path if path.name else path.resolve())
    known = runs(root)
    matches = [run for run in known if run.short_id == name] or [
        run for run in known if name in run.name
    ]
    if len(matches) > 1:
        log.warning(
            "%d runs match '%s': using the newest, %s", len(matches), name, matches[-1].name
        )
    if matches:
        return matches[-1]
    if not known:
        raise FedlensError(
            f"No run '{shown(name)}': there are no runs in {root} yet. Start one, or set --runs."
        )
    hint = suggest(name, [run.name for run in known])
    if len(known) > FEW and not hint.startswith("did you mean"):
        hint = "`fedlens ls` lists all runs."
    raise FedlensError(f"No run '{shown(name)}' in {root}: {hint}")


def find_runs(path: Path, root: Path = Path("runs")) -> list[RunFolder]:
    """The run at `path`, all runs of a folder or an archive, or the run of that name in `root`."""
    if not path.exists() or _is_run(path):
        if not path.exists() and not runs(root):
            raise FedlensError(
                f"No run '{shown(str(path))}', and no folder or archive of that name: start a run "
                "with `fedlens run quickstart`."
            )
        return [find_run(str(path), root)]
    if not (folders := runs(path)):
        raise FedlensError(f"There are no runs in {path}: name runs, or a folder that has some.")
    return folders


def kept_rounds(updates: Path) -> list[int]:
    """The rounds whose client updates are in a folder."""
    names = [ROUND.fullmatch(path.name) for path in updates.glob("round-*")]
    return sorted(int(name[1]) for name in names if name)


def _is_run(path: Path) -> bool:
    return any((path / file).exists() for file in MARKS)


def _begun(run: RunFolder) -> float:
    """When a run was begun or resumed, as far as its files say."""
    path = run.config if run.config.exists() else run.path
    return path.stat().st_mtime


def _folder(root: Path) -> Path:
    """`root` itself, or where its content is if it is an archive."""
    return extracted(root) if root.is_file() else root
