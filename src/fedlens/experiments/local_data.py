"""Which data this process has: all of them, or the part of a federation's server or node."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fedlens.config.compose import row_of
from fedlens.config.schema import Config
from fedlens.data import shards
from fedlens.data.images import Dataset, Images
from fedlens.data.partition import Partition, partition
from fedlens.data.partition_statistics import LISTED, histogram, statistics
from fedlens.data.shards import NodeShard, ServerShard
from fedlens.data.splits import stratified
from fedlens.errors import FedlensError
from fedlens.registry import dataset as dataset_registry


@dataclass(frozen=True)
class LocalData:
    name: str
    classes: int
    dataset_digest: str  # of the whole dataset
    digest: str  # of the part that is here
    images: Images  # of the training split
    train_index: torch.Tensor  # positions in `images` that are trained on
    validation_index: torch.Tensor  # positions in `images` that are held out
    partition: Partition | None  # of the training examples over the clients; None: no clients
    class_counts: torch.Tensor  # [K, C]: how many examples of each class each client holds
    load_test: Callable[[], Images]


def whole(config: Config) -> LocalData:
    """All data, where one process simulates all clients."""
    data = dataset(config)
    images, train_index, validation_index = training_images(config, data)
    labels = images.labels[train_index]
    clients = partition_of(config, labels)
    classes = len(data.classes)
    return LocalData(
        name=data.name,
        classes=classes,
        dataset_digest=data.digest,
        digest=data.digest,
        images=images,
        train_index=train_index,
        validation_index=validation_index,
        partition=clients,
        class_counts=(
            torch.zeros(0, classes, dtype=torch.int64)
            if clients is None
            else histogram(clients, labels, classes)
        ),
        load_test=lambda: data.load_test().limited(config.data.test_per_class),
    )


def of_server(shard: ServerShard) -> LocalData:
    """What a server evaluates on; of the clients' data it has the counts of each class."""
    return LocalData(
        name=shard.dataset,
        classes=len(shard.classes),
        dataset_digest=shard.dataset_digest,
        digest=shard.digest,
        images=shard.validation,
        train_index=torch.arange(0),
        validation_index=torch.arange(len(shard.validation)),
        partition=shard.partition,
        class_counts=shard.class_counts,
        load_test=shard.load_test,
    )


def of_node(shard: NodeShard) -> LocalData:
    """Some clients' training images, and nothing to evaluate on."""

    def refuse() -> Images:
        raise FedlensError("A node has no test images: the server evaluates.")

    return LocalData(
        name=shard.dataset,
        classes=len(shard.classes),
        dataset_digest=shard.dataset_digest,
        digest=shard.digest,
        images=shard.images,
        train_index=torch.arange(len(shard.images)),
        validation_index=torch.arange(0),
        partition=shard.partition,
        class_counts=shard.class_counts,
        load_test=refuse,
    )


def partition_spec(config: Config) -> dict[str, Any]:
    """What decides which client holds which image: all parties of a federation must agree on it."""
    return {
        "seed": config.seed,
        "data": {k: v for k, v in asdict(config)["data"].items() if k != "root"},
        "partition": asdict(config)["partition"],
        "clients": config.federated.clients,
    }


def write_shards(
    config: Config, folder: Path, nodes: int, check: Callable[[], None] = lambda: None
) -> bool:
    """Writes the data of the server and of each node into `folder`; False if they were there."""
    data = dataset(config)
    images, train_index, validation_index = training_images(config, data)
    clients = partition_of(config, images.labels[train_index])
    if clients is None:
        raise FedlensError(f"{config.experiment} has no clients to split data for.")
    return shards.write(
        folder,
        dataset=data,
        images=images,
        train_index=train_index,
        validation_index=validation_index,
        test=data.load_test().limited(config.data.test_per_class),
        partition=clients,
        partition_spec=partition_spec(config),
        nodes=nodes,
        check=check,
    )


def dataset(config: Config) -> Dataset:
    row, root = row_of(config, "data"), config.data.root
    own = {one.name for one in row.parameters} - {one.name for one in dataset_registry.common}
    parameters = {name: config.data[name] for name in own}
    data = row.make(Path(root).expanduser() if root else None, **parameters)
    assert isinstance(data, Dataset)
    return data


def training_images(config: Config, data: Dataset) -> tuple[Images, torch.Tensor, torch.Tensor]:
    """The training images, and the positions of those trained on and of those held out."""
    images = data.load_train().limited(config.data.train_per_class)
    train_index, validation_index = stratified(images.labels, config.data.validation, config.seed)
    if config.data.validation and not len(validation_index):
        raise FedlensError(
            f"data.validation={config.data.validation} of {len(images)} images is none at all: "
            "choose a larger fraction."
        )
    return images, train_index, validation_index


def partition_of(config: Config, labels: torch.Tensor) -> Partition | None:
    """Who holds which of the training examples; None where there are no clients."""
    if config.federated.clients is None:
        return None
    return partition(
        labels.cpu(),
        clients=config.federated.clients,
        by=config.partition.name,
        seed=config.seed,
        **config.partition.parameters,
    )


def partition_record(config: Config, class_counts: torch.Tensor) -> dict[str, Any]:
    """A partition for the records: statistics, and counts by class where clients are not many."""
    listed = {"histogram": class_counts.tolist()} if len(class_counts) <= LISTED else {}
    return {**config.partition, "statistics": statistics(class_counts), **listed}
