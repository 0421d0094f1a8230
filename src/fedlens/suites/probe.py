"""Seconds per image of training, evaluation and calibration, from a few real steps of the model.

Weights and pixels are random and nothing is kept: the work is the real one, its result is not.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import asdict

import torch

from fedlens import rng
from fedlens.config.schema import Config
from fedlens.data import synthetic
from fedlens.data.examples import ImageExamples, Pipeline
from fedlens.data.images import Images
from fedlens.data.transforms import Augmentation
from fedlens.experiments.build import freeze, step_rules
from fedlens.models import backbones, heads
from fedlens.models.classifier import Classifier
from fedlens.rng import Stream
from fedlens.runtime.device import choose_device
from fedlens.sparse.fisher import sensitivity
from fedlens.sparse.masks import Masks
from fedlens.sparse.parameter_groups import maskable
from fedlens.sparse.per_example_gradients import Squares
from fedlens.sparse.sparse_sgd import sgdm
from fedlens.suites.cost import SIZES
from fedlens.training.evaluate import evaluate
from fedlens.training.precision import Precision
from fedlens.training.precision import choose as choose_precision
from fedlens.training.pretrain import Recipe, SumOfParts
from fedlens.training.step import StepRules, Tally, local_step

ENOUGH = 1.0  # seconds of one task
FEW = 4  # images to begin with, when nothing is known of the speed
HEAD = 2e-6  # seconds per image where features are at hand: next to nothing

Step = Callable[[torch.Tensor], object]  # does its task with the images at an index


def pace(config: Config, tasks: Collection[str]) -> dict[str, float]:
    """Task → seconds per image."""
    steps = _steps(config)
    if "pretrain" in tasks:
        steps["pretrain"] = _pretraining()
    return {"head": HEAD} | {task: _timed(*step) for task, step in steps.items() if task in tasks}


def _timed(step: Step, most: int) -> float:
    """Of batches as large as time allows; the first one warms up."""
    few = torch.arange(min(FEW, most))
    step(few)
    began = time.perf_counter()
    step(few)
    each = (time.perf_counter() - began) / len(few)
    size = max(len(few), min(most, int(ENOUGH / each / 2)))
    began, images = time.perf_counter(), 0
    while not images or time.perf_counter() - began < ENOUGH:
        step(torch.arange(size))
        images += size
    return (time.perf_counter() - began) / images


def _steps(config: Config) -> dict[str, tuple[Step, int]]:
    """Task → what is timed, and the size of its batches."""
    device = choose_device(config.device)
    precision = choose_precision(config.train.precision, device)
    row = backbones.find(config.backbone.name)
    resolution = config.backbone.resolution or row.resolution
    plain = Pipeline(resolution, row.mean, row.std)
    augmented = Pipeline(resolution, row.mean, row.std, Augmentation(**asdict(config.augment)))
    sizes = config.train.batch_size, config.evaluate.batch_size, config.sparse.micro_batch
    images = _noise(max(sizes), SIZES[config.data.name][0]).to(device)
    seen, shown = ImageExamples(images, None, plain), ImageExamples(images, None, augmented)
    model = _model(config, row, resolution, SIZES[config.data.name][0]).to(device)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    masks = _masks(config, trained)
    stream, rules = Stream(0, ("probe",)), step_rules(config, precision)
    optimizer = sgdm(trained.items(), masks, lr=1e-6, momentum=0.9) if trained else None
    squares: list[Squares] = []

    def train(index: torch.Tensor) -> None:
        assert optimizer is not None
        width = model.head.in_features
        local_step(
            model, optimizer, shown, index, rules, Tally(), stream=stream, step=0, width=width
        )

    def look(index: torch.Tensor) -> None:
        part = ImageExamples(images, index, plain)
        evaluate(
            model, part, classes=model.head.out_features, batch_size=len(index), precision=precision
        )

    def calibrate(index: torch.Tensor) -> None:
        if not squares:
            squares.append(Squares(model, list(masks), seen.batch(index[:2])))
        told = config.sparse
        sensitivity(
            squares[0], seen, index=index, labels=told.labels, target=told.target, stream=stream,
            micro_batch=told.micro_batch,
        )  # fmt: skip

    return {
        "train": (train, config.train.batch_size),
        "evaluate": (look, config.evaluate.batch_size),
        "calibrate": (calibrate, config.sparse.micro_batch),
    }


def _pretraining() -> tuple[Step, int]:
    """A step of vit_pico's, in which every weight is trained whatever the run trains later."""
    row, most = backbones.find("vit_pico"), Recipe().batch_size
    model = SumOfParts(backbones.create(row))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    noise = _noise(most, len(synthetic.combinations()[1]))
    examples = ImageExamples(noise, None, Pipeline(row.resolution, row.mean, row.std))
    rules, stream = StepRules(Precision("fp32", "cpu")), Stream(0, ("probe",))

    def train(index: torch.Tensor) -> None:
        local_step(
            model, optimizer, examples, index, rules, Tally(), stream=stream, step=0, width=0
        )

    return train, most


def _noise(count: int, classes: int) -> Images:
    draw = rng.generator(0, "probe")
    pixels = torch.randint(256, (count, 3, 32, 32), generator=draw, dtype=torch.uint8)
    return Images(pixels, torch.arange(count) % classes)


def _model(config: Config, row: backbones.Backbone, resolution: int, classes: int) -> Classifier:
    backbone = backbones.create(row, resolution=resolution)
    freeze(config, backbone)
    backbone.eval()
    head = heads.linear(backbones.width(backbone), classes, 0)
    return Classifier(backbone, head.requires_grad_(not config.head.freeze))


def _masks(config: Config, trained: dict[str, torch.nn.Parameter]) -> Masks:
    """As many entries as the density says, at random: where they lie costs little."""
    told, draw = config.sparse, rng.generator(0, "probe", "masks")
    if told.density is None:
        return {}
    names = maskable(trained, biases=told.biases, norms=told.norms, embeddings=told.embeddings)
    return {n: torch.rand(trained[n].shape, generator=draw) < told.density for n in names}
