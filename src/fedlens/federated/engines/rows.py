"""Engines for clients in this process, by name: one process, worker processes, or the faster one.

All give the same bits at an equal number of threads per client; the defaults differ: `serial` gives
a client all threads, `parallel` one.
"""

import logging
import time
from typing import Annotated

import torch

from fedlens import params
from fedlens.data.examples import FeatureExamples
from fedlens.federated.client import Trainer
from fedlens.federated.engines.parallel import Parallel
from fedlens.federated.engines.serial import Serial
from fedlens.federated.engines.vectorised import Vectorised
from fedlens.federated.tasks import ClientTask, Engine
from fedlens.registry import Range, RowSettings, engine
from fedlens.runtime.threads import available
from fedlens.training.optimizers import Sgd

MIN_SPEEDUP = 1.05  # workers must be so much faster to be chosen over one process

log = logging.getLogger(__name__)


@engine(label="one process", order=1)
def serial(
    trainer: Trainer,
    clients: int,
    *,
    threads_per_client: Annotated[
        int | None, Range("[1, inf)"), "null: all threads of the process"
    ] = None,
    vectorise: Annotated[
        bool, "train heads on cached features as one batched product (equal up to rounding)"
    ] = True,
) -> Engine:
    """One client after another; heads on cached features train together."""
    del clients
    threads = threads_per_client or torch.get_num_threads()
    made: Serial | Vectorised = Serial(trainer, threads)
    if vectorise and (batched := _vectorised(trainer, threads)):
        made = batched
    made.settings = RowSettings(name="serial", threads_per_client=threads, vectorise=vectorise)
    return made


@engine(label="worker processes", order=2)
def parallel(
    trainer: Trainer,
    clients: int,
    *,
    workers: Annotated[
        int | None, Range("[1, inf)"), "processes; null: one for each GPU or core"
    ] = None,
    threads_per_client: Annotated[
        int | None, Range("[1, inf)"), "null: 1; with as many as serial has, bits are equal"
    ] = None,
) -> Engine:
    """Clients side by side on worker processes of this machine."""
    del clients
    threads = threads_per_client or 1
    made = Parallel(trainer, workers=workers or _workers(trainer, threads), threads=threads)
    made.settings = RowSettings(name="parallel", workers=workers, threads_per_client=threads)
    return made


@engine(label="one process or worker processes, whichever is faster", order=3)
def auto(
    trainer: Trainer,
    clients: int,
    *,
    workers: Annotated[
        int | None, Range("[1, inf)"), "processes; null: one for each GPU or core"
    ] = None,
    threads_per_client: Annotated[
        int | None, Range("[1, inf)"), "null: all threads if serial, 1 if parallel"
    ] = None,
    vectorise: Annotated[
        bool, "train heads on cached features as one batched product (equal up to rounding)"
    ] = True,
) -> Engine:
    """Whichever of `serial` and `parallel` a short probe finds faster; a run keeps the choice."""
    one = serial(trainer, clients, threads_per_client=threads_per_client, vectorise=vectorise)
    if isinstance(one, Vectorised) or not trainer.trained:
        return one
    many = parallel(trainer, clients, workers=workers, threads_per_client=threads_per_client)
    assert isinstance(one, Serial)
    assert isinstance(many, Parallel)
    if _faster(many, one, clients):
        return many
    many.close()
    return one


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


def _faster(many: Parallel, one: Serial, clients: int) -> bool:
    """Whether worker processes are worth it, from a few steps of some clients."""
    trainer = one.trainer
    tasks = [
        ClientTask(0, client, steps=2, lr=0.0, examples=len(trainer.shard(client)))
        for client in range(min(clients, 2 * len(many.workers)))
    ]
    start = params.copy(trainer.packed())
    seconds = {}
    engines: dict[str, Engine] = {"serial": one, "parallel": many}
    for name, engine_ in engines.items():
        for _ in range(2):  # the first time warms up
            began = time.monotonic()
            for _ in engine_.updates(start, tasks):
                pass
            seconds[name] = time.monotonic() - began
    trainer.packing.unpack(start, trainer.trained)
    ratio = seconds["serial"] / seconds["parallel"]
    log.info(
        "engine=auto: %d workers with %d thread(s) each are %.2f times as fast as one process with "
        "%d: %s", len(many.workers), many.threads, ratio, one.threads,
        "parallel" if ratio > MIN_SPEEDUP else "serial",
    )  # fmt: skip
    return ratio > MIN_SPEEDUP
