"""The work of a run, from its config alone: how many images it trains on, evaluates and so on.

seconds ≈ Σ over tasks of images × seconds per image. Work that runs share (pretraining, features,
masks) counts with the first run that needs it; early stopping and the cache lower it. No torch.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from fedlens.config.schema import Config, cohort_size, head_only, rounds
from fedlens.registry import RowSettings, dataset, head, mask_rule

PRETRAINING_IMAGES = 34_200  # vit_pico is pretrained on them, once
PRETRAINING = "pretraining"  # the key of that shared work

# Seconds per image in units of a forward pass: a backward pass costs two, squares per example more.
RELATIVE_COST = {"pretrain": 3.0, "train": 3.0, "evaluate": 1.0, "calibrate": 6.0, "head": 0.001}
UNKNOWN_SIZES = {"classes": 100, "train_images": 50_000, "test_images": 10_000}  # as CIFAR-100
NO_SPEED = ("pretrained", "weights", "sha256", "freeze_blocks")  # of a backbone's parameters
OVERHEAD_S = 1.0  # of a run, for everything else: opening data and weights, writing records


@dataclass(frozen=True)
class SharedWork:
    """Work that the first run does for all; `key` identifies what it depends on."""

    key: str
    task: str
    images: int


@dataclass(frozen=True)
class Work:
    images: Mapping[str, int]  # task → images, of this run alone
    shared: tuple[SharedWork, ...] = ()


def count_shared_once(works: Iterable[Work], *, done: Iterable[str] = ()) -> list[dict[str, int]]:
    """Task → images for each work in turn; shared work counts with the first that needs it.

    Shared work whose key is in `done` counts with none.
    """
    seen = set(done)
    counts = []
    for work in works:
        images = dict(work.images)
        for part in work.shared:
            if part.key not in seen:
                seen.add(part.key)
                images[part.task] = images.get(part.task, 0) + part.images
        counts.append(images)
    return counts


def total_cost(images: Mapping[str, int], per_image: Mapping[str, float] = RELATIVE_COST) -> float:
    return math.fsum(count * per_image[task] for task, count in images.items() if count)


def work_of(config: Config) -> Work:
    sizes = _Sizes.of(config)
    total = units(config)
    trained = total * (_round_images if config.federated.clients else _epoch_images)(config, sizes)
    evaluations = _evaluations(config, total)
    evaluated = evaluations * sizes.validation + sizes.test
    if config.evaluate.test_curve:
        evaluated += evaluations * sizes.test
    on_features = _on_features(config)
    images = {"head": trained + evaluated} if on_features else {
        "train": trained,
        "evaluate": evaluated,
    }  # fmt: skip
    if head[config.head.name].traits.get("by") == "training":
        images["head"] = images.get("head", 0) + _head_images(config)
    return Work(images, tuple(_shared(config, sizes, on_features)))


def units(config: Config) -> int:
    """Epochs or rounds of training; 0 where no parameter is trained."""
    if head_only(config) and config.head.freeze:
        return 0
    return rounds(config) if config.federated.clients else config.train.epochs


def steps_per_epoch(config: Config) -> int:
    """Steps of an epoch of central training."""
    whole = -(-_Sizes.of(config).train // config.train.batch_size)
    return min(whole, config.train.steps_per_epoch or whole)


def speed_key(config: Config) -> tuple[Any, ...]:
    """Everything a task's seconds per image depend on: configs with one key need one probe."""
    train, backbone = config.train, config.backbone
    chosen = {name: value for name, value in backbone.items() if name not in NO_SPEED}
    key = (json.dumps(chosen), config.evaluate.batch_size, train.precision,
           config.device)  # fmt: skip
    if _on_features(config):
        return key
    return (*key, *train.trainable.items(), backbone.freeze_blocks, train.batch_size,
            train.micro_batch, train.optimizer.name, config.sparse.density,
            tuple(asdict(config.augment).values()))  # fmt: skip


def dataset_sizes(data: RowSettings) -> dict[str, int]:
    """classes, train_images and test_images, as the dataset's row states or counts them.

    A row states them by traits of these names, or names a function in its trait `sizes` that finds
    them by the row's settings.
    """
    traits = dict(dataset[data.name].traits)
    if "sizes" in traits:
        module, _, name = traits["sizes"].partition(":")
        if (found := getattr(import_module(module), name)(data)) is not None:
            traits |= dict(zip(UNKNOWN_SIZES, found, strict=True))
    return {key: int(traits.get(key, value)) for key, value in UNKNOWN_SIZES.items()}


@dataclass(frozen=True)
class _Sizes:
    """Images of each split."""

    train: int
    validation: int
    test: int

    @classmethod
    def of(cls, config: Config) -> "_Sizes":
        data, images = config.data, dataset_sizes(config.data)
        classes = images["classes"]
        train, test = images["train_images"] // classes, images["test_images"] // classes
        seen = classes * min(train, data.train_per_class or train)
        validation = round(seen * data.validation)
        tested = classes * min(test, data.test_per_class or test)
        return cls(seen - validation, validation, tested if config.evaluate.test else 0)


def _on_features(config: Config) -> bool:
    """Whether the backbone is frozen and no image is augmented: it then sees each image once."""
    augment = config.augment
    augments = augment.crop_padding or augment.flip or augment.colour_jitter or augment.randaugment
    return head_only(config) and not augments


def _evaluations(config: Config, total: int) -> int:
    """After every `evaluate.every` units and the last; a fitted head on features also before."""
    every = config.evaluate.every
    before = not total or (_is_fitted(config) and _on_features(config))
    return total // every + (total % every > 0) + before


def _is_fitted(config: Config) -> bool:
    return bool(head[config.head.name].traits.get("fitted", True))


def _epoch_images(config: Config, sizes: _Sizes) -> int:
    train = config.train
    return min(sizes.train, (train.steps_per_epoch or sizes.train) * train.batch_size)


def _round_images(config: Config, sizes: _Sizes) -> int:
    """Of all clients that answer, each with a shard of the same size."""
    federated = config.federated
    assert federated.clients is not None
    present = cohort_size(federated) * (1 - federated.dropout)
    steps = ((federated.min_local_steps or federated.local_steps) + federated.local_steps) / 2
    return round(present * _client_images(sizes.train // federated.clients, steps, config))


def _client_images(shard: int, steps: float, config: Config) -> float:
    """Passes over the shard in batches, the last of which may be smaller."""
    size = config.train.batch_size
    one_pass = max(1, -(-shard // size))
    passes, rest = divmod(steps, one_pass)
    return passes * shard + min(rest * size, shard)


def _head_images(config: Config) -> int:
    cohort = cohort_size(config.federated) if config.federated.clients else 1
    return cohort * int(config.head.steps) * config.train.batch_size


def _shared(config: Config, sizes: _Sizes, on_features: bool) -> Iterable[SharedWork]:
    """Pretraining, features and masks; all other work is a run's own."""
    backbone, data = config.backbone, config.data
    seed = None if backbone.pretrained else config.seed  # random weights depend on it
    if backbone.name == "vit_pico" and backbone.pretrained and not backbone.weights:
        yield SharedWork(PRETRAINING, "pretrain", PRETRAINING_IMAGES)
    frozen = [backbone, dataset.spelled(data), data.root, data.train_per_class,
              data.test_per_class, seed, config.train.precision]  # fmt: skip
    if on_features or _is_fitted(config):
        images = sizes.train + sizes.validation
        yield SharedWork(_key("train features", *frozen), "evaluate", images)
    if on_features and sizes.test:
        yield SharedWork(_key("test features", *frozen), "evaluate", sizes.test)
    sparse = config.sparse
    if sparse.density is not None and mask_rule[sparse.rule.name].traits.get("sensitivity", True):
        trained_head = head[config.head.name].traits.get("by") == "training"
        by_client = sparse.source == "clients" or trained_head
        key = _key("masks", backbone, data, asdict(sparse), config.head, config.seed,
                   config.train.trainable, config.partition if by_client else None)  # fmt: skip
        images = sparse.rounds * sparse.passes * _calibration_images(config, sizes)
        yield SharedWork(key, "calibrate", images)


def _calibration_images(config: Config, sizes: _Sizes) -> int:
    """Examples of one pass: of the validation split, or of all clients that calibrate."""
    sparse = config.sparse
    if sparse.source == "validation" or config.federated.clients is None:
        return min(sparse.examples or sizes.validation, sizes.validation)
    shard = sizes.train // config.federated.clients
    return (sparse.clients or config.federated.clients) * min(sparse.examples or shard, shard)


def _key(*parts: object) -> str:
    return json.dumps(parts, sort_keys=True)
