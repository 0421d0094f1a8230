"""What `engine=auto` found to be fastest, kept for each machine and shape of the work.

A choice is one small JSON file in the cache, named by a hash of all that the speed depends on. A
file that cannot be read is ignored and written anew.
"""

import hashlib
import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from fedlens import files
from fedlens.errors import FedlensError
from fedlens.federated.client import Trainer
from fedlens.runtime.machine import processor
from fedlens.runtime.threads import available

FOLDER = "engines"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    parallel: bool  # worker processes
    shortcuts: bool

    def __post_init__(self) -> None:
        if not (isinstance(self.parallel, bool) and isinstance(self.shortcuts, bool)):
            raise TypeError("not a choice")


def path(trainer: Trainer, clients: int, **asked: int | bool | None) -> Path:
    """Where the choice for this work is kept; `asked` are the engine's own parameters."""
    training = trainer.training
    first = trainer.examples.batch(torch.zeros(1, dtype=torch.int64))
    work = {
        "processor": processor(),
        "cores": available(),
        "torch": torch.__version__,
        "device": str(trainer.device),
        "model": [(name, list(p.shape)) for name, p in trainer.model.named_parameters()],
        "trained": {name: list(value.shape) for name, value in trainer.packed().items()},
        "inputs": list(first.shape[1:]),
        "batch_size": training.batch_size,
        "micro_batch": training.step.micro_batch,
        "precision": training.step.precision.name,
        "optimizer": repr(training.optimizer),
        "compiled": trainer.compiled,
        "statistic": trainer.statistic is not None,
        "few_clients": clients if clients < 2 * available() else None,
        "asked": asked,
    }
    name = hashlib.sha256(json.dumps(work, sort_keys=True).encode()).hexdigest()[:16]
    return files.cache_dir() / FOLDER / f"{name}.json"


def recall(file: Path) -> Choice | None:
    """The choice that was made before; None if there is none, or, with a warning, a damaged one."""
    if not file.exists():
        return None
    try:
        return Choice(**files.read_json(file))
    except (FedlensError, TypeError) as error:
        log.warning("%s is damaged (%s): engines are measured again.", file, error)
        return None


def remember(file: Path, choice: Choice) -> None:
    """Where the cache cannot be written, the next run measures again."""
    try:
        files.write_json(file, asdict(choice))
    except (FedlensError, OSError) as error:
        log.info("The choice of the engine could not be saved: %s", error)
