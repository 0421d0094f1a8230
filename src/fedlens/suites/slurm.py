"""Runs as jobs of a cluster, through submitit: each is a `fedlens run` command that can be resumed.

A job that reaches its time limit or is preempted asks its run to save its state and is queued again
with the same command. Submitted jobs are on record: the next `fedlens suite` watches them.
"""

import math
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

from fedlens import yaml_reader
from fedlens.errors import FedlensError
from fedlens.files import read_json, write_json
from fedlens.runtime.stop import StopRequest
from fedlens.store.run_folder import RunFolder
from fedlens.suites.eta import Eta
from fedlens.suites.launch import Job, Outcome

if TYPE_CHECKING:
    import submitit

SAVE_TIMEOUT_S = 60.0  # for a run to save its state before its job ends
POLL_S = 0.2
MAX_TIMEOUTS = 1000  # a job is not queued again after so many
# Options submitit has for every cluster; SLURM's own get the prefix slurm_.
SHARED_OPTIONS = ("name", "timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node",
                  "tasks_per_node", "stderr_to_stdout")  # fmt: skip


class Command:
    """The function of a job: runs `fedlens` with these arguments as a child process."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.arguments = list(arguments)
        self.child: subprocess.Popen[bytes] | None = None

    def __call__(self) -> int:
        # The cluster warns every process of the job; the child waits for the signal of this one.
        ignore_warning = partial(signal.signal, signal.SIGUSR2, signal.SIG_IGN)
        command = [sys.executable, "-m", "fedlens.cli", *self.arguments]
        self.child = subprocess.Popen(command, preexec_fn=ignore_warning)
        try:
            return self.child.wait()
        finally:
            self._stop()
            self.child.wait()

    def checkpoint(self) -> "submitit.helpers.DelayedSubmission":
        """Called by submitit before a job is queued again."""
        import submitit

        self._stop()
        return submitit.helpers.DelayedSubmission(Command(self.arguments))

    def _stop(self) -> None:
        if self.child is None or not _is_running(self.child.pid):
            return
        self.child.terminate()
        deadline = time.monotonic() + SAVE_TIMEOUT_S
        while _is_running(self.child.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        self.child.kill()


def _is_running(child: int) -> bool:
    """Asks the system: `Popen.poll` would block in a signal handler that interrupted its wait."""
    try:
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def parse_options(words: Sequence[str]) -> dict[str, Any]:
    """`key=value` as submitit expects it: its shared options as they are, SLURM's own prefixed."""
    options: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not (key and equals and value):
            raise FedlensError(
                f"--slurm {word} is not of the form key=value, such as partition=gpu."
            )
        name = key.removeprefix("slurm_")
        read = yaml_reader.parse(value, f"--slurm {key}")
        options[name if name in SHARED_OPTIONS else f"slurm_{name}"] = read
    return options


def make_executor(
    cluster: str, folder: Path, options: Mapping[str, Any]
) -> "submitit.AutoExecutor":
    """`cluster` is slurm, or local: submitit's emulation on this machine."""
    try:
        import submitit
    except ImportError as error:
        raise FedlensError(
            f"--launcher {cluster} needs submitit: pip install 'fedlens[slurm]'."
        ) from error
    try:
        executor = submitit.AutoExecutor(
            folder, cluster=cluster, slurm_max_num_timeout=MAX_TIMEOUTS
        )
        executor.update_parameters(**{"timeout_min": 720, "name": "fedlens", **options})
    except (NameError, ValueError, AssertionError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise FedlensError(f"submitit refuses --launcher {cluster}: {reason}") from error
    return executor


def submit_all(
    jobs: Sequence[Job],
    eta: Eta,
    stop: StopRequest,
    *,
    executor: "submitit.AutoExecutor",
    at_once: int | None = None,
    until: float = math.inf,
) -> Iterator[Outcome]:
    """Submit every job, at most `at_once` at a time, and watch them until they end.

    No job is submitted after `until`, in seconds of `time.monotonic`.
    """
    waiting, watched = deque(jobs), dict[str, tuple[Job, Any]]()

    def may_submit() -> bool:
        return bool(waiting) and time.monotonic() < until

    while may_submit() or watched:
        stop.check()
        while may_submit() and (at_once is None or len(watched) < at_once):
            job = waiting.popleft()
            eta.start(job.label, job.folder)
            try:
                watched[job.label] = job, _submission(job, executor)
            except FedlensError as error:
                eta.end(job.label, failed=True)
                yield Outcome(job, str(error))
        for label, (job, submission) in list(watched.items()):
            if submission.done():
                del watched[label]
                failure = _failure(job, submission, _record(job, executor))
                eta.end(label, failed=failure is not None)
                yield Outcome(job, failure)
        time.sleep(POLL_S if watched else 0)


@dataclass(frozen=True)
class RunningElsewhere:
    """A run that another process carries out, perhaps a job that is not on record."""

    folder: RunFolder

    def done(self) -> bool:
        return self.folder.state() != "running"


def _record(job: Job, executor: "submitit.AutoExecutor") -> Path:
    """Written when the job is submitted."""
    return Path(executor.folder) / f"{job.folder.name}.json"


def _submission(job: Job, executor: "submitit.AutoExecutor") -> Any:
    """The cluster's job: one that was submitted before and has not ended, or a new one."""
    record = _record(job, executor)
    if record.exists():
        earlier = executor._executor.job_class(executor.folder, read_json(record)["job"])
        # UNKNOWN: the cluster has forgotten it.
        if not earlier.done(force_check=True) and earlier.state != "UNKNOWN":
            return earlier
    if job.folder.state() == "running":
        return RunningElsewhere(job.folder)
    try:
        submission = executor.submit(Command(job.arguments))
    except (RuntimeError, OSError) as error:
        reason = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
        raise FedlensError(f"The cluster refused the job: {reason}") from error
    write_json(record, {"job": submission.job_id, "arguments": job.arguments})
    return submission


def _failure(job: Job, submission: Any, record: Path) -> str | None:
    if job.folder.finished:
        return None
    if isinstance(submission, RunningElsewhere):
        return job.folder.failure or (
            "Another process left the run unfinished: run the same command again to resume."
        )
    failure = job.folder.path / "failure.json"
    if failure.exists() and failure.stat().st_mtime_ns >= record.stat().st_mtime_ns:  # of this job
        return job.folder.failure
    log = Path(submission.paths.stderr)
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if errors:
        return errors[-1]
    return f"Job {submission.job_id} ended without a result ({submission.state}); its log is {log}."
