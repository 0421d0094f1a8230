"""From a config to the parts of an experiment: data, backbone, head, examples. Configs stop here.

With a frozen backbone and no augmentation, the examples are cached features and the model is its
head alone; the loops above do not notice.
"""

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedlens import params
from fedlens.config.schema import BackboneConfig, Config, trained_part
from fedlens.data.examples import FeatureExamples, ImageExamples, Pipeline
from fedlens.data.features import features
from fedlens.data.images import Examples, Images
from fedlens.data.partition import Partition
from fedlens.data.splits import Choice, SealedTest
from fedlens.data.transforms import Augmentation
from fedlens.experiments.flower.setup import setup
from fedlens.experiments.head import closed_form_head
from fedlens.experiments.local_data import Holding, whole
from fedlens.experiments.trained_head import trained_head
from fedlens.federated.client import LocalRules
from fedlens.federated.tasks import Crowd
from fedlens.models import backbones, heads, weights
from fedlens.models.classifier import Classifier
from fedlens.runtime.progress import bar
from fedlens.runtime.stop import StopRequest
from fedlens.sparse.masks import Masks
from fedlens.training.precision import Precision
from fedlens.training.precision import choose as choose_precision
from fedlens.training.pretrain import pico_weights
from fedlens.training.step import StepRules

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """All that a training loop needs."""

    model: Classifier
    train: Examples
    partition: Partition | None  # of `train` over the clients, where there are any
    held_classes: torch.Tensor  # [K, C]: how many examples of each class each client holds
    validation: Examples | None
    test: SealedTest
    test_examples: Callable[[Images], Examples]
    classes: int
    precision: Precision
    prepared: bool  # the head was computed or trained beforehand, not merely initialised
    inputs: dict[str, Any]  # hashes of what went in: a resumed run must find the same
    facts: dict[str, Any]  # what was found out on the way, for the records
    untouched: FeatureExamples | None = None  # validation as the pretrained backbone sees it
    masks: Masks = field(default_factory=dict)  # of what is trained in part

    @property
    def trains(self) -> bool:
        """Whether anything is left to train."""
        return any(value.requires_grad for value in self.model.parameters())


def resolved(config: Config) -> Config:
    """With the backbone's own resolution filled in; refuses what can be before anything loads."""
    row = backbones.find(config.backbone.name)
    resolution = config.backbone.resolution or row.resolution
    backbones.check_resolution(row, resolution)
    return replace(config, backbone=replace(config.backbone, resolution=resolution))


def build(
    config: Config,
    device: torch.device,
    stop: StopRequest,
    *,
    opened: Choice | None = None,
    holding: Holding | None = None,
    crowd: Crowd | None = None,
    head: nn.Linear | None = None,
) -> Parts:
    """`opened` is the choice an earlier session of the same run opened the test split for.

    `holding` says which data are here, if not all; `crowd` are the clients, if they are elsewhere;
    a `head` that is given is not prepared again.
    """
    precision = choose_precision(config.train.precision, device)
    holding = holding or whole(config)
    images, kept, held_out = holding.images.to(device), holding.kept, holding.held_out
    backbone, weights_hash = _backbone(config, device, stop)
    classes, row, shards = holding.classes, backbones.find(config.backbone.name), holding.partition
    width = backbones.width(backbone)
    resolution = config.backbone.resolution or row.resolution
    log.info(
        "%s: %d training and %d validation images of %d classes; backbone %s at %d px on %s",
        holding.name, len(kept), len(held_out), classes, row.name, resolution, device,
    )  # fmt: skip

    inputs = {"data": holding.of, "weights": weights_hash}
    plain = Pipeline(resolution, row.mean, row.std)
    augmented = replace(plain, augmentation=Augmentation(**asdict(config.augment)))
    here = {**inputs, "data": holding.digest}
    extractor = Extractor(backbone, row, plain, precision, device, here, stop)
    mode, _ = trained_part(config.train.what)
    on_features = mode == "head" and not augmented.augmentation.active
    prepared = config.head.name != "linear"
    train: Examples = ImageExamples(images, kept, augmented)
    validation: Examples = ImageExamples(images, held_out, plain)
    facts: dict[str, Any] = {}
    untouched = None
    given, head = head is not None, head or heads.linear(width, classes, config.seed)
    if crowd:
        crowd.prepare(setup(config, weights_hash))
    if on_features or (prepared and not given):
        found = extractor(images, "train", config.data.train_per_class)
        known, unknown = (FeatureExamples(found[i], images.labels[i]) for i in (kept, held_out))
        untouched = unknown
        if on_features:
            train, validation = known, unknown
        if config.head.name == "trained" and not given:
            head, facts = trained_head(config, known, head, shards, precision, stop, crowd=crowd)
        elif prepared and not given:
            head, facts = closed_form_head(
                config.head, known, unknown, classes, shards, crowd=crowd, check=stop.check
            )
        if crowd:
            crowd.prepare(setup(config, weights_hash, head=head if prepared else None))
    head.to(device).requires_grad_(not config.head.freeze)

    def test_examples(seen: Images) -> Examples:
        if on_features:
            found = extractor(seen, "test", config.data.test_per_class)
            return FeatureExamples(found, seen.labels)
        return ImageExamples(seen, None, plain)

    return Parts(
        model=Classifier(nn.Identity() if on_features else backbone, head),
        train=train,
        partition=shards,
        held_classes=holding.held,
        validation=validation if len(held_out) else None,
        test=SealedTest(
            lambda: holding.load_test().to(device),
            opened=opened,
            curves=config.evaluate.test_curve,
        ),
        test_examples=test_examples,
        classes=classes,
        precision=precision,
        prepared=prepared,
        inputs=inputs,
        facts=facts,
        untouched=untouched if len(held_out) else None,
    )


def step_rules(config: Config, precision: Precision) -> StepRules:
    return StepRules(
        precision=precision,
        label_smoothing=config.train.label_smoothing,
        dropout=config.head.dropout,
        clip_norm=config.train.clip_norm,
        micro_batch=config.train.micro_batch,
    )


def local_rules(config: Config, precision: Precision) -> LocalRules:
    return LocalRules(
        step=step_rules(config, precision.for_clients()),
        batch_size=config.train.batch_size,
        momentum=config.train.momentum,
        weight_decay=config.train.weight_decay,
        nesterov=config.train.nesterov,
        proximal=config.algorithm.proximal,
    )


def weights_file(config: BackboneConfig, stop: StopRequest) -> Path:
    """The file a backbone starts from: found, downloaded, or made by our own pretraining."""
    if config.name != "vit_pico" or config.weights:
        explicit = Path(config.weights) if config.weights else None
        return weights.find(backbones.find(config.name), explicit)
    with bar("pretraining vit_pico, once", stop) as progress:
        return pico_weights(progress=progress, check=stop.check)


@dataclass(frozen=True)
class Extractor:
    """Features of whole splits, through the disk cache."""

    backbone: nn.Module
    row: backbones.Backbone
    pipeline: Pipeline
    precision: Precision
    device: torch.device
    inputs: dict[str, Any]
    stop: StopRequest

    def __call__(self, seen: Images, split: str, per_class: int | None) -> torch.Tensor:
        key = {
            **self.inputs,
            "backbone": self.row.name,
            "parameters": params.digest(self.backbone.state_dict()),
            "resolution": self.pipeline.resolution,
            "normalisation": [self.row.mean, self.row.std],
            "precision": self.precision.name,
            "device": self.device.type,
            "threads": torch.get_num_threads(),  # another number, other last bits
            "torch": torch.__version__,
            "split": split,
            "per_class": per_class,
        }
        examples = ImageExamples(seen, None, self.pipeline)
        with bar(f"features of the {split} images", self.stop) as progress:
            found = features(
                examples, self._forward, key=key, progress=progress, check=self.stop.check
            )
        return found.to(self.device)

    def _forward(self, pixels: torch.Tensor) -> torch.Tensor:
        with self.precision.autocast():
            found: torch.Tensor = self.backbone(pixels)
        return found


def _backbone(
    config: Config, device: torch.device, stop: StopRequest
) -> tuple[nn.Module, str | None]:
    """The backbone with its weights, and their hash; what is not to be trained is frozen."""
    wanted, row = config.backbone, backbones.find(config.backbone.name)
    resolution = wanted.resolution or row.resolution
    backbone = backbones.create(row, resolution=resolution, seed=config.seed)
    freeze(config, backbone)
    digest = None
    if wanted.pretrained:
        path = weights_file(wanted, stop)
        digest = weights.load(backbone, row, path, expected_sha256=wanted.sha256).sha256
    backbone.to(device).eval()  # batch statistics, where a backbone has them, stay as pretrained
    return backbone, digest


def freeze(config: Config, backbone: nn.Module) -> None:
    """Leaves those weights trainable that the config trains."""
    mode, blocks = trained_part(config.train.what)
    if mode == "head":
        backbone.requires_grad_(False)
    elif mode == "last_blocks":
        backbones.last_blocks(backbone, blocks)
    elif config.backbone.freeze_blocks:
        backbones.freeze_blocks(backbone, config.backbone.freeze_blocks)
