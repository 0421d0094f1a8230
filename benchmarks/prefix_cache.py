"""Last-4-blocks training of ViT-Ti/16 at 112 px from cached activations, over full fine-tuning.

The same images, batch and optimizer. Also: the same training without the cache, what filling it
costs, and how many times fewer operations its step has. Run: python benchmarks/prefix_cache.py
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from fedlens import rng
from fedlens.data.activations import ActivationExamples, ComputedActivations, activations
from fedlens.data.examples import Examples, ImageExamples, shuffled
from fedlens.data.images import Images
from fedlens.data.transforms import Pipeline
from fedlens.experiments.preparation.prefix import FirstBlocks
from fedlens.models import heads
from fedlens.models.architectures import backbones
from fedlens.models.architectures.blocks import last_blocks
from fedlens.models.classifier import Classifier
from fedlens.models.prefix import cut
from fedlens.rng import Stream
from fedlens.runtime.allocator import keep_large_blocks
from fedlens.runtime.stop import StopRequest
from fedlens.runtime.units import size_text
from fedlens.training.optimizers import Sgd
from fedlens.training.precision import Precision
from fedlens.training.step import StepSettings, Tally, local_step, set_lr
from side_by_side import compare, print_table, print_verdict

BACKBONE, PIXELS, BATCH, CLASSES, BLOCKS = "vit_tiny", 112, 32, 100, 4
IMAGES, CIFAR = 512, 60_000  # images here; of CIFAR-100, for the size of its cache
STEPS = {"cached": 3, "uncached": 2, "full": 1}  # of one repeat: about equal times
TARGET = 3.0


def images() -> ImageExamples:
    draw, row = rng.generator(0, "benchmark"), backbones.find(BACKBONE)
    pixels = torch.randint(256, (IMAGES, 3, 32, 32), dtype=torch.uint8, generator=draw)
    labels = torch.randint(CLASSES, (IMAGES,), generator=draw)
    return ImageExamples(Images(pixels, labels), None, Pipeline(PIXELS, row.mean, row.std))


def model_of(trained: int | None) -> Classifier:
    backbone = backbones.create(backbones.find(BACKBONE), resolution=PIXELS).eval()
    if trained:
        last_blocks(backbone, trained)
    return Classifier(backbone, heads.linear(backbones.width(backbone), CLASSES, 0))


def one_step(model: Classifier, examples: Examples) -> Callable[[], None]:
    optimizer = Sgd(momentum=0.9).make(model.named_parameters(), {}, lr=0.0)
    set_lr(optimizer, 1e-3)
    settings, stream = StepSettings(Precision("fp32", "cpu")), Stream(0, ("benchmark",))

    def batches() -> Iterator[tuple[int, torch.Tensor]]:
        for epoch in count():
            yield from enumerate(shuffled(IMAGES, BATCH, stream.draw("order", epoch)))

    order = batches()

    def step() -> None:
        number, index = next(order)
        local_step(model, optimizer, examples, index, settings, Tally(), stream=stream, step=number)

    return step


def repeated(step: Callable[[], None], times: int) -> Callable[[], int]:
    def work() -> int:
        for _ in range(times):
            step()
        return times * BATCH

    return work


def operations(step: Callable[[], None]) -> int:
    """Of the matrix products of one step, forward and backward."""
    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())


def main() -> None:
    keep_large_blocks()
    plain = images()
    cached_model = model_of(BLOCKS)
    backbone = cached_model.backbone
    found = cut(backbone, 12 - BLOCKS, plain.batch(torch.arange(2)))
    assert found is not None
    first = FirstBlocks(backbone, found, Precision("fp32", "cpu"))
    with tempfile.TemporaryDirectory() as folder:
        with torch.no_grad():
            sample = first(plain.batch(torch.arange(2)))
        stored = activations(IMAGES, sample, {}, batch=BATCH, root=Path(folder))
        began = time.perf_counter()
        stored.make(plain, first, title="filling the cache", stop=StopRequest())
        filling = IMAGES / (time.perf_counter() - began)
        cached = ActivationExamples(stored, ComputedActivations(plain, first))
        cached_model.cut = found
        steps = {
            "cached": one_step(cached_model, cached),
            "uncached": one_step(model_of(BLOCKS), plain),
            "full": one_step(model_of(None), plain),
        }
        counted = {name: operations(step) for name, step in steps.items()}
        works = {name: repeated(step, STEPS[name]) for name, step in steps.items()}
        ratios, rows = {}, []
        for name in ("cached", "uncached"):
            result = compare({name: works[name], "full": works["full"]}, max_repeats=9)
            ratios[name] = result.ratio
            rows.append([*result.row(name), f"{counted['full'] / counted[name]:.2f}"])
        index = shuffled(IMAGES, BATCH, rng.generator(0, "gather"))
        began = time.perf_counter()
        for one in index:
            cached.batch(one)
        gathering = (time.perf_counter() - began) / len(index)
    print(
        f"{BACKBONE} at {PIXELS} px, batch {BATCH}, last {BLOCKS} of {found.depth} blocks, "
        f"{torch.get_num_threads()} threads"
    )
    print_table(["part", "images/s", "full, images/s", "ratio", "repeats", "operations"], rows)
    print("operations: those of a full step over those of this step, the limit of what it can gain")
    print(
        f"filling the cache: {filling:.0f} images/s; {size_text(stored.file.row_bytes)} an image, "
        f"{size_text(CIFAR * stored.file.row_bytes)} for CIFAR-100; "
        f"a batch is read in {1e3 * gathering:.2f} ms"
    )
    figures = {
        "cached over full": ratios["cached"],
        "uncached over full": ratios["uncached"],
        "operations": counted["full"] / counted["cached"],
        "filled images/s": filling,
    }
    target = {"cached over full": TARGET}
    print_verdict("prefix_cache", figures, target, ratios["cached"] >= TARGET)


if __name__ == "__main__":
    main()
