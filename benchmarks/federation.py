"""A federation on given parts, with its records in a temporary folder: what benchmarks measure.

It is the loop that `fedlens run` plays, recording included; only evaluation is left out.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import torch

from fedlens.config.compose import compose
from fedlens.data.images import Examples
from fedlens.data.partition import Partition
from fedlens.data.partition_statistics import histogram
from fedlens.data.splits import SealedTest
from fedlens.experiments.build import Parts
from fedlens.experiments.engine import choose_engine
from fedlens.experiments.evaluation import Measure
from fedlens.experiments.federated_loop import Federation
from fedlens.experiments.loop import Loop
from fedlens.models.classifier import Classifier
from fedlens.runtime.stop import StopRequest
from fedlens.store.checkpoints import Checkpoints
from fedlens.store.ledger import Ledger
from fedlens.store.run_folder import RunFolder
from fedlens.store.tracking import open_tracker
from fedlens.training.precision import Precision

ENDLESS = 10**6  # rounds, and evaluations and checkpoints as rarely


def equal_shards(clients: int, size: int) -> Partition:
    """Client k holds the k-th `size` examples."""
    return Partition(torch.arange(clients * size), torch.arange(clients + 1) * size)


def parts(model: Classifier, train: Examples, shards: Partition, classes: int) -> Parts:
    def absent() -> object:
        raise AssertionError("a benchmark looks at no test data")

    return Parts(
        model=model,
        train=train,
        partition=shards,
        held_classes=histogram(shards, train.labels.cpu(), classes),
        validation=None,
        test=SealedTest(absent),  # type: ignore[arg-type]
        test_examples=lambda images: train,
        classes=classes,
        precision=Precision("fp32", "cpu"),
        prepared=False,
        inputs={},
        facts={},
    )


@contextmanager
def federation(given: Parts, overrides: Sequence[str]) -> Iterator[Federation]:
    """With the config of fedavg_iid and `overrides`; lr constant, nothing evaluated."""
    shards = given.partition
    assert shards is not None
    config = compose(
        "fedavg_iid",
        [
            f"federated.clients={len(shards)}",
            f"federated.rounds={ENDLESS}",
            f"evaluate.every={ENDLESS - 1}",
            f"checkpoint.every={ENDLESS - 1}",
            "train.schedule.name=constant",
            "train.schedule.warmup=0",
            *overrides,
        ],
    )
    stop = StopRequest()
    with (
        tempfile.TemporaryDirectory() as name,
        open_tracker("none", Path(name), project="", mode="offline", config={}) as tracker,
    ):
        folder = RunFolder(Path(name))
        ledger = Ledger(folder, Checkpoints(folder.checkpoints))
        measure = Measure(given.model, given, batch_size=256, stop=stop)
        loop = Loop(config, measure, ledger, tracker, total=ENDLESS, began=0.0)
        engine, _ = choose_engine(config, given)
        try:
            yield Federation(config, given, engine, loop, stop, folder)
        finally:
            engine.close()


def rounds(played: Federation, each: int = 1) -> Callable[[], int]:
    """A turn of `each` whole rounds, recorded; returns how many they were."""
    numbers = count(1)

    def turn() -> int:
        for _ in range(each):
            record, timing = played.play(next(numbers), lambda: None)
            played.loop.close(played, record, timing)
        return each

    return turn
