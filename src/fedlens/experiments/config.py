"""What an experiment can say, as dataclasses: the schema behind the YAML groups, and its checks.

Every key of every config is here; anything else is refused before anything loads. No torch.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import PurePath
from typing import Any, get_type_hints

from fedlens.errors import FedlensError, suggest
from fedlens.training.schedules import SHAPES, Schedule

DATASETS = ("cifar100", "synthetic")
HEADS = ("linear", "ridge", "class_means")
PRECISIONS = ("fp32", "amp")
TRACKERS = ("none", "tensorboard", "wandb")
DEVICES = ("auto", "cpu", "cuda", "mps")


@dataclass
class DataConfig:
    name: str = "cifar100"
    root: str | None = None  # folder that holds the files; else $FEDLENS_DATA, else the user cache
    validation: float = 0.1  # fraction of the training images, stratified
    train_per_class: int | None = None  # use only so many images of each class
    test_per_class: int | None = None


@dataclass
class AugmentConfig:
    crop_padding: int = 0
    flip: bool = False
    colour_jitter: float = 0.0
    randaugment: int = 0  # number of operations; 0 is off
    magnitude: int = 9


@dataclass
class BackboneConfig:
    name: str = "dino_vits16"
    resolution: int | None = None  # pixels; null: the backbone's own
    pretrained: bool = True
    weights: str | None = None  # a local file; else $FEDLENS_WEIGHTS, else cache or download
    sha256: str | None = None  # refuse a file with another hash
    freeze_blocks: int = 0  # first blocks and the embeddings


@dataclass
class HeadConfig:
    name: str = "linear"
    freeze: bool = False  # keep the head as initialised while the backbone trains
    dropout: float = 0.0
    ridge_lambda: float | None = None  # null: chosen on validation
    temperature: float | None = None  # scale of closed-form logits; null: fitted on validation


@dataclass
class TrainConfig:
    what: str = "full"  # head | full | last_blocks:N
    epochs: int = 10
    batch_size: int = 64
    micro_batch: int | None = None
    lr: float = 1e-3
    momentum: float = 0.9
    weight_decay: float = 0.0
    nesterov: bool = False
    schedule: Schedule = field(default_factory=Schedule)
    label_smoothing: float = 0.0
    clip_norm: float | None = None
    early_stopping: int | None = None  # evaluations without a better validation accuracy
    precision: str = "fp32"  # fp32 | amp
    compile: bool = False


@dataclass
class EvaluateConfig:
    every: int = 1  # epochs
    batch_size: int = 256
    select: str = "best"  # which parameters meet the test split: best on validation, or last
    test_curve: bool = False


@dataclass
class CheckpointConfig:
    every: int = 1  # epochs
    minutes: float = 10.0  # and within an epoch after so many minutes
    keep_best: int = 1
    keep_last: int = 2


@dataclass
class RunConfig:
    root: str = "runs"
    name: str | None = None  # null: made from the config


@dataclass
class TrackerConfig:
    name: str = "none"
    project: str = "fedlens"
    mode: str = "offline"  # wandb: online | offline


@dataclass
class Config:
    experiment: str = "centralized"
    seed: int = 0
    device: str = "auto"
    threads: int | None = None  # CPU threads; null: torch's own choice, then kept by the run
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    run: RunConfig = field(default_factory=RunConfig)


# Keys that say where and how to run, not what to learn: they do not make it another run.
CIRCUMSTANCES = ("device", "threads", "tracker", "run", "data.root", "checkpoint")


def keys(schema: type = Config, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the schema, groups included."""
    hints = get_type_hints(schema)
    for entry in fields(schema):
        yield prefix + entry.name
        if is_dataclass(kind := hints[entry.name]):
            assert isinstance(kind, type)
            yield from keys(kind, f"{prefix}{entry.name}.")


def essence(config: Config) -> dict[str, Any]:
    """The part of the config that decides the result."""
    kept = asdict(config)
    for key in CIRCUMSTANCES:
        *path, last = key.split(".")
        branch = kept
        for step in path:
            branch = branch[step]
        del branch[last]
    if config.backbone.weights:  # the same file may lie elsewhere; the manifest holds its hash
        kept["backbone"]["weights"] = PurePath(config.backbone.weights).name
    return kept


def run_name(config: Config) -> str:
    """What the run is, readable, and a short hash of what decides its result."""
    if config.run.name:
        return config.run.name
    text = json.dumps(essence(config), sort_keys=True)
    subset = "-subset" if config.data.train_per_class or config.data.test_per_class else ""
    resolution = f"-{config.backbone.resolution}px" if config.backbone.resolution else ""
    scratch = "" if config.backbone.pretrained else "-scratch"
    parts = [
        config.experiment,
        config.data.name + subset,
        config.backbone.name.replace(":", "-") + resolution + scratch,
        f"{config.head.name}-{config.train.what.replace(':', '')}",
        f"s{config.seed}",
        hashlib.sha256(text.encode()).hexdigest()[:8],
    ]
    return "_".join(parts)


def trained_part(what: str) -> tuple[str, int]:
    """('head' | 'full' | 'last_blocks', N) of `train.what`."""
    mode, _, count = what.partition(":")
    if (mode in ("head", "full") and not count) or (mode == "last_blocks" and count.isdigit()):
        return mode, int(count or 0)
    raise FedlensError(
        f"train.what={what} is not a mode: {suggest(what, ('head', 'full', 'last_blocks:N'))}"
    )


def validate(config: Config) -> None:
    """Refuses the impossible in one sentence that names the key."""
    for key, value, options in [
        ("data", config.data.name, DATASETS),
        ("head", config.head.name, HEADS),
        ("train.schedule.name", config.train.schedule.name, SHAPES),
        ("train.precision", config.train.precision, PRECISIONS),
        ("tracker", config.tracker.name, TRACKERS),
        ("tracker.mode", config.tracker.mode, ("online", "offline")),
        ("evaluate.select", config.evaluate.select, ("best", "last")),
        ("device", re.sub(r"^cuda:\d+$", "cuda", config.device), DEVICES),
    ]:
        if value not in options:
            raise FedlensError(f"{key}={value} is unknown: {suggest(value, options)}")
    mode, blocks = trained_part(config.train.what)
    data, train, head = config.data, config.train, config.head
    selects = config.evaluate.select == "best" or train.early_stopping is not None
    chooses = head.name != "linear" and (
        head.temperature is None or (head.name == "ridge" and head.ridge_lambda is None)
    )
    for fine, complaint in [
        (config.seed >= 0, f"seed={config.seed} must be 0 or more"),
        (config.threads is None or config.threads > 0, "threads must be at least 1"),
        (0 <= data.validation < 1, f"data.validation={data.validation} must lie in [0, 1)"),
        (
            data.validation > 0 or not selects,
            "data.validation=0 leaves nothing to select on: set evaluate.select=last and no "
            "train.early_stopping",
        ),
        (
            data.validation > 0 or not chooses,
            f"data.validation=0 leaves nothing to fit the {head.name} head's free numbers on: set "
            "head.temperature (and head.ridge_lambda)",
        ),
        (_positive(data.train_per_class), "data.train_per_class must be at least 1"),
        (_positive(data.test_per_class), "data.test_per_class must be at least 1"),
        (train.epochs >= 0, f"train.epochs={train.epochs} must be 0 or more"),
        (train.batch_size > 0, f"train.batch_size={train.batch_size} must be at least 1"),
        (_positive(train.micro_batch), "train.micro_batch must be at least 1"),
        (0 < train.lr < math.inf, f"train.lr={train.lr} must be positive and finite"),
        (0 <= train.momentum < 1, f"train.momentum={train.momentum} must lie in [0, 1)"),
        (train.weight_decay >= 0, f"train.weight_decay={train.weight_decay} must not be negative"),
        (not train.nesterov or train.momentum > 0, "train.nesterov=true needs train.momentum > 0"),
        (0 <= train.label_smoothing < 1, "train.label_smoothing must lie in [0, 1)"),
        (_positive(train.clip_norm), "train.clip_norm must be positive"),
        (_positive(train.early_stopping), "train.early_stopping must be at least 1"),
        (
            0 <= train.schedule.warmup < 1,
            "train.schedule.warmup is a fraction of the steps below 1",
        ),
        (0 <= train.schedule.floor <= 1, "train.schedule.floor must lie in [0, 1]"),
        (0 < train.schedule.gamma <= 1, "train.schedule.gamma must lie in (0, 1]"),
        (train.schedule.stages > 0, "train.schedule.stages must be at least 1"),
        (0 <= head.dropout < 1, f"head.dropout={head.dropout} must lie in [0, 1)"),
        (_positive(head.temperature), "head.temperature must be positive"),
        (_positive(head.ridge_lambda), "head.ridge_lambda must be positive"),
        (
            not (head.freeze and mode == "head" and head.name == "linear"),
            "head.freeze=true with train.what=head leaves nothing to train",
        ),
        (mode != "last_blocks" or blocks > 0, "train.what=last_blocks:N needs N of at least 1"),
        (
            config.backbone.pretrained or not (config.backbone.weights or config.backbone.sha256),
            "backbone.pretrained=false takes no file: leave backbone.weights and sha256 out",
        ),
        (
            config.run.name is None or re.fullmatch(r"[\w.+=-]*\w", config.run.name) is not None,
            f"run.name={config.run.name} must be one plain folder name",
        ),
        (config.backbone.freeze_blocks >= 0, "backbone.freeze_blocks must be 0 or more"),
        (
            config.backbone.freeze_blocks == 0 or mode == "full",
            f"backbone.freeze_blocks goes with train.what=full, not with {train.what}",
        ),
        (_positive(config.backbone.resolution), "backbone.resolution must be positive"),
        (config.augment.crop_padding >= 0, "augment.crop_padding must be 0 or more"),
        (0 <= config.augment.colour_jitter <= 1, "augment.colour_jitter must lie in [0, 1]"),
        (config.augment.randaugment >= 0, "augment.randaugment must be 0 or more"),
        (0 <= config.augment.magnitude <= 30, "augment.magnitude must lie in [0, 30]"),
        (config.evaluate.every > 0, "evaluate.every must be at least 1"),
        (config.evaluate.batch_size > 0, "evaluate.batch_size must be at least 1"),
        (config.checkpoint.every > 0, "checkpoint.every must be at least 1"),
        (config.checkpoint.minutes > 0, "checkpoint.minutes must be positive"),
        (config.checkpoint.keep_best > 0, "checkpoint.keep_best must be at least 1"),
        (config.checkpoint.keep_last > 0, "checkpoint.keep_last must be at least 1"),
    ]:
        if not fine:
            raise FedlensError(f"{complaint}.")


def _positive(value: float | None) -> bool:
    return value is None or value > 0
