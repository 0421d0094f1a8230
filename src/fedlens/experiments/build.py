"""From a config to the parts of an experiment: data, backbone, head, examples.

With a frozen backbone and no augmentation, the examples are cached features and the model is its
head alone; the training loops do not notice.
"""

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedlens import params
from fedlens.config.compose import row_of
from fedlens.config.schema import Config, batch_norm, head_changes, head_only
from fedlens.data.examples import Examples, FeatureExamples, ImageExamples
from fedlens.data.features import features, stored
from fedlens.data.images import Images
from fedlens.data.partitions.partition import Partition
from fedlens.data.splits import Choice, SealedTest
from fedlens.data.transforms import Augmentation, Pipeline
from fedlens.experiments.preparation.local_data import LocalData
from fedlens.models import heads
from fedlens.models.architectures import backbones, weights
from fedlens.models.architectures import batch_norm as batch_norms
from fedlens.models.architectures.blocks import freeze_blocks
from fedlens.models.architectures.onednn import use_onednn
from fedlens.models.classifier import Classifier
from fedlens.models.deep_features import Reading, deepen
from fedlens.models.trained_parts import lora
from fedlens.registry import RowSettings
from fedlens.registry import dataset as dataset_registry
from fedlens.registry import head as head_registry
from fedlens.rng import Stream
from fedlens.runtime.progress import progress_bar
from fedlens.runtime.stop import StopRequest
from fedlens.sparse.masks import Masks
from fedlens.training.precision import Precision
from fedlens.training.precision import choose as choose_precision
from fedlens.training.pretrain import pico_weights

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Experiment:
    """All that heads, masks and training loops need."""

    model: Classifier
    backbone: nn.Module  # also where the model is its head alone, on cached features
    train: Examples
    partition: Partition | None  # of `train` over the clients; None: no clients
    class_counts: torch.Tensor  # [K, C]: how many examples of each class each client holds
    validation: Examples | None
    test: SealedTest
    test_examples: Callable[[Images], Examples]
    classes: int
    precision: Precision
    features: "FrozenFeatures"  # of the training and validation images
    extractor: "Extractor"  # which computes them
    head_is_fitted: bool  # the head was solved or trained before anything else
    head_is_frozen: bool
    input_hashes: dict[str, Any]  # of dataset and weights: a resumed run must find the same
    measurements: dict[str, Any] = field(default_factory=dict)  # facts for the records
    masks: Masks = field(default_factory=dict)  # of the tensors that are trained in part

    @property
    def trains(self) -> bool:
        """Whether anything is left to train."""
        return any(value.requires_grad for value in self.model.parameters())

    @property
    def device(self) -> torch.device:
        return self.model.head.weight.device

    def with_head(self, head: nn.Linear, measurements: dict[str, Any]) -> "Experiment":
        """The same with this head in its model, frozen or trained as the experiment says."""
        self.model.head = head.to(self.device).requires_grad_(not self.head_is_frozen)
        return replace(self, measurements={**self.measurements, **measurements})

    def with_masks(self, masks: Masks, measurements: dict[str, Any]) -> "Experiment":
        """The same with these masks; tensors of which nothing is trained are frozen."""
        kept = {name: mask for name, mask in masks.items() if mask.any()}
        for name, value in self.model.backbone.named_parameters(prefix="backbone"):
            value.requires_grad_(name in kept)
        return replace(self, masks=kept, measurements={**self.measurements, **measurements})


@dataclass(frozen=True)
class FrozenFeatures:
    """What the pretrained backbone makes of the training and validation images, when asked for."""

    extract: Callable[[], torch.Tensor]  # of `images`, in their order
    images: Images
    train_index: torch.Tensor
    validation_index: torch.Tensor

    @cached_property
    def _features(self) -> torch.Tensor:
        return self.extract()

    @property
    def computed(self) -> bool:
        return "_features" in self.__dict__

    @cached_property
    def train(self) -> FeatureExamples:
        return self._at(self.train_index)

    @cached_property
    def validation(self) -> FeatureExamples:
        return self._at(self.validation_index)

    def _at(self, index: torch.Tensor) -> FeatureExamples:
        return FeatureExamples(self._features[index], self.images.labels[index])


def with_resolution(config: Config) -> Config:
    """With the backbone's own resolution filled in; refuses an impossible one early.

    A backbone that says none gets the images as large as they are.
    """
    row = backbones.find(config.backbone)
    size = dataset_registry[config.data.name].traits.get("image_size")
    resolution = config.backbone.resolution or row.resolution or size
    resolution = backbones.checked_resolution(row, resolution)
    return replace(config, backbone=config.backbone.but(resolution=resolution))


def build(
    config: Config,
    device: torch.device,
    stop: StopRequest,
    data: LocalData,
    *,
    opened: Choice | None = None,
) -> Experiment:
    """The experiment with its head as initialised.

    `opened` is the choice for which an earlier session of the same run opened the test split.
    """
    precision = choose_precision(config.train.precision, device)
    images = data.images.to(device)
    backbone, weights_hash = _backbone(config, device, stop)
    row = backbones.find(config.backbone)
    resolution = backbones.checked_resolution(row, config.backbone.resolution)
    log.info(
        "%s: %d training and %d validation images of %d classes; backbone %s at %d px on %s",
        data.name, len(data.train_index), len(data.validation_index), data.classes, row.name,
        resolution, device,
    )  # fmt: skip

    input_hashes = {"data": data.dataset_digest, "weights": weights_hash}
    if data.partition_digest is not None:
        input_hashes["partition"] = data.partition_digest
    plain = Pipeline(resolution, row.mean, row.std)
    augmented = replace(plain, augmentation=Augmentation(**asdict(config.augment)))
    extractor = Extractor(
        backbone,
        reading(config),
        row,
        plain,
        precision,
        device,
        {"data": data.digest, "weights": weights_hash, **_plugin(config), **products(config)},
        stop,
    )
    frozen_features = FrozenFeatures(
        lambda: extractor(images, "train", config.data.train_per_class),
        images,
        data.train_index,
        data.validation_index,
    )
    on_features = head_only(config) and not augmented.augmentation.active
    train: Examples = ImageExamples(images, data.train_index, augmented)
    validation: Examples = ImageExamples(images, data.validation_index, plain)
    if on_features:
        train, validation = frozen_features.train, frozen_features.validation
    head = heads.linear(backbones.width(backbone), data.classes, config.seed)
    head.to(device).requires_grad_(not config.head.freeze)

    def test_examples(test_images: Images) -> Examples:
        if on_features:
            test_features = extractor(test_images, "test", config.data.test_per_class)
            return FeatureExamples(test_features, test_images.labels)
        return ImageExamples(test_images, None, plain)

    model = Classifier(
        nn.Identity() if on_features else backbone,
        head,
        batch_norm=batch_norm(config),
        linearised=row_of(config, "train.trainable").traits.get("linearised", False),
        head_changes=head_changes(config),
    )
    if not on_features and (layers := batch_norms.layers(model)):
        log.info("%d BatchNorm layers: %s", len(layers), _batch_norm_sentence(config))
    return Experiment(
        model=model,
        backbone=backbone,
        train=train,
        partition=data.partition,
        class_counts=data.class_counts,
        validation=validation if len(data.validation_index) else None,
        test=SealedTest(
            lambda: data.load_test().to(device),
            opened=opened,
            curves=config.evaluate.test_curve,
        ),
        test_examples=test_examples,
        classes=data.classes,
        precision=precision,
        features=frozen_features,
        extractor=extractor,
        head_is_fitted=head_registry[config.head.name].traits.get("fitted", True),
        head_is_frozen=config.head.freeze,
        input_hashes=input_hashes,
    )


def weights_file(backbone: RowSettings, stop: StopRequest) -> Path:
    """The file a backbone starts from: found, downloaded, or shipped with fedlens.

    Only after a change of its recipe is vit_pico pretrained here.
    """
    if backbone.name != "vit_pico" or backbone.weights:
        explicit = Path(backbone.weights) if backbone.weights else None
        return weights.find(backbones.find(backbone), explicit)
    with progress_bar("pretraining vit_pico", stop) as progress:
        return pico_weights(progress=progress, check=stop.check)


@dataclass(frozen=True)
class Extractor:
    """Features of whole splits, through the disk cache.

    Those of a reading are the first ones of a deeper reading, which may be cached already.
    """

    backbone: nn.Module
    reading: Reading
    row: backbones.Backbone
    pipeline: Pipeline
    precision: Precision
    device: torch.device
    inputs: dict[str, Any]
    stop: StopRequest

    def key(self, split: str, per_class: int | None) -> dict[str, Any]:
        """All that the features of a split depend on, besides the backbone's parameters."""
        return {
            **self.inputs,
            "backbone": self.row.name,
            "resolution": self.pipeline.resolution,
            "normalisation": [self.row.mean, self.row.std],
            "precision": self.precision.name,
            "device": self.device.type,
            "threads": torch.get_num_threads(),  # another number, other last bits
            "torch": torch.__version__,
            "split": split,
            "per_class": per_class,
        }

    def __call__(self, images: Images, split: str, per_class: int | None) -> torch.Tensor:
        factors = lora.names(self.backbone)  # they start at zero, so features are the same
        parameters = params.digest(lora.plain(factors, self.backbone.state_dict()))
        key = {**self.key(split, per_class), "parameters": parameters}
        for one in (self.reading, *self.reading.deeper(self.backbone)):
            found = stored(len(images), {**key, **one.key})
            if found is not None:
                own = found[:, : backbones.width(self.backbone)].contiguous()  # lets the rest go
                return own.to(self.device)
        key |= self.reading.key
        examples = ImageExamples(images, None, self.pipeline)
        with progress_bar(f"features of the {split} images", self.stop) as progress:
            extracted = features(
                examples, self._forward, key=key, progress=progress, check=self.stop.check
            )
        return extracted.to(self.device)

    def _forward(self, pixels: torch.Tensor) -> torch.Tensor:
        with self.precision.autocast():
            output: torch.Tensor = self.backbone(pixels)
        return output


def _backbone(
    config: Config, device: torch.device, stop: StopRequest
) -> tuple[nn.Module, str | None]:
    """The backbone with its weights, and their hash; weights that are not trained are frozen."""
    settings, row = config.backbone, backbones.find(config.backbone)
    backbone = backbones.create(row, resolution=settings.resolution, seed=config.seed)
    digest = None
    if settings.pretrained:
        path = weights_file(settings, stop)
        digest = weights.load(backbone, row, path, expected_sha256=settings.sha256).sha256
    prepare(config, backbone)
    if config.onednn:
        multiply_by_onednn(config, backbone)
    backbone.to(device).eval()  # BatchNorm's statistics are updated in training steps only
    return backbone, digest


def prepare(config: Config, backbone: nn.Module) -> None:
    """Freezes what the config does not train, adds what it trains instead, such as LoRA, and lets
    the backbone give all that the head reads."""
    stream = Stream(config.seed, ("trainable",))
    backbone.requires_grad_(True)
    freeze_blocks(backbone, config.backbone.freeze_blocks)  # LoRA leaves frozen maps as they are
    row_of(config, "train.trainable").make(backbone, stream, **config.train.trainable.parameters)
    freeze_blocks(backbone, config.backbone.freeze_blocks)  # a row may have turned gradients on
    resolution = backbones.checked_resolution(
        backbones.find(config.backbone), config.backbone.resolution
    )
    deepen(backbone, reading(config), resolution=resolution)


def multiply_by_onednn(config: Config, backbone: nn.Module) -> None:
    """Unless training needs torch's own layers: it compiles or linearises them."""
    linearised = row_of(config, "train.trainable").traits.get("linearised", False)
    if not (config.train.compile or linearised):
        use_onednn(backbone)


def reading(config: Config) -> Reading:
    """What of the backbone the head reads."""
    head = config.head
    return Reading(head.layers, head.tokens, head.random_features, seed=config.seed)


def products(config: Config) -> dict[str, str]:
    """For the keys of what is cached: another library's products have other last bits."""
    return {"products": "oneDNN"} if config.onednn else {}


def _plugin(config: Config) -> dict[str, str]:
    """The file that a backbone from outside comes from: other code may give other features."""
    return {"plugin": config.backbone.plugin} if "plugin" in config.backbone else {}


def _batch_norm_sentence(config: Config) -> str:
    """What happens to their statistics, for the log."""
    default = " (set backbone.batch_norm to change this)"
    return {
        "frozen": f"their statistics stay as they are{default}",
        "averaged": "clients update the statistics and the server averages them"
        if config.federated.clients
        else "their statistics are trained",
        "local": "every client keeps its own; evaluation uses their average",
    }[batch_norm(config)]
