"""Federated rounds on a given model and data, recorded in a temporary folder, for benchmarks.

The loop is that of `fedlens run`, records included; only evaluation is left out.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import torch

from fedlens.config.compose import compose, row_of
from fedlens.data.examples import Examples
from fedlens.data.images import Images
from fedlens.data.partitions.partition import Partition
from fedlens.data.partitions.partition_statistics import histogram
from fedlens.data.splits import SealedTest
from fedlens.data.transforms import Pipeline
from fedlens.experiments import settings
from fedlens.experiments.build import Experiment, Extractor, FrozenFeatures
from fedlens.experiments.clients import experiment_host
from fedlens.experiments.loops.evaluation import Evaluator
from fedlens.experiments.loops.federated_loop import FederatedLoop
from fedlens.experiments.loops.loop import Loop
from fedlens.federated.host import LocalClients
from fedlens.models.architectures.backbones import Backbone
from fedlens.models.classifier import Classifier
from fedlens.models.deep_features import Reading
from fedlens.runtime.stop import StopRequest
from fedlens.store.checkpoints import Checkpoints, Journals
from fedlens.store.run_folder import RunFolder
from fedlens.store.tracking import open_tracker
from fedlens.training.precision import Precision

ENDLESS = 10**6  # rounds; evaluations and checkpoints are as rare
SIZE = 32  # pixels; no image is read


def equal_shards(clients: int, size: int) -> Partition:
    """Client k holds the k-th `size` examples."""
    return Partition(torch.arange(clients * size), torch.arange(clients + 1) * size)


def experiment(
    model: Classifier, train: Examples, partition: Partition, classes: int
) -> Experiment:
    """Without validation and test data."""
    none, precision = torch.arange(0), Precision("fp32", "cpu")
    row = Backbone("benchmark", build=lambda resolution: model.backbone)
    pipeline = Pipeline(SIZE, row.mean, row.std)
    return Experiment(
        model=model,
        backbone=model.backbone,
        train=train,
        partition=partition,
        class_counts=histogram(partition, train.labels.cpu(), classes),
        validation=None,
        test=SealedTest(_no_images),
        test_examples=lambda images: train,
        classes=classes,
        precision=precision,
        features=FrozenFeatures(lambda: none, Images(none, none), none, none),
        extractor=Extractor(
            model.backbone,
            Reading(),
            row,
            pipeline,
            precision,
            torch.device("cpu"),
            {},
            StopRequest(),
        ),
        head_is_fitted=False,
        head_is_frozen=False,
        input_hashes={},
    )


def _no_images() -> Images:
    raise AssertionError("a benchmark has no test data")


@contextmanager
def federation(experiment: Experiment, overrides: Sequence[str]) -> Iterator[FederatedLoop]:
    """Rounds by the config of fedavg_iid with `overrides`: constant lr, nothing evaluated."""
    assert experiment.partition is not None
    config = compose(
        "fedavg_iid",
        [
            f"federated.clients={len(experiment.partition)}",
            f"federated.rounds={ENDLESS}",
            f"evaluate.every={ENDLESS - 1}",
            f"checkpoint.every={ENDLESS - 1}",
            "train.schedule.name=constant",
            "train.schedule.warmup=0",
            *overrides,
        ],
    )
    stop = StopRequest()
    host = experiment_host(config, experiment, stop, row_of(config, "engine"))
    clients = LocalClients(host, experiment.partition.sizes.tolist())
    with (
        tempfile.TemporaryDirectory() as name,
        open_tracker("none", Path(name), project="", mode="offline", config={}) as tracker,
    ):
        folder = RunFolder(Path(name))
        journals = Journals(folder, Checkpoints(folder.checkpoints))
        evaluator = Evaluator(experiment.model, experiment, batch_size=256, stop=stop)
        loop = Loop(
            settings.loop(config),
            evaluator,
            journals,
            tracker,
            total=ENDLESS,
            began=time.monotonic(),
        )
        engine = clients.engine("rounds")
        federated = settings.federated(config, experiment.precision)
        try:
            yield FederatedLoop(federated, experiment, clients, engine, loop, stop, folder)
        finally:
            engine.close()


def rounds(federated: FederatedLoop, each: int = 1) -> Callable[[], int]:
    """A function that runs and records `each` rounds, and returns how many they were."""
    numbers = count(1)

    def work() -> int:
        for _ in range(each):
            record, timings = federated.run_round(next(numbers), lambda: None)
            federated.loop.finish_unit(federated, record, timings)
        return each

    return work
