"""Pieces of a suite on worker processes of this machine, each taking the next when it is free.

Torch is loaded once and forked from there. A worker that dies has failed the piece it had, and is
replaced; workers end with the process that started them, however that ends.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from fedlens.runtime.stop import Interrupted, StopRequest
from fedlens.suites.eta import Outlook
from fedlens.suites.launch import Outcome, Piece, attempt

PATIENCE = 0.5  # seconds until a stop request is looked for again
STOPPED = "stopped"
ASKING = (signal.SIGINT, signal.SIGTERM)


@dataclass
class Worker:
    process: BaseProcess
    pipe: Connection
    piece: Piece | None = None


class Workers:
    """`count` processes with `threads` threads each, for as long as the context lasts."""

    def __init__(self, count: int, *, threads: int) -> None:
        self.count = count
        self.threads = threads
        # A server that has loaded torch and never used it can be forked safely, threads or not.
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

    def play(
        self, pieces: Sequence[Piece], outlook: Outlook, stop: StopRequest
    ) -> Iterator[Outcome]:
        """Outcomes in the order they come in; on a stop request runs save themselves first."""
        waiting, asked = deque(pieces), False
        while len(self.workers) < min(self.count, len(waiting)):
            self.workers.append(self._hire())
        while (waiting and not stop.name) or any(worker.piece for worker in self.workers):
            for worker in self.workers:
                if waiting and not stop.name and worker.piece is None:
                    self._give(worker, waiting.popleft(), outlook)
            if stop.name and not asked:
                asked = True
                for worker in self.workers:
                    if worker.piece:
                        _ask(worker)
            for worker, failure in self._heard():
                piece, worker.piece = worker.piece, None
                assert piece is not None
                outlook.ends(piece.label, failed=failure is not None)
                if failure != STOPPED and not (stop.name and not worker.process.is_alive()):
                    yield Outcome(piece, failure)
                if not worker.process.is_alive() and not stop.name:
                    self._replace(worker)
        stop.check()

    def _hire(self) -> Worker:
        if self.context.get_start_method() == "forkserver":
            _start_server()
        ours, theirs = self.context.Pipe()
        process = self.context.Process(  # type: ignore[attr-defined]
            target=_serve, args=(theirs, self.threads)
        )
        process.start()
        theirs.close()
        return Worker(process, ours)

    def _give(self, worker: Worker, piece: Piece, outlook: Outlook) -> None:
        worker.piece = piece
        outlook.begins(piece.label, piece.folder)
        with suppress(OSError):  # it died while idle: `_heard` sees that
            worker.pipe.send(piece.call)

    def _heard(self) -> list[tuple[Worker, str | None]]:
        """Workers that have answered or died, with why the piece failed."""
        busy = [worker for worker in self.workers if worker.piece]
        # The server tells who ends, and so does its own end: a worker of whom it did may live on.
        untold = [w.process.sentinel for w in busy if w.process.exitcode is None]
        wait([*(worker.pipe for worker in busy), *untold], PATIENCE)
        found: list[tuple[Worker, str | None]] = []
        for worker in busy:
            gone = worker.process.exitcode is not None and not _lives(worker)
            try:
                if worker.pipe.poll():
                    found.append((worker, worker.pipe.recv()))
                elif gone:
                    found.append((worker, _death(worker.process.exitcode or 0)))
            except (EOFError, OSError):
                worker.process.join()
                found.append((worker, _death(worker.process.exitcode or 0)))
        return found

    def _replace(self, worker: Worker) -> None:
        worker.pipe.close()
        self.workers[self.workers.index(worker)] = self._hire()


def _start_server() -> None:
    """Starts it deaf to Ctrl-C and SIGTERM: those are for us, who ask the workers."""
    resource_tracker.ensure_running()  # it ends such deafness, so it goes first
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ask(worker: Worker) -> None:
    """To save itself; `terminate` would not reach one whose server is gone."""
    assert worker.process.pid is not None
    with suppress(ProcessLookupError):
        os.kill(worker.process.pid, signal.SIGTERM)


def _lives(worker: Worker) -> bool:
    assert worker.process.pid is not None
    try:
        os.kill(worker.process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _death(code: int) -> str:
    if code >= 0:
        return f"Its process ended with exit code {code}."
    name = signal.Signals(-code).name
    return f"Its process was ended by {name}" + (
        ", often for lack of memory." if name == "SIGKILL" else "."
    )


def _serve(pipe: Connection, threads: int) -> None:
    """A worker's life: a piece at a time until nobody is there to send one."""
    os.setsid()  # Ctrl-C is for the parent, which asks once
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)  # as the server was started with
    silent = os.open(os.devnull, os.O_RDWR)
    os.dup2(silent, 1)  # runs have their logs; what there is to say the parent says
    os.dup2(silent, 2)
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
