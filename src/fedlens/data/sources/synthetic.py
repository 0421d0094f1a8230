"""The synthetic benchmark: 32×32 images of a coloured, textured shape, drawn on this computer.

A class is a combination such as "teal striped ring"; place, size, angle, background, light and
clutter vary. The backbone vit_pico is pretrained on other combinations than these 100 classes.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from fedlens import files, rng
from fedlens.cache import cached
from fedlens.data.images import Dataset, Images
from fedlens.registry import dataset

# Per pixel only +, −, ×, ÷, √, floor, min and max are used, which IEEE 754 rounds correctly, so the
# bits do not depend on how threads divide the pixels; sines are computed once per image.

SEED = 2  # of all draws here: another seed gives another dataset
VERSION = 1  # increase it whenever the same arguments draw other pixels
CLASSES = 100
SIZE = 32

Combination = tuple[str, str, str]  # colour, texture, shape
Field = Callable[[Tensor, Tensor], Tensor]  # of coordinates (x, y), each [count, SIZE, SIZE]


@dataset(
    label="synthetic benchmark",
    classes=100,
    train_images=20000,
    test_images=5000,
    image_size=32,
    order=2,
)
def synthetic(root: Path | str | None = None) -> Dataset:
    """100 classes of coloured, textured shapes; drawn on first use, no download needed."""
    del root  # the images are kept in the cache
    return draw_dataset()


def draw_dataset(
    *, train_per_class: int = 200, test_per_class: int = 50, cache: Path | None = None
) -> Dataset:
    """The synthetic benchmark with so many images; a split is drawn when it is first loaded."""
    classes, _ = combinations()
    digest = recipe(train_per_class, test_per_class)
    folder = (files.cache_dir() / "synthetic" if cache is None else cache) / digest[:16]

    def load(split: str, per_class: int) -> Images:
        path = folder / f"{split}.safetensors"
        drawn = cached(path, lambda: _draw(classes, split, per_class))
        return Images(drawn["pixels"], drawn["labels"])

    return Dataset(
        name="synthetic",
        digest=digest,
        load_classes=lambda: tuple(" ".join(combination) for combination in classes),
        load_train=partial(load, "train", train_per_class),
        load_test=partial(load, "test", test_per_class),
    )


def pretraining(*, per_class: int) -> Images:
    """Images of all combinations that are not classes of the benchmark, labelled in their order."""
    _, others = combinations()
    drawn = _draw(others, "pretraining", per_class)
    return Images(drawn["pixels"], drawn["labels"])


def combinations() -> tuple[list[Combination], list[Combination]]:
    """Those of the benchmark's classes, and those left for pretraining."""
    every = list(product(COLOURS, TEXTURES, SHAPES))
    order = torch.randperm(len(every), generator=rng.generator(SEED, "combinations")).tolist()
    return [every[i] for i in order[:CLASSES]], [every[i] for i in order[CLASSES:]]


def recipe(*counts: int) -> str:
    """Identifies what is drawn, without drawing it."""
    return hashlib.sha256(
        repr((VERSION, SEED, SIZE, combinations(), COLOURS, *counts)).encode()
    ).hexdigest()


def _draw(classes: Sequence[Combination], split: str, per_class: int) -> dict[str, Tensor]:
    pixels = torch.empty(len(classes), per_class, 3, SIZE, SIZE, dtype=torch.uint8)
    for drawn, combination in zip(pixels, classes, strict=True):
        drawn[:] = paint(combination, per_class, rng.generator(SEED, split, *combination))
    labels = torch.arange(len(classes)).repeat_interleave(per_class)
    return {"pixels": pixels.flatten(0, 1), "labels": labels}


# --- shapes: signed distances, negative inside, in units of the shape's radius


def _radius(x: Tensor, y: Tensor) -> Tensor:
    return (x * x + y * y).sqrt()


def _box(x: Tensor, y: Tensor, width: float, height: float) -> Tensor:
    return torch.maximum(x.abs() - width, y.abs() - height)


def _sides(x: Tensor, y: Tensor, count: int) -> Tensor:
    """Distances to the lines through a regular polygon's sides, ascending along dimension 0."""
    turns = [2 * math.pi * side / count for side in range(count)]
    return torch.stack([x * math.cos(turn) + y * math.sin(turn) for turn in turns]).sort(0).values


SHAPES: dict[str, Field] = {
    "disc": lambda x, y: _radius(x, y) - 0.85,
    "ring": lambda x, y: (_radius(x, y) - 0.7).abs() - 0.25,
    "square": lambda x, y: _box(x, y, 0.75, 0.75),
    "frame": lambda x, y: _box(x, y, 0.6, 0.6).abs() - 0.22,
    "triangle": lambda x, y: _sides(x, y, 3)[-1] - 0.55,
    "star": lambda x, y: _sides(x, y, 5)[-2] - 0.4,  # at most one side of the pentagon is crossed
    "cross": lambda x, y: torch.minimum(_box(x, y, 1, 0.32), _box(x, y, 0.32, 1)),
    "crescent": lambda x, y: torch.maximum(_radius(x, y) - 1, 0.75 - _radius(x - 0.5, y)),
    "dome": lambda x, y: torch.maximum(_radius(x, y + 0.4) - 1, -0.4 - y),
    "bar": lambda x, y: _box(x, y, 1.05, 0.38),
}


# --- textures: how light the paint is, from 0 to 1, over coordinates in periods of the pattern


def _wave(x: Tensor) -> Tensor:
    """A triangle wave of period 1 between −1 and 1."""
    return 4 * (x - (x + 0.5).floor()).abs() - 1


def _edge(x: Tensor) -> Tensor:
    return (0.5 + 2 * x).clamp(0, 1)


TEXTURES: dict[str, Field] = {
    "plain": lambda x, y: torch.ones_like(x),
    "striped": lambda x, y: _edge(_wave(x)),
    "banded": lambda x, y: _edge(_wave(y)),
    "hatched": lambda x, y: _edge(_wave(0.7 * (x + y))),
    "checked": lambda x, y: _edge(2 * _wave(x / 1.6) * _wave(y / 1.6)),
    "dotted": lambda x, y: _edge(_wave(x) + _wave(y) - 0.3),
}

COLOURS: dict[str, float] = {  # hues, in turns
    "red": 0.0,
    "orange": 0.08,
    "yellow": 0.16,
    "green": 0.32,
    "teal": 0.47,
    "blue": 0.61,
    "purple": 0.75,
    "pink": 0.89,
}


# --- drawing


def _rgb(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """[count, 1, 1] each → [count, 3, 1, 1]."""
    sector = (torch.tensor([5.0, 3.0, 1.0])[:, None, None] + 6 * hue[:, None]) % 6
    away = torch.minimum(sector, 4 - sector).clamp(0, 1)
    return value[:, None] * (1 - saturation[:, None] * away)


def paint(combination: Combination, count: int, draw: torch.Generator) -> Tensor:
    """`count` images of one class: uint8 [count, 3, SIZE, SIZE]."""
    colour, texture, shape = combination
    axis = torch.arange(SIZE) - (SIZE - 1) / 2
    across, down = axis[None, :], axis[:, None]

    def uniform(low: float, high: float) -> Tensor:
        """One draw per image."""
        return low + (high - low) * torch.rand(count, 1, 1, generator=draw)

    def any_colour() -> Tensor:
        return _rgb(uniform(0, 1), uniform(0, 1), uniform(0.1, 1))

    def blob(smallest: float, largest: float) -> Tensor:
        x, y = across - uniform(-16, 16), down - uniform(-16, 16)
        x, y = _turn(x, y * uniform(0.5, 1), uniform(0, math.pi))
        return _radius(x, y) - uniform(smallest, largest)

    ground, slope = any_colour(), _turn(across, down, uniform(0, 2 * math.pi))[0]
    canvas = ground + (any_colour() - ground) * (0.5 + slope / SIZE).clamp(0, 1)[:, None]
    for _ in range(2):
        canvas = _cover(canvas, any_colour(), blob(2, 6))

    x, y, radius = across - uniform(-5, 5), down - uniform(-5, 5), uniform(9, 13)
    distance = SHAPES[shape](*_turn(x / radius, y / radius, uniform(-0.25, 0.25))) * radius
    period = uniform(4.5, 6.5)
    u, v = _turn(x / period, y / period, uniform(-0.2, 0.2))
    pattern = TEXTURES[texture](u + uniform(-0.5, 0.5), v + uniform(-0.5, 0.5))
    light = 1 - uniform(0.5, 0.85) * (1 - pattern)
    hue = COLOURS[colour] + uniform(-0.04, 0.04)
    ink = _rgb(hue, uniform(0.55, 1), uniform(0.65, 1)) * light[:, None]
    canvas = _cover(canvas, ink, distance)
    canvas = _cover(canvas, any_colour(), blob(1, 3))

    noise = torch.rand(canvas.shape, generator=draw) - 0.5
    canvas = canvas * uniform(0.75, 1.1)[:, None] + uniform(0.05, 0.2)[:, None] * noise
    return (canvas.clamp(0, 1) * 255).round().to(torch.uint8)


def _turn(x: Tensor, y: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    return x * angle.cos() + y * angle.sin(), y * angle.cos() - x * angle.sin()


def _cover(canvas: Tensor, ink: Tensor, distance: Tensor) -> Tensor:
    """Paints where the distance, in pixels, is negative; half a pixel of soft edge either side."""
    return canvas + (ink - canvas) * (0.5 - distance).clamp(0, 1)[:, None]
