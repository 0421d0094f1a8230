"""Which data this process has: all of them, or the part of a federation's server or node."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedlens.config.compose import row_of
from fedlens.config.schema import Config
from fedlens.data.images import Dataset, Images
from fedlens.data.partitions import shards
from fedlens.data.partitions.assignments import Samples
from fedlens.data.partitions.partition import Partition, assigned, grouped, partition
from fedlens.data.partitions.partition_statistics import LISTED, histogram, statistics
from fedlens.data.partitions.shards import NodeShard, ServerShard
from fedlens.data.sources.image_dataset import RESOLUTION
from fedlens.data.splits import stratified
from fedlens.errors import FedlensError
from fedlens.models.architectures import backbones
from fedlens.paths import expanded
from fedlens.registry import RowSettings
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
    partition_digest: str | None = None  # of a partition that is given, not drawn by a seed


def whole(config: Config) -> LocalData:
    """All data, where one process simulates all clients."""
    data = dataset(config)
    images, train_index, validation_index, clients = training_images(config, data)
    labels = images.labels[train_index]
    classes = len(data.classes)
    digest = None
    if clients is not None and _assigned(config):
        digest = shards.partition_digest(clients, train_index, validation_index)
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
        load_test=lambda: _test_images(config, data),
        partition_digest=digest,
    )


def of_server(config: Config, shard: ServerShard) -> LocalData:
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
        partition_digest=shard.partition_digest if _assigned(config) else None,
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
    data = row_of(config, "data").portable(config.data)
    return {
        "seed": config.seed,
        "data": {name: value for name, value in data.items() if name != "root"},
        "partition": row_of(config, "partition").portable(config.partition),
        "clients": config.federated.clients,
    }


def write_shards(
    config: Config, folder: Path, nodes: int, check: Callable[[], None] = lambda: None
) -> bool:
    """Writes the data of the server and of each node into `folder`; False if they were there."""
    data = dataset(config)
    images, train_index, validation_index, clients = training_images(config, data)
    if clients is None:
        raise FedlensError(f"{config.experiment} has no clients to split data for.")
    return shards.write(
        folder,
        dataset=data,
        images=images,
        train_index=train_index,
        validation_index=validation_index,
        test=_test_images(config, data),
        partition=clients,
        partition_spec=partition_spec(config),
        nodes=nodes,
        check=check,
    )


def dataset(config: Config) -> Dataset:
    settings = config.backbone
    resolution = settings.resolution or backbones.find(settings).resolution
    return open_dataset(config.data, resolution or RESOLUTION)


def open_dataset(settings: RowSettings, resolution: int = RESOLUTION) -> Dataset:
    """The dataset that a config's `data` chooses; `resolution` is that of a backbone's inputs."""
    row, root = dataset_registry[settings.name], settings.root
    own = {one.name for one in row.parameters} - {one.name for one in dataset_registry.common}
    arguments: list[Any] = [expanded(root) if root else None]
    if row.traits.get("resolution"):
        arguments.append(resolution)
    data = row.make(*arguments, **{name: settings[name] for name in own})
    assert isinstance(data, Dataset)
    return data


def training_images(
    config: Config, data: Dataset
) -> tuple[Images, torch.Tensor, torch.Tensor, Partition | None]:
    """The training images, the positions of those trained on and held out, and who holds them."""
    everything = _with_valid_labels(data, data.load_train())
    images = everything.limited(config.data.train_per_class)
    train_index, validation_index = stratified(images.labels, config.data.validation, config.seed)
    if config.data.validation and not len(validation_index):
        raise FedlensError(
            f"data.validation={config.data.validation} of {len(images)} images rounds to no image: "
            "choose a larger fraction."
        )
    if not _assigned(config):
        clients = partition_of(config, images.labels[train_index])
        return images, train_index, validation_index, clients
    holder = _holders(config, everything)[everything.first(config.data.train_per_class)]
    train_index, validation_index = _with_an_image_each(holder, train_index, validation_index)
    return images, train_index, validation_index, grouped(holder[train_index])


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


def _assigned(config: Config) -> bool:
    """Whether the data or a file say who holds which image."""
    given = row_of(config, "partition").traits.get("assigned", False)
    return config.federated.clients is not None and bool(given)


def _holders(config: Config, images: Images) -> torch.Tensor:
    """The client of each training image, as the data or a file say."""
    samples = Samples(len(images), images.names, images.clients)
    holder = assigned(
        config.partition.name, samples, config.partition.parameters, config.federated.clients
    )
    left = holder[images.first(config.data.train_per_class)]
    counts = torch.bincount(left, minlength=int(holder.max()) + 1)
    if len(empty := (counts == 0).nonzero()):
        raise FedlensError(
            f"data.train_per_class={config.data.train_per_class} leaves client {int(empty[0])} "
            "without images: choose more images, or leave it out."
        )
    return holder


def _with_an_image_each(
    holder: torch.Tensor, train: torch.Tensor, validation: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A client whose images would all be held out keeps its first one."""
    kept = torch.bincount(holder[train], minlength=int(holder.max()) + 1)
    returned = []
    for position in validation.tolist():
        client = int(holder[position])
        if kept[client] == 0:
            kept[client] += 1
            returned.append(position)
    if not returned:
        return train, validation
    back = torch.tensor(returned)
    return torch.cat([train, back]).sort().values, validation[~torch.isin(validation, back)]


def _test_images(config: Config, data: Dataset) -> Images:
    return _with_valid_labels(data, data.load_test()).limited(config.data.test_per_class)


def _with_valid_labels(data: Dataset, images: Images) -> Images:
    """Refuses labels that are no class's number: they would fail somewhere within training."""
    if not len(images):
        raise FedlensError(f"{data.name} has a split without images: add some.")
    if len(images.labels) != len(images.pixels):
        raise FedlensError(
            f"{data.name} has {len(images.labels)} labels for {len(images.pixels)} images: give "
            "one for each."
        )
    low, high = int(images.labels.min()), int(images.labels.max())
    if low < 0 or high >= len(data.classes):
        raise FedlensError(
            f"{data.name} has the label {low if low < 0 else high}, and its {len(data.classes)} "
            f"classes are numbered from 0 to {len(data.classes) - 1}."
        )
    return images


def partition_record(config: Config, class_counts: torch.Tensor) -> dict[str, Any]:
    """A partition for the records: statistics, and counts by class where clients are not many."""
    listed = {"histogram": class_counts.tolist()} if len(class_counts) <= LISTED else {}
    portable = row_of(config, "partition").portable(config.partition)
    return {**portable, "statistics": statistics(class_counts), **listed}
