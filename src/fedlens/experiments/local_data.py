"""Which data are at hand here: all of them, or what a federation's server or node holds."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fedlens.config.schema import Config, DataConfig, PartitionConfig
from fedlens.data import cifar100, shards, synthetic
from fedlens.data.images import Dataset, Images
from fedlens.data.partition import Partition, partition
from fedlens.data.partition_statistics import LISTED, histogram, statistics
from fedlens.data.shards import NodeShard, ServerShard
from fedlens.data.splits import stratified
from fedlens.errors import FedlensError


@dataclass(frozen=True)
class Holding:
    name: str
    classes: int
    of: str  # the whole dataset's digest
    digest: str  # of what is here
    images: Images  # of the training split
    kept: torch.Tensor  # those trained on, by their places
    held_out: torch.Tensor  # those validated on
    partition: Partition | None  # of `kept` over the clients, where there are any
    held: torch.Tensor  # [K, C]: how many examples of each class each client holds
    load_test: Callable[[], Images]


def whole(config: Config) -> Holding:
    """Everything, as where one process plays all clients."""
    data = dataset(config.data)
    images, kept, held_out = training_images(config, data)
    labels = images.labels[kept]
    shared = partition_of(config, labels)
    classes = len(data.classes)
    held = torch.zeros(0, classes, dtype=torch.int64)
    return Holding(
        name=data.name,
        classes=classes,
        of=data.digest,
        digest=data.digest,
        images=images,
        kept=kept,
        held_out=held_out,
        partition=shared,
        held=held if shared is None else histogram(shared, labels, classes),
        load_test=lambda: data.load_test().limited(config.data.test_per_class),
    )


def of_server(shard: ServerShard) -> Holding:
    """What a server evaluates on; of the clients' data it knows the counts of each class."""
    return Holding(
        name=shard.dataset,
        classes=len(shard.classes),
        of=shard.of,
        digest=shard.digest,
        images=shard.validation,
        kept=torch.arange(0),
        held_out=torch.arange(len(shard.validation)),
        partition=shard.partition,
        held=shard.held,
        load_test=shard.load_test,
    )


def of_node(shard: NodeShard) -> Holding:
    """Some clients' training images, and nothing to evaluate on."""

    def refuse() -> Images:
        raise FedlensError("A node has no test images: the server evaluates.")

    return Holding(
        name=shard.dataset,
        classes=len(shard.classes),
        of=shard.of,
        digest=shard.digest,
        images=shard.images,
        kept=torch.arange(len(shard.images)),
        held_out=torch.arange(0),
        partition=shard.partition,
        held=shard.held,
        load_test=refuse,
    )


def world(config: Config) -> dict[str, Any]:
    """What decides who holds which image: all parties of a federation must agree on it."""
    return {
        "seed": config.seed,
        "data": {k: v for k, v in asdict(config.data).items() if k != "root"},
        "partition": asdict(config.partition),
        "clients": config.federated.clients,
    }


def deal(
    config: Config, folder: Path, nodes: int, check: Callable[[], None] = lambda: None
) -> bool:
    """Writes what the server and each of the nodes hold into `folder`; False if it was there."""
    data = dataset(config.data)
    images, kept, held_out = training_images(config, data)
    shared = partition_of(config, images.labels[kept])
    if shared is None:
        raise FedlensError(f"{config.experiment} has no clients to deal data to.")
    return shards.write(
        folder,
        dataset=data,
        images=images,
        kept=kept,
        held_out=held_out,
        test=data.load_test().limited(config.data.test_per_class),
        partition=shared,
        world=world(config),
        nodes=nodes,
        check=check,
    )


def dataset(config: DataConfig) -> Dataset:
    if config.name == "synthetic":
        return synthetic.dataset()
    return cifar100.dataset(Path(config.root).expanduser() if config.root else None)


def training_images(config: Config, data: Dataset) -> tuple[Images, torch.Tensor, torch.Tensor]:
    """The training images, and which of them are trained on and which held out for validation."""
    images = data.load_train().limited(config.data.train_per_class)
    kept, held_out = stratified(images.labels, config.data.validation, config.seed)
    if config.data.validation and not len(held_out):
        raise FedlensError(
            f"data.validation={config.data.validation} of {len(images)} images is none at all: "
            "choose a larger fraction."
        )
    return images, kept, held_out


def partition_of(config: Config, labels: torch.Tensor) -> Partition | None:
    """Who holds which of the training examples; None where there are no clients."""
    if config.federated.clients is None:
        return None
    keys = asdict(config.partition)
    return partition(labels.cpu(), config.federated.clients, seed=config.seed, **keys)


def partition_record(config: Config) -> dict[str, Any]:
    """Who would hold what, without a model."""
    return described(config.partition, whole(config).held)


def described(config: PartitionConfig, held: torch.Tensor) -> dict[str, Any]:
    """A partition for the records: statistics, and counts by class where clients are not many."""
    few = {"histogram": held.tolist()} if len(held) <= LISTED else {}
    return {**asdict(config), "statistics": statistics(held), **few}
