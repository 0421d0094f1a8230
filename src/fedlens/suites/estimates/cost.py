"""The work of a run, from its config alone: how many images it trains on, evaluates and so on.

seconds ≈ Σ over tasks of images × seconds per image; the task "visit" counts visits of clients, and
"solve" heads in closed form, whose sums XᵀX over images are the task "sums". Where activations of
frozen blocks are cached, "first_blocks" computes them and "evaluate_cached" begins after them. Work
that runs share (features, activations, sums, masks) counts with the first run that needs it; early
stopping and the cache lower it. No torch.
"""

import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple

from fedlens.analyses.grids import grid
from fedlens.config.schema import (
    CACHED_PASSES,
    Config,
    cohort_size,
    head_changes,
    head_only,
    rounds,
    visits,
)
from fedlens.registry import (
    RowSettings,
    aggregator,
    backbone,
    dataset,
    engine,
    head,
    mask_rule,
    merge_method,
    trainable,
)

# Seconds per image in units of a forward pass: a backward pass costs two, squares per example more.
# A visit of a client moves the weights, whatever the images. Sums and heads are those of `BLOCKS`.
RELATIVE_COST = {
    "train": 3.0,
    "evaluate": 1.0,
    "evaluate_cached": 0.5,
    "first_blocks": 0.5,
    "calibrate": 6.0,
    "visit": 3.0,
    "head": 0.001,
    "sums": 0.06,
    "solve": 1000.0,
}
BLOCKS = 12
EVALUATIONS = ("evaluate", "evaluate_cached", "first_blocks")  # with batches of one size
CLOSED_FORM = ("sums", "solve")  # on the CPU in float64, whatever the model is on
WITHOUT_PIXELS = ("visit", "head")
TRIED = {"l2": 9, "shrinkage": 6}  # values of a head's parameter, where it is chosen on validation
UNKNOWN_SIZES = {"classes": 100, "train_images": 50_000, "test_images": 10_000}  # as CIFAR-100
NO_SPEED = ("pretrained", "weights", "sha256", "freeze_blocks")  # of a backbone's parameters
HEAD_S = 2e-6  # of an image of a head on cached features: negligible
SUMS_WIDTH = 2304  # features of which sums are timed: their XᵀX is larger than most caches
VISIT_STEPS = 2  # a visit costs what so many training steps cost besides their images
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


@dataclass(frozen=True)
class Count:
    """The arithmetic of a task, and the size of its model."""

    flops: float  # per image
    peak: int  # bytes alive at the peak besides the parameters, at the task's batch size
    parameters: int  # of the whole model
    trained: int  # parameters with gradients
    masked: int  # parameters that a mask would cover
    features: int  # length of a feature vector


def count_shared_once(works: Iterable[Work]) -> list[dict[str, int]]:
    """Task → images for each work in turn; shared work counts with the first that needs it."""
    seen: set[str] = set()
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
    sizes = Sizes.of(config)
    total, again = units(config), _heads_again(config, sizes)
    trained = total * (_round_images if config.federated.clients else _epoch_images)(config, sizes)
    if config.algorithm.measure_controls and config.federated.clients and total:
        shard = sizes.train // config.federated.clients
        trained += config.federated.clients * round(_client_images(shard, 1, config))
    evaluations = _evaluations(config, total)
    evaluated = evaluations * sizes.validation + sizes.test
    if config.evaluate.test_curve:
        evaluated += evaluations * sizes.test
    evaluated += again.images + again.last_images
    frozen = on_features(config)
    images = {"head": trained + evaluated}
    if not frozen:
        images = {"train": trained, evaluation_task(config): evaluated}
    if config.federated.clients and not frozen:
        images["visit"] = round(total * _visits(config))
    if head[config.head.name].traits.get("by") == "training":
        images["head"] = images.get("head", 0) + _head_images(config)
    for work in (work_at_the_start(config), again.work, again.last_work):
        images |= {task: images.get(task, 0) + count for task, count in work.items() if count}
    return Work(images, tuple(_shared(config, sizes, frozen)))


def work_at_the_start(config: Config) -> dict[str, int]:
    """Task → images, or heads, of the first head in closed form, before all epochs or rounds."""
    if not is_solved(config):
        return {}
    own = {"sums": Sizes.of(config).train} if _is_remote(config) else {}
    return {**own, "solve": round(_read_share(config) ** 3)}


def work_at_the_end(config: Config) -> dict[str, int]:
    """Task → images of the last head and the final test, after all epochs or rounds, if any."""
    sizes = Sizes.of(config)
    if not units(config):
        return {}
    again = _heads_again(config, sizes)
    return {evaluation_task(config): again.last_images + sizes.test, **again.last_work}


def analysis_work(command: str, config: Config) -> Mapping[str, int]:
    """Task → images of a `fedlens arithmetic` command for the finished run of a config.

    Every candidate model meets the validation images, and the chosen one the test images. A head in
    closed form is solved again from sums that the run has kept.
    """
    name, *words = shlex.split(command)
    sizes = Sizes.of(config)
    task = "head" if on_features(config) else "evaluate"
    images = _candidates(name, words) * sizes.validation + dataset_sizes(config.data)["test_images"]
    if name == "interference":  # no test, and validation images of the classes of two clients
        share = 2 * min(1.0, _share_of_classes(config))
        images = round(_candidates(name, words) * share * sizes.validation)
    work = {task: images}
    if solved := work_at_the_start(config).get("solve"):
        work["solve"] = solved
    if name == "merge" and task == "evaluate" and config.federated.clients:
        shard = sizes.train // config.federated.clients
        examples = min(config.algorithm.statistics_examples or shard, shard)
        needs = {merge_method[one].traits.get("needs") for one in _methods(words)} - {None}
        work["calibrate"] = len(needs) * cohort_size(config.federated) * examples
    return work


def _candidates(name: str, words: Sequence[str]) -> int:
    """How many models an analysis evaluates."""
    if name == "clients":
        return 2
    if name == "forget":
        return len({0.0, *grid(_option(words, "--scales", "0:3:0.25"))})
    if name == "merge":
        return len(_methods(words)) * len(grid(_option(words, "--scales", "0.1,0.3,1,2")))
    if name == "interference":
        alphas = grid(_option(words, "--alphas", "0,0.5,1,1.5,2"))
        return len(alphas) ** 2 + (0 if 0.0 in alphas else 2 * len(alphas)) + 3
    return len(grid(_option(words, "--alphas", "0:2:0.1")))


def _methods(words: Sequence[str]) -> list[str]:
    named = [after for word, after in pairwise(words) if word == "--method"]
    return named or list(merge_method.names)


def _option(words: Sequence[str], option: str, default: str) -> str:
    """Its value in `--option value` or `--option=value`."""
    values = [after for word, after in pairwise(words) if word == option]
    values += [word.partition("=")[2] for word in words if word.startswith(f"{option}=")]
    return values[-1] if values else default


def _share_of_classes(config: Config) -> float:
    """Of one client, where the partition gives each a few; else all of them."""
    held = config.partition.get("classes_per_client")
    return 1.0 if held is None else held / dataset_sizes(config.data)["classes"]


def units(config: Config) -> int:
    """Epochs or rounds of training; 0 where no parameter is trained."""
    if head_only(config) and config.head.freeze:
        return 0
    return rounds(config) if config.federated.clients else config.train.epochs


def steps_per_epoch(config: Config) -> int:
    """Steps of an epoch of central training."""
    whole = -(-Sizes.of(config).train // config.train.batch_size)
    return min(whole, config.train.steps_per_epoch or whole)


def batch_of(config: Config, task: str) -> int:
    """Images that are in one forward pass of the task, or in the sums of one client."""
    if task == "sums":
        return max(1, Sizes.of(config).train // (config.federated.clients or 1))
    if task == "train":
        return min(config.train.batch_size, config.train.micro_batch or config.train.batch_size)
    return config.evaluate.batch_size if task in EVALUATIONS else config.sparse.micro_batch


def count_key(config: Config, task: str) -> str:
    """Everything the arithmetic of a task depends on: configs with one key have one count."""
    train, head_, sparse = config.train, config.head, config.sparse
    kinds = [sparse.biases, sparse.norms, sparse.embeddings]
    return _key(task, _architecture(config), config.backbone.freeze_blocks, train.trainable,
                head_.freeze, kinds, dataset_sizes(config.data)["classes"],
                batch_of(config, task), skips_blocks(config))  # fmt: skip


def speed_key(config: Config, task: str) -> str:
    """Everything a task's seconds per image depend on: configs with one key are timed once."""
    if task == "head":
        return _key(task)
    if task in CLOSED_FORM:
        return _key(task, _architecture(config), dataset_sizes(config.data)["classes"],
                    batch_of(config, "sums"), factorisations(config))  # fmt: skip
    train, sparse = config.train, config.sparse
    added = task not in EVALUATIONS or not trainable[train.trainable.name].traits.get(
        "whole_weights", True
    )
    key = [task, _architecture(config), train.trainable if added else None, train.precision,
           config.device, config.onednn, batch_of(config, task)]  # fmt: skip
    if task == "train":
        key += [config.backbone.freeze_blocks, config.head.freeze, train.batch_size,
                train.optimizer.name, sparse.density is not None,
                asdict(config.augment), skips_blocks(config)]  # fmt: skip
    if task == "evaluate_cached":
        key += [config.backbone.freeze_blocks]
    if task == "calibrate":
        key += [config.backbone.freeze_blocks, sparse.labels, sparse.target]
    return _key(*key)


def relative_cost(config: Config, task: str) -> float:
    """A rough cost of one image: forward passes × pixels, before anything is timed or counted.

    Sums grow with the square of the features, so of the blocks that a head reads, and a solution
    with their cube.
    """
    if task in CLOSED_FORM:
        share: float = (1 + config.head.layers) / (1 + BLOCKS)
        return RELATIVE_COST[task] * (share**2 if task == "sums" else share**3)
    pixels = 1.0
    if task not in WITHOUT_PIXELS:
        own = backbone[config.backbone.name].traits.get("resolution")
        pixels = ((config.backbone.resolution or own or 224) / 224) ** 2
    return RELATIVE_COST[task] * pixels


def _architecture(config: Config) -> dict[str, Any]:
    """The backbone's settings that its speed depends on, and what the head reads of it."""
    own = {name: value for name, value in config.backbone.items() if name not in NO_SPEED}
    return {**own, "reading": _reading(config)}


def _reading(config: Config) -> list[Any]:
    return [config.head.layers, config.head.tokens, config.head.random_features]


def _cached_reading(config: Config) -> list[Any]:
    """What the cached features of a run are of; those of many layers contain those of fewer."""
    layers, tokens, random = _reading(config)
    return [layers and tokens, random] if random is None else [layers, tokens, random]


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
class Sizes:
    """Images of each split."""

    train: int
    validation: int
    test: int

    @classmethod
    def of(cls, config: Config) -> "Sizes":
        data, images = config.data, dataset_sizes(config.data)
        classes = images["classes"]
        train, test = images["train_images"] // classes, images["test_images"] // classes
        seen = classes * min(train, data.train_per_class or train)
        validation = round(seen * data.validation)
        tested = classes * min(test, data.test_per_class or test)
        return cls(seen - validation, validation, tested if config.evaluate.test else 0)


def on_features(config: Config) -> bool:
    """Whether the backbone is frozen and no image is augmented: it then sees each image once."""
    return head_only(config) and not _augments(config)


def skips_blocks(config: Config) -> bool:
    """Whether activations of the frozen first blocks are cached, so that training begins there.

    As far as `backbone.freeze_blocks` tells: on some machines it would change the last bits of
    batches, a disk may be too small, and `last_blocks` freezes the first ones too.
    """
    train, federated = config.train, config.federated
    if (
        not config.backbone.freeze_blocks
        or head_only(config)
        or _augments(config)
        or not train.prefix_cache_gb
        or train.compile
        or _is_remote(config)
        or aggregator[config.algorithm.aggregator.name].traits.get("needs")
    ):
        return False
    sizes, total = Sizes.of(config), units(config)
    steps = visits(config) * federated.local_steps if federated.clients else steps_per_epoch(config)
    looks = total // config.evaluate.every + total // (federated.refit_head or total + 1)
    seen = total * steps * train.batch_size + looks * sizes.validation
    return seen >= CACHED_PASSES * (sizes.train + sizes.validation)


def evaluation_task(config: Config) -> str:
    """The task of images that the model is evaluated on."""
    if on_features(config):
        return "head"
    return "evaluate_cached" if skips_blocks(config) else "evaluate"


def _augments(config: Config) -> bool:
    augment = config.augment
    return bool(
        augment.crop_padding or augment.flip or augment.colour_jitter or augment.randaugment
    )


def _evaluations(config: Config, total: int) -> int:
    """After every `evaluate.every` units and the last; a fitted head on features also before."""
    every = config.evaluate.every
    before = not total or (is_fitted(config) and on_features(config))
    return total // every + (total % every > 0) + before


def is_fitted(config: Config) -> bool:
    return bool(head[config.head.name].traits.get("fitted", True))


def is_solved(config: Config) -> bool:
    """Whether the head is in closed form, from sums over all features."""
    by = head[config.head.name].traits.get("by", "statistics")
    return is_fitted(config) and by == "statistics"


def factorisations(config: Config) -> int:
    """Of the matrix of sums, for one head: as many as values of its parameter are tried."""
    for name, tried in TRIED.items():
        if name in config.head:
            return tried if config.head[name] is None else 1
    return 0


def _is_remote(config: Config) -> bool:
    """Whether clients are on other hosts: no sums or activations of theirs are cached here."""
    return bool(engine[config.engine.name].traits.get("remote", False))


def _read_share(config: Config) -> float:
    """Of its features, how many the head reads while the backbone is trained.

    A head that reads a share of them counts as its square in sums, and as its cube in solutions.
    """
    fewer = config.head.train_layers
    return 1.0 if fewer is None else (1 + fewer) / (1 + config.head.layers)


class _Again(NamedTuple):
    """Heads that are solved again: in between, from a part of the images, and after the last round.

    `images` are those that the model sees for them; `work` is what their solutions add to that.
    """

    images: int
    work: Mapping[str, int]
    last_images: int
    last_work: Mapping[str, int]


def _heads_again(config: Config, sizes: Sizes) -> _Again:
    federated, total = config.federated, units(config)
    if not federated.clients or not head_changes(config) or not total:
        return _Again(0, {}, 0, {})
    every, share = federated.refit_head or total + 1, _read_share(config)
    last = config.head.train_layers is not None or total % every == 0
    between = (total - last) // every
    shard = sizes.train // federated.clients
    part = federated.clients * min(federated.refit_examples or shard, shard)
    work = {"sums": round(between * part * share**2), "solve": round(between * share**3)}
    return _Again(
        between * (part + sizes.validation),
        work,
        last * (sizes.train + sizes.validation),
        {"sums": last * sizes.train, "solve": int(last)},
    )


def _epoch_images(config: Config, sizes: Sizes) -> int:
    train = config.train
    return min(sizes.train, (train.steps_per_epoch or sizes.train) * train.batch_size)


def _round_images(config: Config, sizes: Sizes) -> int:
    """Of all clients that answer, each with a shard of the same size."""
    federated = config.federated
    assert federated.clients is not None
    steps = ((federated.min_local_steps or federated.local_steps) + federated.local_steps) / 2
    return round(_visits(config) * _client_images(sizes.train // federated.clients, steps, config))


def _visits(config: Config) -> float:
    """Clients that answer in a round."""
    return visits(config) * (1 - config.federated.dropout)


def _client_images(shard: int, steps: float, config: Config) -> float:
    """Passes over the shard in batches, the last of which may be smaller."""
    size = config.train.batch_size
    one_pass = max(1, -(-shard // size))
    passes, rest = divmod(steps, one_pass)
    return passes * shard + min(rest * size, shard)


def _head_images(config: Config) -> int:
    cohort = cohort_size(config.federated) if config.federated.clients else 1
    return cohort * int(config.head.steps) * config.train.batch_size


def _shared(config: Config, sizes: "Sizes", features: bool) -> Iterable[SharedWork]:
    """Features, their sums and masks; all other work is a run's own."""
    model, data = config.backbone, config.data
    seed = None if model.pretrained else config.seed  # random weights depend on it
    depends_on = [
        model.but(freeze_blocks=0), dataset.spelled(data), data.root, data.train_per_class,
        data.test_per_class, seed, config.train.precision,
    ]  # fmt: skip
    cached = [*depends_on, _cached_reading(config)]
    if features or is_fitted(config):
        images = sizes.train + sizes.validation
        yield SharedWork(_key("train features", *cached), "evaluate", images)
    if features and sizes.test:
        yield SharedWork(_key("test features", *cached), "evaluate", sizes.test)
    if skips_blocks(config):
        before = [*cached, model.freeze_blocks]
        images = sizes.train + sizes.validation
        yield SharedWork(_key("train activations", *before), "first_blocks", images)
        yield SharedWork(_key("test activations", *before), "first_blocks", sizes.test)
    if is_solved(config) and not _is_remote(config):
        # The seed draws the validation split and the shards; the order of adding up is the shards'.
        clients = config.federated.clients
        shards = [clients, config.partition] if clients else None
        key = _key("sums", *depends_on, _reading(config), config.seed, data.validation, shards)
        yield SharedWork(key, "sums", sizes.train)
    sparse = config.sparse
    if sparse.density is not None and mask_rule[sparse.rule.name].traits.get("sensitivity", True):
        trained_head = head[config.head.name].traits.get("by") == "training"
        by_client = sparse.source == "clients" or trained_head
        key = _key("masks", model, data, asdict(sparse), config.head, config.seed,
                   config.train.trainable, config.partition if by_client else None)  # fmt: skip
        images = sparse.rounds * sparse.passes * _calibration_images(config, sizes)
        yield SharedWork(key, "calibrate", images)


def _calibration_images(config: Config, sizes: Sizes) -> int:
    """Examples of one pass: of the validation split, or of all clients that calibrate."""
    sparse = config.sparse
    if sparse.source == "validation" or config.federated.clients is None:
        return min(sparse.examples or sizes.validation, sizes.validation)
    shard = sizes.train // config.federated.clients
    return (sparse.clients or config.federated.clients) * min(sparse.examples or shard, shard)


def _key(*parts: object) -> str:
    return json.dumps(parts, sort_keys=True)
