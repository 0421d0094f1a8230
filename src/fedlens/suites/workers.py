"""Jobs of a suite on worker processes of this machine; a free worker takes the next job.

Torch is loaded once, in a server that workers are forked from. A worker that dies fails its job and
is replaced. Workers end with the process that started them, however it ends.
"""

import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from fedlens import plugins
from fedlens.runtime.stop import Interrupted, StopRequest
from fedlens.suites.eta import Eta
from fedlens.suites.launch import Job, Outcome, attempt

POLL_S = 0.5  # how often a stop request is looked for
STOPPED = "stopped"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class Worker:
    process: BaseProcess
    pipe: Connection
    job: Job | None = None


class Workers:
    """`count` processes with `threads` threads each, while the context lasts."""

    def __init__(self, count: int, *, threads: int) -> None:
        self.count = count
        self.threads = threads
        # A server that has loaded torch but never used it can be forked safely.
        self.context = multiprocessing.get_context(
            "spawn" if sys.platform == "win32" else "forkserver"
        )
        self.context.set_forkserver_preload(["fedlens.experiments.run"])
        self.workers: list[Worker] = []

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self.workers:
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()

    def run(
        self, jobs: Sequence[Job], eta: Eta, stop: StopRequest, *, until: float = math.inf
    ) -> Iterator[Outcome]:
        """Outcomes as jobs end; after a stop request the active runs save their state first.

        No job is started after `until`, in seconds of `time.monotonic`.
        """
        waiting, stopping = deque(jobs), False

        def may_start() -> bool:
            return bool(waiting) and not stop.name and time.monotonic() < until

        while len(self.workers) < min(self.count, len(waiting)):
            self.workers.append(self._spawn())
        while may_start() or any(worker.job for worker in self.workers):
            for worker in self.workers:
                if worker.job is None and may_start():
                    self._send(worker, waiting.popleft(), eta)
            if stop.name and not stopping:
                stopping = True
                for worker in self.workers:
                    if worker.job:
                        _request_stop(worker)
            for worker, failure in self._results():
                job, worker.job = worker.job, None
                assert job is not None
                eta.end(job.label, failed=failure is not None)
                if failure != STOPPED and not (stop.name and not worker.process.is_alive()):
                    yield Outcome(job, failure)
                if not worker.process.is_alive() and not stop.name:
                    self._replace(worker)
        stop.check()

    def _spawn(self) -> Worker:
        if self.context.get_start_method() == "forkserver":
            _start_server()
        ours, theirs = self.context.Pipe()
        process = self.context.Process(  # type: ignore[attr-defined]
            target=_serve, args=(plugins.loaded(), theirs, self.threads)
        )
        process.start()
        theirs.close()
        return Worker(process, ours)

    def _send(self, worker: Worker, job: Job, eta: Eta) -> None:
        worker.job = job
        eta.start(job.label, job.folder)
        with suppress(OSError):  # it died while idle: `_results` reports that
            worker.pipe.send(job.call)

    def _results(self) -> list[tuple[Worker, str | None]]:
        """Workers that have answered or died, and why their jobs failed."""
        busy = [worker for worker in self.workers if worker.job]
        # A sentinel is ready when the worker ends, but also when the server does: the worker may
        # still run then, and its sentinel stays ready.
        sentinels = [w.process.sentinel for w in busy if w.process.exitcode is None]
        wait([*(worker.pipe for worker in busy), *sentinels], POLL_S)
        results: list[tuple[Worker, str | None]] = []
        for worker in busy:
            ended = worker.process.exitcode is not None and not _is_running(worker)
            try:
                if worker.pipe.poll():
                    results.append((worker, worker.pipe.recv()))
                elif ended:
                    results.append((worker, _describe_exit(worker.process.exitcode or 0)))
            except (EOFError, OSError):
                worker.process.join()
                results.append((worker, _describe_exit(worker.process.exitcode or 0)))
        return results

    def _replace(self, worker: Worker) -> None:
        worker.pipe.close()
        self.workers[self.workers.index(worker)] = self._spawn()


def _start_server() -> None:
    """Start it with Ctrl-C and SIGTERM blocked: this process stops the workers itself."""
    resource_tracker.ensure_running()  # first, since it unblocks these signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _request_stop(worker: Worker) -> None:
    """By the process id: `terminate` would not reach a worker whose server has ended."""
    assert worker.process.pid is not None
    with suppress(ProcessLookupError):
        os.kill(worker.process.pid, signal.SIGTERM)


def _is_running(worker: Worker) -> bool:
    assert worker.process.pid is not None
    try:
        os.kill(worker.process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"Its process ended with exit code {code}."
    name = signal.Signals(-code).name
    return f"Its process was ended by {name}" + (
        ", often for lack of memory." if name == "SIGKILL" else "."
    )


def _serve(loaded: plugins.Loaded, pipe: Connection, threads: int) -> None:
    """The main function of a worker: one job at a time until the pipe is closed."""
    del loaded  # unpickling it has loaded the plugins that jobs need
    os.setsid()  # Ctrl-C goes to the parent alone, which sends one stop request
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # blocked in the server
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, 1)  # runs write their own logs, and the parent prints their outcomes
    os.dup2(devnull, 2)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    with suppress(EOFError):
        while True:
            call = pipe.recv()
            torch.set_num_threads(threads)
            try:
                failure = attempt(call)
            except Interrupted:
                failure = STOPPED
            pipe.send(failure)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
