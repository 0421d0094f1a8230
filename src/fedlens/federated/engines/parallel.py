"""A round's clients on local worker processes, each with a model instance of its own.

Parameters lie in shared memory; a finished update waits in a slot until its turn in the cohort. The
server gets the same updates in the same order as from one process with as many threads.
"""

import ctypes
import logging
import os
import signal
import sys
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.multiprocessing

from fedlens import params, plugins
from fedlens.errors import FedlensError
from fedlens.federated.client import Trainer
from fedlens.federated.tasks import ClientTask, ClientUpdate
from fedlens.params import Params
from fedlens.registry import RowSettings
from fedlens.training.step import Tally

ATTEMPTS = 3  # to train one client, before its worker's death is no accident

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Slot:
    """Shared memory for one client: what it has of its own, and what it ends with.

    `statistics` are those that its trainer computes; empty if it computes none.
    """

    correction: Params
    own: Params
    parameters: Params
    statistics: Params


@dataclass
class Worker:
    process: BaseProcess
    pipe: Connection
    job: "Job | None" = None


@dataclass
class Job:
    task: ClientTask
    slot: int
    deaths: int = 0
    result: "Result | None" = None


@dataclass(frozen=True)
class Result:
    tally: Tally | None
    fault: str | None


class Parallel:
    """`workers` processes with `threads` threads each; on GPUs, worker i has GPU i.

    A worker that dies is replaced, and its client trained again.
    """

    settings: RowSettings | None = None  # of the registry's row that made it

    def __init__(self, trainer: Trainer, *, workers: int, threads: int) -> None:
        self.trainer = trainer
        self.threads = threads
        # Forking starts at once and shares the data, but neither CUDA nor threads survive it.
        forks = sys.platform == "linux" and trainer.device.type == "cpu" and threads == 1
        self.context = torch.multiprocessing.get_context("fork" if forks else "spawn")
        packed, sent = trainer.packed(), trainer.sent()
        own = {name: sent[name] for name in trainer.own_names}
        statistics = trainer.statistics_layout()
        self.start = _shared(trainer.received())
        self.slots = [
            Slot(_shared(packed), _shared(own), _shared(sent), _shared(statistics))
            for _ in range(2 * workers)
        ]
        self.workers = [self._spawn(number) for number in range(workers)]

    def updates(self, parameters: Params, tasks: Sequence[ClientTask]) -> Iterator[ClientUpdate]:
        """With twice as many slots as workers, one slow client does not keep the others waiting."""
        while any(worker.job for worker in self.workers):  # of a round that was interrupted
            self._listen()
        params.assign(self.start, parameters)
        waiting, free = deque(tasks), deque(range(len(self.slots)))
        jobs: deque[Job] = deque()  # under way, in the cohort's order
        while waiting or jobs:
            for worker in self.workers:
                if waiting and free and worker.job is None:
                    jobs.append(Job(waiting.popleft(), free.popleft()))
                    self._send(worker, jobs[-1])
            first = jobs[0]
            if first.result is None:
                self._listen()
                continue
            result, slot = first.result, self.slots[first.slot]
            yield ClientUpdate(
                first.task,
                slot.parameters,
                result.tally,
                result.fault,
                statistics={} if result.fault else slot.statistics,
            )
            free.append(jobs.popleft().slot)

    def close(self) -> None:
        for worker in self.workers:
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()
        self.workers = []

    def _spawn(self, number: int) -> Worker:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(  # type: ignore[attr-defined]
            target=_serve,
            args=(
                plugins.loaded(),  # first: the others may be objects of a plugin
                *(theirs, os.getpid(), self.trainer),
                *(self.start, self.slots, self.threads, number),
            ),
            daemon=True,
            name=f"fedlens-worker-{number}",
        )
        with warnings.catch_warnings():
            # Newer Pythons warn of forks beside threads; a worker uses none of those it inherits.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        theirs.close()
        return Worker(process, ours)

    def _send(self, worker: Worker, job: Job) -> None:
        worker.job = job
        if job.task.correction:
            params.assign(self.slots[job.slot].correction, job.task.correction)
        if job.task.own:
            params.assign(self.slots[job.slot].own, job.task.own)
        # Workers have all three: two in shared memory, and the layout of statistics.
        task = replace(job.task, correction=None, own=None, statistics={})
        try:
            worker.pipe.send(
                (task, job.slot, job.task.correction is not None, job.task.own is not None)
            )
        except OSError:  # it died while idle: `_listen` notices and gives the job to another
            log.debug("worker %s has ended", worker.process.name)

    def _listen(self) -> None:
        """Waits until a worker has answered or died, and handles it."""
        ready = wait(
            [w.pipe for w in self.workers if w.job] + [w.process.sentinel for w in self.workers]
        )
        for number, worker in enumerate(self.workers):
            if worker.pipe in ready and (message := _received(worker.pipe)) is not None:
                job, worker.job = worker.job, None
                assert job is not None
                if isinstance(message, Exception):
                    raise message
                job.result = message
            elif worker.process.sentinel in ready:
                self._replace(number)

    def _replace(self, number: int) -> None:
        dead = self.workers[number]
        dead.process.join()
        dead.pipe.close()
        job, code = dead.job, dead.process.exitcode
        self.workers[number] = self._spawn(number)
        if job is None:
            log.warning("an idle worker died (exit code %s) and was replaced", code)
            return
        job.deaths += 1
        if job.deaths == ATTEMPTS:
            raise FedlensError(
                f"Client {job.task.client} ended its worker {ATTEMPTS} times (exit code {code}; -9 "
                "often means too little memory): use the serial engine, or fewer workers."
            )
        log.warning(
            "the worker of client %d died (exit code %s); a new one trains the client again",
            job.task.client, code,
        )  # fmt: skip
        self._send(self.workers[number], job)


def _serve(
    loaded: plugins.Loaded,
    pipe: Connection,
    parent: int,
    trainer: Trainer,
    start: Params,
    slots: Sequence[Slot],
    threads: int,
    number: int,
) -> None:
    """Runs in a worker: trains one client at a time until the main process is gone."""
    del loaded
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process decides when to stop
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _die_with_parent()
    torch.set_num_threads(threads)
    trainer = trainer.on(_device(trainer, number))
    while True:
        while not pipe.poll(1.0):
            if os.getppid() != parent:
                return
        task, slot, corrected, owned = pipe.recv()
        if corrected:
            task = replace(task, correction=slots[slot].correction)
        if owned:
            task = replace(task, own=slots[slot].own)
        try:
            update = trainer.train(task, start)
            params.assign(slots[slot].parameters, update.parameters)
            if update.statistics:
                params.assign(slots[slot].statistics, update.statistics)
            pipe.send(Result(update.tally, update.fault))
        except Exception as error:  # whatever it is, the main process raises it
            pipe.send(error)


def _device(trainer: Trainer, number: int) -> torch.device:
    """The model's device; if it is a GPU, worker i takes GPU i modulo their number."""
    if trainer.device.type != "cuda":
        return trainer.device
    return torch.device("cuda", number % torch.cuda.device_count())


def _shared(like: Params) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros_like(value, device="cpu", requires_grad=False).share_memory_()  # type: ignore[no-untyped-call]
        for name, value in like.items()
    }


def _received(pipe: Connection) -> Any:
    """A worker's message; None where it died before or while sending it."""
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return None


def _die_with_parent() -> None:
    """Where the kernel offers it, a worker ends at once when the main process is killed."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
