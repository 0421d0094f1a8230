"""From a config to the parts of an experiment: data, backbone, head, examples. Configs stop here.

With a frozen backbone and no augmentation, the examples are cached features and the model is its
head alone; the loops above do not notice.
"""

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedlens import params
from fedlens.data import cifar, synthetic
from fedlens.data.augment import Augmentation
from fedlens.data.batches import FeatureExamples, ImageExamples, Pipeline
from fedlens.data.features import features
from fedlens.data.images import Dataset, Examples, Images
from fedlens.data.splits import Choice, SealedTest, stratified
from fedlens.errors import FedlensError
from fedlens.experiments.config import BackboneConfig, Config, DataConfig, HeadConfig, trained_part
from fedlens.experiments.progress import bar
from fedlens.experiments.signals import StopRequest
from fedlens.models import backbones, heads, weights
from fedlens.models.classifier import Classifier
from fedlens.training.precision import Precision
from fedlens.training.precision import choose as choose_precision
from fedlens.training.pretrain import pico_weights

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """All that a training loop needs."""

    model: Classifier
    train: Examples
    validation: Examples | None
    test: SealedTest
    test_examples: Callable[[Images], Examples]
    classes: int
    precision: Precision
    closed_form: bool  # the head was computed, not initialised
    inputs: dict[str, Any]  # hashes of what went in: a resumed run must find the same
    facts: dict[str, Any]  # what was found out on the way, for the records


def resolved(config: Config) -> Config:
    """With the backbone's own resolution filled in; refuses what can be before anything loads."""
    row = backbones.find(config.backbone.name)
    resolution = config.backbone.resolution or row.resolution
    backbones.check_resolution(row, resolution)
    return replace(config, backbone=replace(config.backbone, resolution=resolution))


def build(
    config: Config, device: torch.device, stop: StopRequest, *, opened: Choice | None = None
) -> Parts:
    """`opened` is the choice an earlier session of the same run opened the test split for."""
    mode, blocks = trained_part(config.train.what)
    precision = choose_precision(config.train.precision, device)
    row = backbones.find(config.backbone.name)
    resolution = config.backbone.resolution or row.resolution
    backbone = backbones.create(row, resolution=resolution, seed=config.seed)
    _choose_trained(backbone, mode, blocks, config.backbone.freeze_blocks)
    data = dataset(config.data)
    weights_hash = None
    if config.backbone.pretrained:
        path = weights_file(config.backbone, stop)
        expected = config.backbone.sha256
        weights_hash = weights.load(backbone, row, path, expected_sha256=expected).sha256
    backbone.to(device).eval()  # batch statistics, where a backbone has them, stay as pretrained

    images = data.load_train().limited(config.data.train_per_class)
    kept, held_out = stratified(images.labels, config.data.validation, config.seed)
    if config.data.validation and not len(held_out):
        raise FedlensError(
            f"data.validation={config.data.validation} of {len(images)} images is none at all: "
            "choose a larger fraction."
        )
    images = images.to(device)
    classes = len(data.classes)
    log.info(
        "%s: %d training and %d validation images of %d classes; backbone %s at %d px on %s",
        data.name, len(kept), len(held_out), classes, row.name, resolution, device,
    )  # fmt: skip

    inputs = {"data": data.digest, "weights": weights_hash}
    plain = Pipeline(resolution, row.mean, row.std)
    augmentation = Augmentation(**asdict(config.augment))
    key = {
        **inputs,
        "backbone": row.name,
        "parameters": params.digest(backbone.state_dict()),
        "resolution": resolution,
        "normalisation": [row.mean, row.std],
        "precision": precision.name,
        "device": device.type,
        "threads": torch.get_num_threads(),  # another number, other last bits
        "torch": torch.__version__,
    }

    def extract(seen: Images, split: str, per_class: int | None) -> torch.Tensor:
        with bar(f"features of the {split} images", stop) as progress:

            def forward(pixels: torch.Tensor) -> torch.Tensor:
                with precision.autocast():
                    found: torch.Tensor = backbone(pixels)
                return found

            which = {**key, "split": split, "per_class": per_class}
            examples = ImageExamples(seen, None, plain)
            return features(examples, forward, key=which, progress=progress).to(device)

    on_features = mode == "head" and not augmentation.active
    closed_form = config.head.name != "linear"
    train: Examples = ImageExamples(
        images, kept, Pipeline(resolution, row.mean, row.std, augmentation)
    )
    validation: Examples = ImageExamples(images, held_out, plain)
    facts: dict[str, Any] = {}
    head = heads.linear(backbones.width(backbone), classes, config.seed)
    if on_features or closed_form:
        found = extract(images, "train", config.data.train_per_class)
        known, unknown = (FeatureExamples(found[i], images.labels[i]) for i in (kept, held_out))
        if closed_form:
            head, facts = closed_form_head(config.head, known, unknown, classes)
        if on_features:
            train, validation = known, unknown
    head.to(device).requires_grad_(not config.head.freeze)

    def test_examples(seen: Images) -> Examples:
        if on_features:
            found = extract(seen, "test", config.data.test_per_class)
            return FeatureExamples(found, seen.labels)
        return ImageExamples(seen, None, plain)

    return Parts(
        model=Classifier(nn.Identity() if on_features else backbone, head),
        train=train,
        validation=validation if len(held_out) else None,
        test=SealedTest(
            lambda: data.load_test().limited(config.data.test_per_class).to(device),
            opened=opened,
            curves=config.evaluate.test_curve,
        ),
        test_examples=test_examples,
        classes=classes,
        precision=precision,
        closed_form=closed_form,
        inputs=inputs,
        facts=facts,
    )


def dataset(config: DataConfig) -> Dataset:
    if config.name == "synthetic":
        return synthetic.dataset()
    return cifar.dataset(Path(config.root).expanduser() if config.root else None)


def closed_form_head(
    config: HeadConfig, train: FeatureExamples, validation: FeatureExamples, classes: int
) -> tuple[nn.Linear, dict[str, Any]]:
    """Ridge or class means from the training features; λ and temperature from validation."""
    stats = heads.Statistics.of(train.features, train.labels, classes)
    facts: dict[str, Any] = {}
    if config.name == "class_means":
        head = heads.class_means(stats)
    elif config.ridge_lambda is None:
        head, facts["ridge_lambda"] = heads.choose_ridge(
            stats, validation.features, validation.labels
        )
    else:
        head, facts["ridge_lambda"] = heads.ridge(stats, config.ridge_lambda), config.ridge_lambda
    temperature = config.temperature
    if temperature is None:
        with torch.no_grad():
            logits = head.to(validation.features.device)(validation.features)
        temperature = heads.temperature(logits, validation.labels)
    facts["temperature"] = temperature
    log.info("%s head in closed form: %s", config.name, facts)
    return heads.scaled(head, temperature), facts


def weights_file(config: BackboneConfig, stop: StopRequest) -> Path:
    """The file a backbone starts from: found, downloaded, or made by our own pretraining."""
    if config.name != "vit_pico" or config.weights:
        explicit = Path(config.weights) if config.weights else None
        return weights.find(backbones.find(config.name), explicit)
    with bar("pretraining vit_pico, once", stop) as progress:
        return pico_weights(progress=progress)


def _choose_trained(backbone: nn.Module, mode: str, blocks: int, frozen: int) -> None:
    if mode == "head":
        backbone.requires_grad_(False)
    elif mode == "last_blocks":
        backbones.last_blocks(backbone, blocks)
    elif frozen:
        backbones.freeze_blocks(backbone, frozen)
