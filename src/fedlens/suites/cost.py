"""What a run costs, from its config alone: images to train on, to evaluate, to take features of.

seconds ≈ Σ over tasks of images × seconds per image; what runs share (pretraining, features, masks)
is counted with the first of them. The estimate is one: early stops and what lies in the cache
already make it less. No torch.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fedlens.config.schema import Config, cohort_size, rounds, trained_part

SIZES = {"cifar100": (100, 500, 100), "synthetic": (100, 200, 50)}  # classes, images of each
PRETRAINING = 34_200  # images vit_pico is pretrained on, once
PRETRAINED = "pretraining"  # the key of that shared work

# Seconds per image in units of a forward pass: a backward pass costs two, squares per example more.
NOMINAL = {"pretrain": 3.0, "train": 3.0, "evaluate": 1.0, "calibrate": 6.0, "head": 0.001}
OVERHEAD = 1.0  # seconds of a run for all else: opening data and weights, writing records


@dataclass(frozen=True)
class Shared:
    """Work that is done by whoever comes first; `key` says what it depends on."""

    key: str
    task: str
    images: int


@dataclass(frozen=True)
class Work:
    images: Mapping[str, int]  # task → images of this run alone
    shared: tuple[Shared, ...] = ()


def counted_once(works: Iterable[Work], *, done: Iterable[str] = ()) -> list[dict[str, int]]:
    """Task → images for each work in turn, shared parts with the first that has them.

    What is `done` already is counted with none.
    """
    seen = set(done)
    found = []
    for work in works:
        images = dict(work.images)
        for part in work.shared:
            if part.key not in seen:
                seen.add(part.key)
                images[part.task] = images.get(part.task, 0) + part.images
        found.append(images)
    return found


def weigh(images: Mapping[str, int], per_image: Mapping[str, float] = NOMINAL) -> float:
    return math.fsum(count * per_image[task] for task, count in images.items() if count)


def work_of(config: Config) -> Work:
    sizes = _Sizes.of(config)
    total = units(config)
    trained = total * (_round_images if config.federated.clients else _epoch_images)(config, sizes)
    looks = _evaluations(config, total)
    evaluated = looks * sizes.held_out + sizes.test
    if config.evaluate.test_curve:
        evaluated += looks * sizes.test
    on_features = _on_features(config)
    images = {"head": trained + evaluated} if on_features else {
        "train": trained,
        "evaluate": evaluated,
    }  # fmt: skip
    if config.head.name == "trained":
        images["head"] = images.get("head", 0) + _head_images(config)
    return Work(images, tuple(_shared(config, sizes, on_features)))


def units(config: Config) -> int:
    """Epochs or rounds of training; none where nothing is left to train."""
    if trained_part(config.train.what)[0] == "head" and config.head.freeze:
        return 0
    return rounds(config) if config.federated.clients else config.train.epochs


def kind(config: Config) -> tuple[Any, ...]:
    """All that a task's seconds per image depend on: runs of one kind need one probe of it."""
    train, backbone = config.train, config.backbone
    speed = (backbone.name, backbone.resolution, config.evaluate.batch_size, train.precision,
             config.device)  # fmt: skip
    if _on_features(config):
        return speed
    return (*speed, train.what, backbone.freeze_blocks, train.batch_size, train.micro_batch,
            config.sparse.density, tuple(asdict(config.augment).values()))  # fmt: skip


@dataclass(frozen=True)
class _Sizes:
    kept: int
    held_out: int
    test: int

    @classmethod
    def of(cls, config: Config) -> "_Sizes":
        classes, train, test = SIZES[config.data.name]
        seen = classes * min(train, config.data.train_per_class or train)
        held_out = round(seen * config.data.validation)
        tested = classes * min(test, config.data.test_per_class or test)
        return cls(seen - held_out, held_out, tested if config.evaluate.test else 0)


def _on_features(config: Config) -> bool:
    """Whether the backbone is frozen and sees every image as it is: it then sees it once."""
    told = config.augment
    augments = told.crop_padding or told.flip or told.colour_jitter or told.randaugment
    return trained_part(config.train.what)[0] == "head" and not augments


def _evaluations(config: Config, total: int) -> int:
    """Every so many units and after the last; before the first a prepared head has its features."""
    every = config.evaluate.every
    begun = not total or (config.head.name != "linear" and _on_features(config))
    return total // every + (total % every > 0) + begun


def _epoch_images(config: Config, sizes: _Sizes) -> int:
    train = config.train
    return min(sizes.kept, (train.epoch_steps or sizes.kept) * train.batch_size)


def _round_images(config: Config, sizes: _Sizes) -> int:
    """Of all clients that answer, each with a shard of equal size."""
    told = config.federated
    assert told.clients is not None
    present = cohort_size(told) * (1 - told.dropout)
    steps = ((told.fewest_local_steps or told.local_steps) + told.local_steps) / 2
    return round(present * _client_images(sizes.kept // told.clients, steps, config))


def _client_images(shard: int, steps: float, config: Config) -> float:
    """Passes over the shard in batches, the last of which may be smaller."""
    size = config.train.batch_size
    one_pass = max(1, -(-shard // size))
    passes, rest = divmod(steps, one_pass)
    return passes * shard + min(rest * size, shard)


def _head_images(config: Config) -> int:
    told = config.federated
    cohort = cohort_size(told) if told.clients else 1
    return cohort * config.head.steps * config.train.batch_size


def _shared(config: Config, sizes: _Sizes, on_features: bool) -> Iterable[Shared]:
    """Pretraining, features and masks: everything else is a run's own."""
    backbone, data = asdict(config.backbone), asdict(config.data)
    seed = None if config.backbone.pretrained else config.seed  # decides random weights
    if (
        config.backbone.name == "vit_pico"
        and config.backbone.pretrained
        and not backbone["weights"]
    ):
        yield Shared(PRETRAINED, "pretrain", PRETRAINING)
    frozen = [backbone, data["name"], data["train_per_class"], data["test_per_class"], seed,
              config.train.precision]  # fmt: skip
    if on_features or config.head.name != "linear":
        yield Shared(_key("train features", *frozen), "evaluate", sizes.kept + sizes.held_out)
    if on_features and sizes.test:
        yield Shared(_key("test features", *frozen), "evaluate", sizes.test)
    sparse = config.sparse
    if sparse.density is not None and sparse.rule.endswith("_sensitive"):
        by_clients = sparse.source == "clients"
        holders = asdict(config.partition) if by_clients or config.head.name == "trained" else None
        key = _key("masks", backbone, data, asdict(sparse), asdict(config.head), config.seed,
                   config.train.what, holders)  # fmt: skip
        yield Shared(key, "calibrate", sparse.rounds * sparse.passes * _calibrating(config, sizes))


def _calibrating(config: Config, sizes: _Sizes) -> int:
    """Examples of one pass: of the validation split, or of all clients that calibrate."""
    sparse = config.sparse
    if sparse.source == "validation" or config.federated.clients is None:
        return min(sparse.examples or sizes.held_out, sizes.held_out)
    shard = sizes.kept // config.federated.clients
    return (sparse.clients or config.federated.clients) * min(sparse.examples or shard, shard)


def _key(*parts: object) -> str:
    return json.dumps(parts, sort_keys=True)
