"""Which engine carries out the rounds: as told, or as a short probe finds faster here."""

import logging
import time
from dataclasses import replace

import torch

from fedlens import params
from fedlens.config.schema import Config, EngineConfig
from fedlens.data.examples import FeatureExamples
from fedlens.experiments.build import Parts, local_rules
from fedlens.federated.client import Task, Trainer, laid_out
from fedlens.federated.engines.parallel import Parallel
from fedlens.federated.engines.serial import Engine, Serial
from fedlens.federated.engines.vectorised import Vectorised
from fedlens.federated.tasks import Crowd
from fedlens.runtime.threads import available

WORTH = 1.05  # workers must be so much faster to be chosen over one process

log = logging.getLogger(__name__)


def choose_engine(
    config: Config, parts: Parts, crowd: Crowd | None = None
) -> tuple[Engine, EngineConfig]:
    """The engine, and the config that gives it again without a probe; a `crowd` is its own."""
    told = config.engine
    if crowd:
        laid_out(parts.model)
        return crowd.engine("rounds"), told
    rules = local_rules(config, parts.precision)
    examples = parts.train
    threads = told.threads_per_client or torch.get_num_threads()
    wanted = told.vectorise and told.name != "parallel" and parts.precision.dtype is None
    if wanted and isinstance(examples, FeatureExamples):
        engine = Vectorised(examples, rules, config.seed, threads)
        return engine, replace(told, name="serial", threads_per_client=threads)
    trainer = Trainer(
        parts.model,
        examples,
        rules,
        config.seed,
        masks=parts.masks,
        compiled=config.train.compile,
    )
    serial = Serial(trainer, threads)
    if told.name == "serial" or not parts.trains:
        return serial, replace(told, name="serial", threads_per_client=threads)
    each = told.threads_per_client or 1
    parallel = Parallel(trainer, workers=told.workers or _workers(trainer, each), threads=each)
    if told.name == "parallel" or _faster(parallel, serial, config, parts):
        return parallel, replace(told, name="parallel", threads_per_client=each)
    parallel.close()
    return serial, replace(told, name="serial", threads_per_client=threads)


def _workers(trainer: Trainer, threads: int) -> int:
    if trainer.device.type == "cuda":
        return torch.cuda.device_count()
    return max(1, available() // threads)


def _faster(parallel: Parallel, serial: Serial, config: Config, parts: Parts) -> bool:
    """Whether the workers are worth it, from a few steps of some clients; says what it found."""
    assert parts.partition is not None
    steps = min(2, config.federated.local_steps)
    count = min(len(parts.partition), 2 * len(parallel.workers))
    tasks = [
        Task(0, client, parts.partition.shard(client), steps, config.train.lr)
        for client in range(count)
    ]
    start = params.copy(serial.trainer.packed())
    seconds = {}
    engines: dict[str, Engine] = {"serial": serial, "parallel": parallel}
    for name, engine in engines.items():
        for _ in "12":  # the first time warms up
            began = time.monotonic()
            for _ in engine.updates(start, tasks):
                pass
            seconds[name] = time.monotonic() - began
    serial.trainer.packing.unpack(start, serial.trainer.trained)
    ratio = seconds["serial"] / seconds["parallel"]
    log.info(
        "engine=auto: %d workers with %d thread(s) each are %.2f times as fast as one process with "
        "%d: %s", len(parallel.workers), parallel.threads, ratio, serial.threads,
        "parallel" if ratio > WORTH else "serial",
    )  # fmt: skip
    return ratio > WORTH
