"""Runs as jobs of a cluster, through submitit: each is the plain command, which can be resumed.

A job that meets its time limit or is preempted asks its run to save itself, and is queued again
with the same command. What was submitted is on record, so another call watches it instead.
"""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from fedlens.errors import FedlensError
from fedlens.files import read_json, write_json
from fedlens.runtime.stop import StopRequest
from fedlens.store.run_folder import RunFolder
from fedlens.suites.eta import Outlook
from fedlens.suites.launch import Outcome, Piece

if TYPE_CHECKING:
    import submitit

SAVING = 60.0  # seconds a run has to save itself before its job ends
TIMEOUTS = 1000  # after so many a job is not queued again
SHARED = ("name", "timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node",
          "tasks_per_node", "stderr_to_stdout")  # fmt: skip


class Command:
    """What a job does: `fedlens` with these words, in a process of its own."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self.child: subprocess.Popen[bytes] | None = None

    def __call__(self) -> int:
        # The cluster's warning goes to every process of the job; the child waits for ours.
        deaf = partial(signal.signal, signal.SIGUSR2, signal.SIG_IGN)
        command = [sys.executable, "-m", "fedlens.cli", *self.words]
        self.child = subprocess.Popen(command, preexec_fn=deaf)
        try:
            return self.child.wait()
        finally:
            self._stop()
            self.child.wait()

    def checkpoint(self) -> "submitit.helpers.DelayedSubmission":
        """Called by submitit before a job is queued again."""
        import submitit

        self._stop()
        return submitit.helpers.DelayedSubmission(Command(self.words))

    def _stop(self) -> None:
        if self.child is None or not _lives(self.child.pid):
            return
        self.child.terminate()
        over = time.monotonic() + SAVING
        while _lives(self.child.pid) and time.monotonic() < over:
            time.sleep(0.1)
        self.child.kill()


def _lives(child: int) -> bool:
    """Asked of the system: a signal's handler must not wait for whom it interrupted waiting."""
    try:
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def parameters(words: Sequence[str]) -> dict[str, Any]:
    """`key=value` as submitit wants it: its shared names as they are, SLURM's own prefixed."""
    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not (key and equals and value):
            raise FedlensError(f"--slurm {word} is not of the form key=value: partition=gpu, say.")
        name = key.removeprefix("slurm_")
        found[name if name in SHARED else f"slurm_{name}"] = yaml.safe_load(value)
    return found


def executor(cluster: str, folder: Path, told: Mapping[str, Any]) -> "submitit.AutoExecutor":
    """`cluster` is slurm, or local: submitit's own stand-in on this machine."""
    try:
        import submitit
    except ImportError as error:
        raise FedlensError(
            f"--launcher {cluster} needs submitit: pip install 'fedlens[slurm]'."
        ) from error
    try:
        found = submitit.AutoExecutor(folder, cluster=cluster, slurm_max_num_timeout=TIMEOUTS)
        found.update_parameters(**{"timeout_min": 720, "name": "fedlens", **told})
    except (NameError, ValueError, AssertionError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise FedlensError(f"--launcher {cluster} cannot be used as told: {reason}") from error
    return found


def submitted(
    pieces: Sequence[Piece],
    outlook: Outlook,
    stop: StopRequest,
    *,
    through: "submitit.AutoExecutor",
    at_once: int | None = None,
) -> Iterator[Outcome]:
    """Submits every piece, at most `at_once` at a time, and watches them until they end."""
    waiting, watched = deque(pieces), dict[str, tuple[Piece, Any]]()
    while waiting or watched:
        stop.check()
        while waiting and (at_once is None or len(watched) < at_once):
            piece = waiting.popleft()
            outlook.begins(piece.label, piece.folder)
            try:
                watched[piece.label] = piece, _job(piece, through)
            except FedlensError as error:
                outlook.ends(piece.label, failed=True)
                yield Outcome(piece, str(error))
        for label, (piece, job) in list(watched.items()):
            if job.done():
                del watched[label]
                failure = _failure(piece, job, _record(piece, through))
                outlook.ends(label, failed=failure is not None)
                yield Outcome(piece, failure)
        time.sleep(0.2 if watched else 0)


@dataclass(frozen=True)
class Elsewhere:
    """A run that some process has in hand, be it a job of which no more is known."""

    folder: RunFolder

    def done(self) -> bool:
        return self.folder.state() != "running"


def _record(piece: Piece, through: "submitit.AutoExecutor") -> Path:
    """Written when the piece is submitted."""
    return Path(through.folder) / f"{piece.folder.name}.json"


def _job(piece: Piece, through: "submitit.AutoExecutor") -> Any:
    """The job of that piece: one that was submitted before and is not over, or a new one."""
    record = _record(piece, through)
    if record.exists():
        before = through._executor.job_class(through.folder, read_json(record)["job"])
        if not before.done(force_check=True) and before.state != "UNKNOWN":  # that is: forgotten
            return before
    if piece.folder.state() == "running":
        return Elsewhere(piece.folder)
    try:
        job = through.submit(Command(piece.words))
    except (RuntimeError, OSError) as error:
        reason = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
        raise FedlensError(f"Its job was refused: {reason}") from error
    write_json(record, {"job": job.job_id, "words": piece.words})
    return job


def _failure(piece: Piece, job: Any, record: Path) -> str | None:
    if piece.folder.result is not None:
        return None
    if isinstance(job, Elsewhere):
        return piece.folder.failure or (
            "Another process had it in hand and left it unfinished: give the same command again."
        )
    told = piece.folder.path / "failure.json"
    if told.exists() and told.stat().st_mtime_ns >= record.stat().st_mtime_ns:  # of this job
        return piece.folder.failure
    said = Path(job.paths.stderr)
    lines = said.read_text(errors="replace").splitlines() if said.exists() else []
    refused = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    ended = f"Its job {job.job_id} ended without a result ({job.state}); its log is {said}."
    return refused[-1] if refused else ended
