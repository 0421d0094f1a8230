"""Seconds of batches in training, evaluation, calibration and sums, measured on a few steps.

The model and the steps are those of the run; weights and pixels are random, and nothing is stored.
"""

import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch
from torch import nn

from fedlens import rng
from fedlens.config.compose import row_of
from fedlens.config.schema import Config, batch_norm
from fedlens.data.examples import Examples, ImageExamples, TensorExamples
from fedlens.data.images import Images
from fedlens.data.transforms import Augmentation, Pipeline
from fedlens.experiments import settings
from fedlens.experiments.build import multiply_by_onednn, prepare
from fedlens.models import heads
from fedlens.models.architectures import backbones, onednn
from fedlens.models.classifier import Classifier
from fedlens.models.heads import Statistics
from fedlens.models.prefix import Cut
from fedlens.rng import Stream
from fedlens.runtime.allocator import keep_large_blocks
from fedlens.runtime.device import choose_device
from fedlens.runtime.threads import available, limited_threads
from fedlens.sparse.masks import Masks
from fedlens.sparse.parameter_groups import maskable
from fedlens.sparse.sensitivity.fisher import sensitivity
from fedlens.sparse.sensitivity.per_example_gradients import SquaredGradients
from fedlens.suites.estimates.cost import SUMS_WIDTH, dataset_sizes, skips_blocks
from fedlens.suites.estimates.counts import begin_after_blocks
from fedlens.training.evaluate import evaluate
from fedlens.training.precision import choose as choose_precision
from fedlens.training.step import Tally, local_step

TIMED_S = 0.6  # how long a task is timed once it is warm
MOST_STEPS = 20  # of which the median counts
FIRST_IMAGES = 2  # of the first batch that counts, before the speed is known
SUMS_IMAGES = 512  # of the largest client
LEAST_IMAGES = 8  # of the largest batch, unless that takes too long
TOO_LONG_S = 2.0  # of one image: then no larger batch is timed

__all__ = ["available", "device_name", "process_bytes", "seconds_of_batches"]

Step = Callable[[torch.Tensor], object]  # does its task on the images of an index


def seconds_of_batches(config: Config, task: str, *, threads: int) -> tuple[float, float]:
    """One task of a run, on this machine: a batch of n images takes first + second · n.

    Sums are of `SUMS_WIDTH` features, whatever the run's are.
    """
    keep_large_blocks()  # as a run does
    with limited_threads(threads):
        step, batch_size = _sums() if task == "sums" else _steps(config)[task]
        return _timed(step, batch_size)


def process_bytes() -> int:
    """What this process takes, having loaded torch and computed a step of a small network."""
    network = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Flatten(), nn.Linear(512, 64))
    network(torch.zeros(16, 3, 32, 32)).sum().backward()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def device_name(config: Config) -> str:
    """What the run would compute on."""
    device = choose_device(config.device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _timed(step: Step, batch_size: int) -> tuple[float, float]:
    """From a batch of two images and one as large as the time allows, each timed several times.

    A batch of n images takes `fixed` + `each` · n: `fixed` does not depend on the images (starting
    kernels, updating the weights).
    """
    _seconds(step, 1)  # the first may read libraries from disk, and takes any time
    alone = _seconds(step, 1)
    if alone > TOO_LONG_S:
        return 0.0, alone
    few, most = FIRST_IMAGES, max(batch_size, LEAST_IMAGES)
    first = _median(step, few, TIMED_S / 4)
    if first > TIMED_S:
        return 0.0, first / few
    many, one = few, first
    while many < most and one < TIMED_S / 4:
        many = min(most, 4 * many)
        one = _seconds(step, many)
    if many == few:
        return 0.0, first / few
    seconds = _median(step, many, TIMED_S)
    fixed = min(first, max(0.0, first - few * (seconds - first) / (many - few)))
    return fixed, (seconds - fixed) / many


def _median(step: Step, images: int, patience: float) -> float:
    started, times = time.perf_counter(), [_seconds(step, images)]
    while time.perf_counter() - started < patience and len(times) < MOST_STEPS:
        times.append(_seconds(step, images))
    return median(times)


def _seconds(step: Step, images: int) -> float:
    started = time.perf_counter()
    step(torch.arange(images))
    return time.perf_counter() - started


def _steps(config: Config) -> dict[str, tuple[Step, int]]:
    """Task → the step to time, and its batch size."""
    device = choose_device(config.device)
    precision = choose_precision(config.train.precision, device)
    row = backbones.find(config.backbone)
    resolution = backbones.checked_resolution(row, config.backbone.resolution)
    plain = Pipeline(resolution, row.mean, row.std)
    augmented = Pipeline(resolution, row.mean, row.std, Augmentation(**asdict(config.augment)))
    sizes = config.train.batch_size, config.evaluate.batch_size, config.sparse.micro_batch
    classes = dataset_sizes(config.data)["classes"]
    images = _noise(max(sizes), classes).to(device)
    examples = ImageExamples(images, None, plain)
    augmented_examples = ImageExamples(images, None, augmented)
    model = _model(config, row, resolution, classes).to(device)
    if onednn.chosen(config.onednn, device):
        multiply_by_onednn(config, model.backbone)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    masks = _masks(config, trained)
    after, cached = _after_blocks(config, model, examples)
    stream, step = Stream(0, ("probe",)), settings.step(config, precision)
    make = settings.optimizer(config).make
    optimizer = make(trained.items(), masks, lr=1e-6) if trained else None
    squares: list[SquaredGradients] = []

    def train(index: torch.Tensor) -> None:
        assert optimizer is not None
        model.cut, width = after, model.head.in_features
        local_step(
            model, optimizer, cached or augmented_examples, index, step, Tally(), stream=stream,
            step=0, width=width,
        )  # fmt: skip

    def validate(part: Examples) -> None:
        evaluate(
            model, part, classes=model.head.out_features, batch_size=len(part), precision=precision
        )

    def validate_images(index: torch.Tensor) -> None:
        model.cut = None
        validate(ImageExamples(images, index, plain))

    def validate_cached(index: torch.Tensor) -> None:
        assert cached is not None
        model.cut = after
        validate(TensorExamples(cached.inputs[index], cached.labels[index]))

    def calibrate(index: torch.Tensor) -> None:
        model.cut = None
        if not squares:
            squares.append(SquaredGradients(model, list(masks), examples.batch(index[:2])))
        sparse = config.sparse
        sensitivity(
            squares[0], examples, index=index, labels=sparse.labels, target=sparse.target,
            stream=stream, micro_batch=sparse.micro_batch,
        )  # fmt: skip

    return {
        "train": (train, config.train.batch_size),
        "evaluate": (validate_images, config.evaluate.batch_size),
        "evaluate_cached": (validate_cached, config.evaluate.batch_size),
        "calibrate": (calibrate, config.sparse.micro_batch),
    }


def _sums() -> tuple[Step, int]:
    """Adds the sums of a client to those of the others before it."""
    draw = rng.generator(0, "probe", "sums")
    features = torch.randn((SUMS_IMAGES, SUMS_WIDTH), generator=draw)
    labels = torch.arange(SUMS_IMAGES)
    total = [Statistics.of(features[:1], labels[:1], SUMS_IMAGES)]

    def add(index: torch.Tensor) -> None:
        total[0] = total[0] + Statistics.of(features[index], labels[index], SUMS_IMAGES)

    return add, SUMS_IMAGES


def _after_blocks(
    config: Config, model: Classifier, examples: ImageExamples
) -> tuple[Cut | None, TensorExamples | None]:
    """Where the run begins if activations of frozen blocks are cached, and such activations."""
    if not skips_blocks(config):
        return None, None
    few = examples.batch(torch.arange(2))
    sample = begin_after_blocks(model, config.backbone.freeze_blocks, few)
    draw = rng.generator(0, "probe", "activations")
    inputs = torch.randn((len(examples), *sample.shape[1:]), generator=draw)
    return model.cut, TensorExamples(inputs.to(sample.device), examples.labels)


def _noise(count: int, classes: int) -> Images:
    draw = rng.generator(0, "probe")
    pixels = torch.randint(256, (count, 3, 32, 32), generator=draw, dtype=torch.uint8)
    return Images(pixels, torch.arange(count) % classes)


def _model(config: Config, row: backbones.Backbone, resolution: int, classes: int) -> Classifier:
    backbone = _backbone(row, resolution)
    prepare(config, backbone)
    backbone.eval()
    head = heads.linear(backbones.width(backbone), classes, 0)
    return Classifier(
        backbone,
        head.requires_grad_(not config.head.freeze),
        batch_norm=batch_norm(config),
        linearised=row_of(config, "train.trainable").traits.get("linearised", False),
    )


def _backbone(row: backbones.Backbone, resolution: int) -> nn.Module:
    """With any weights: drawing them as the backbone would takes longer than a step."""
    if row.patch > 1:  # a ViT, which has parameters only
        with torch.device("meta"):
            backbone = row.build(resolution)
        if not list(backbone.buffers()):
            backbone.to_empty(device="cpu")
            for value in backbone.parameters():
                nn.init.normal_(value, std=0.02)
            return backbone
    return backbones.create(row, resolution=resolution)


def _masks(config: Config, trained: dict[str, torch.nn.Parameter]) -> Masks:
    """Random masks of the density: which entries are trained hardly affects the speed."""
    sparse, draw = config.sparse, rng.generator(0, "probe", "masks")
    if sparse.density is None:
        return {}
    kinds = {"biases": sparse.biases, "norms": sparse.norms, "embeddings": sparse.embeddings}
    names = maskable(trained, prefix="backbone.", **kinds)
    return {n: torch.rand(trained[n].shape, generator=draw) < sparse.density for n in names}
