"""Engines for clients in this process, by name: one process, worker processes, or the faster one.

All give the same bits at an equal number of threads per client and equal shortcuts; the defaults
differ: `serial` gives a client all threads, `parallel` one. Neither takes shortcuts unless asked.
"""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

import torch

from fedlens import params
from fedlens.data.examples import FeatureExamples
from fedlens.federated.client import Trainer
from fedlens.federated.diagnostics import Delta
from fedlens.federated.engines import remembered
from fedlens.federated.engines.parallel import Parallel
from fedlens.federated.engines.remembered import Choice
from fedlens.federated.engines.serial import Serial
from fedlens.federated.engines.vectorised import Vectorised
from fedlens.federated.server.aggregation import RunningSum
from fedlens.federated.tasks import ClientTask, Engine
from fedlens.registry import Range, RowSettings, engine
from fedlens.runtime.threads import available, limited_threads
from fedlens.training.optimizers import Sgd

MIN_SPEEDUP = 1.05  # workers must be so much faster to be chosen over one process
MIN_SHORTCUT = 1.02  # and a step with shortcuts over the plain one
PROBE_S, PROBES = 5.0, 12  # a probe is repeated for so long, or so often
CHEAP_S = 1.0  # a probe that warms up in less is of twice as many clients and steps

log = logging.getLogger(__name__)


@engine(label="one process", order=1)
def serial(
    trainer: Trainer,
    clients: int,
    *,
    threads_per_client: Annotated[
        int | None, Range("[1, 1024]"), "null: all threads of the process"
    ] = None,
    vectorise: Annotated[
        bool, "train heads on cached features as one batched product (equal up to rounding)"
    ] = True,
    shortcuts: Annotated[bool | None, "faster steps, equal up to rounding; null: no"] = None,
) -> Engine:
    """One client after another; heads on cached features train together."""
    del clients
    threads = threads_per_client or torch.get_num_threads()
    made: Serial | Vectorised | None = _vectorised(trainer, threads) if vectorise else None
    if made is None:
        made = Serial(_shortened(trainer) if shortcuts else trainer, threads)
    made.settings = RowSettings(
        name="serial",
        threads_per_client=threads,
        vectorise=vectorise,
        shortcuts=bool(shortcuts),
    )
    return made


@engine(label="worker processes", order=2)
def parallel(
    trainer: Trainer,
    clients: int,
    *,
    workers: Annotated[
        int | None, Range("[1, 1024]"), "processes; null: one for each GPU or core"
    ] = None,
    threads_per_client: Annotated[
        int | None, Range("[1, 1024]"), "null: 1; with as many as serial has, bits are equal"
    ] = None,
    shortcuts: Annotated[bool | None, "faster steps, equal up to rounding; null: no"] = None,
) -> Engine:
    """Clients side by side on worker processes of this machine."""
    del clients
    threads = threads_per_client or 1
    if shortcuts:
        trainer = _shortened(trainer)
    made = Parallel(trainer, workers=workers or _workers(trainer, threads), threads=threads)
    made.settings = RowSettings(
        name="parallel",
        workers=workers,
        threads_per_client=threads,
        shortcuts=bool(shortcuts),
    )
    return made


@engine(label="one process or worker processes, whichever is faster", order=3)
def auto(
    trainer: Trainer,
    clients: int,
    *,
    workers: Annotated[
        int | None, Range("[1, 1024]"), "processes; null: one for each GPU or core"
    ] = None,
    threads_per_client: Annotated[
        int | None, Range("[1, 1024]"), "null: all threads if serial, 1 if parallel"
    ] = None,
    vectorise: Annotated[
        bool, "train heads on cached features as one batched product (equal up to rounding)"
    ] = True,
    shortcuts: Annotated[
        bool | None, "faster steps, equal up to rounding; null: if they are faster"
    ] = None,
) -> Engine:
    """Whichever of `serial` and `parallel`, with shortcuts or without, a short probe finds faster.

    A run keeps the choice, and a machine remembers it for the next run with steps of this shape.
    """
    one = serial(trainer, clients, threads_per_client=threads_per_client, vectorise=vectorise)
    if isinstance(one, Vectorised) or not trainer.trained:
        return one

    def make(choice: Choice) -> Serial | Parallel:
        made = (
            parallel(
                trainer, clients, workers=workers, threads_per_client=threads_per_client,
                shortcuts=choice.shortcuts,
            )
            if choice.parallel
            else serial(
                trainer, clients, threads_per_client=threads_per_client, vectorise=vectorise,
                shortcuts=choice.shortcuts,
            )
        )  # fmt: skip
        assert isinstance(made, Serial | Parallel)
        return made

    file = remembered.path(
        trainer,
        clients,
        workers=workers,
        threads_per_client=threads_per_client or torch.get_num_threads(),
        shortcuts=shortcuts,
    )
    if choice := remembered.recall(file):
        log.info("engine=auto: %s, as measured before (%s)", _words(choice), file)
        return make(choice)
    made, choice = _fastest(make, clients, shortcuts)
    remembered.remember(file, choice)
    return made


def _vectorised(trainer: Trainer, threads: int) -> Vectorised | None:
    """Where the model is a linear head on features, trained by SGD in float32.

    Statistics are computed one client at a time, so a trainer that sends some is not batched.
    """
    training, examples = trainer.training, trainer.examples
    if trainer.statistic is not None:
        return None
    if not isinstance(examples, FeatureExamples) or len(trainer.trained) != 2:
        return None
    if not isinstance(training.optimizer, Sgd) or training.step.precision.dtype is not None:
        return None
    weight, bias = trainer.trained
    return Vectorised(
        examples, trainer.shard, training, trainer.seed, threads, names=(weight, bias)
    )


def _workers(trainer: Trainer, threads: int) -> int:
    if trainer.device.type == "cuda":
        return torch.cuda.device_count()
    return max(1, available() // threads)


def _shortened(trainer: Trainer) -> Trainer:
    """With a model of its own, since shortcuts change how a model computes."""
    return trainer.on(trainer.device, shortcuts=True)


def _fastest(
    make: Callable[[Choice], Serial | Parallel],
    clients: int,
    shortcuts: bool | None,
) -> tuple[Serial | Parallel, Choice]:
    """First worker processes against one process, then the faster one against its shortcuts."""
    choice = Choice(parallel=False, shortcuts=bool(shortcuts))
    engines: dict[Choice, Serial | Parallel] = {}
    try:
        for one in (choice, replace(choice, parallel=True)):
            engines[one] = make(one)
        choice = _faster(engines, clients, MIN_SPEEDUP)
        if shortcuts is None:
            shorter = replace(choice, shortcuts=True)
            engines[shorter] = make(shorter)
            took = engines[shorter].trainer
            if took.shortened or took.fused:
                choice = _faster(engines, clients, MIN_SHORTCUT)
            else:
                engines.pop(shorter).close()
    except BaseException:
        for engine_ in engines.values():
            engine_.close()
        raise
    return engines[choice], choice


def _faster(engines: dict[Choice, Serial | Parallel], clients: int, min_speedup: float) -> Choice:
    """The second of two engines if it is so much faster in a few steps; closes the other one."""
    (first, plain), (second, other) = engines.items()
    trainer = plain.trainer
    workers = max(len(one.workers) if isinstance(one, Parallel) else 1 for one in engines.values())
    start = params.copy(trainer.received())
    servers: dict[Serial | Parallel, tuple[Delta, RunningSum]] = {}

    def seconds(engine_: Serial | Parallel, size: int) -> float:
        """Of `size` clients a worker and as many steps of each, measured and added as by a server.

        Meanwhile worker processes train on, and one process does not.
        """
        began = time.monotonic()
        tasks = [
            ClientTask(0, client, steps=size, lr=0.0, examples=len(trainer.shard(client)))
            for client in range(min(clients, size * workers))
        ]
        for update in engine_.updates(start, tasks):
            with limited_threads(1):
                received = params.with_float64(update.parameters)
                if engine_ not in servers:
                    at = params.copy(received)  # on the device where this engine leaves updates
                    servers[engine_] = Delta(at), RunningSum(at)
                delta, running = servers[engine_]
                delta.measure(received)
                running.add(received, 1.0)
        return time.monotonic() - began

    began = time.monotonic()
    warm_up = sum(seconds(engine_, 2) for engine_ in engines.values())
    size = 4 if warm_up < CHEAP_S else 2
    best = dict.fromkeys(engines, math.inf)
    for _ in range(PROBES):
        for choice, engine_ in engines.items():
            best[choice] = min(best[choice], seconds(engine_, size))
        if time.monotonic() - began > PROBE_S:
            break
    trainer.load(start)
    ratio = best[first] / best[second]
    chosen = second if ratio > min_speedup else first
    log.info(
        "engine=auto: %s are %.2f times as fast as %s: %s",
        _words(second, other), ratio, _words(first, plain), _words(chosen),
    )  # fmt: skip
    engines.pop(first if chosen is second else second).close()
    return chosen


def _words(choice: Choice, engine_: Serial | Parallel | None = None) -> str:
    """As "parallel" and, of a given engine, "2 workers with 1 thread(s) each"."""
    with_shortcuts = " with shortcuts" if choice.shortcuts else ""
    if engine_ is None:
        return ("parallel" if choice.parallel else "serial") + with_shortcuts
    if isinstance(engine_, Parallel):
        workers = f"{len(engine_.workers)} workers with {engine_.threads} thread(s) each"
        return workers + with_shortcuts
    return f"one process with {engine_.threads}{with_shortcuts}"
