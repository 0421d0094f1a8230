"""Training throughput: our whole step against a bare forward/backward/step loop.

Ours gathers, augments, resizes and normalises uint8 images, draws from addressed generators, keeps
a tally and checks for NaN; the bare loop trains on one tensor prepared beforehand. Same model,
batch size and optimizer. Run: python benchmarks/train_step.py
"""

import copy
from collections.abc import Callable
from itertools import count

import torch
import torch.nn.functional as F

from fedlens import rng
from fedlens.data.examples import ImageExamples, shuffled
from fedlens.data.images import Images
from fedlens.data.transforms import Augmentation, Pipeline
from fedlens.models import heads
from fedlens.models.architectures import backbones
from fedlens.models.classifier import Classifier
from fedlens.runtime.allocator import keep_large_blocks
from fedlens.training.precision import Precision
from fedlens.training.step import StepSettings, Tally, local_step
from side_by_side import compare, print_table, print_verdict

SETTINGS = (
    ("dino_vits16", 96, 32, 2),
    ("vit_tiny", 112, 32, 4),
)  # backbone, px, batch, steps in a repeat
CLASSES = 100
MIN_RATIO = 0.97


def optimizer_of(model: Classifier) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4)


def ours(model: Classifier, examples: ImageExamples, batch: int, steps: int) -> Callable[[], int]:
    optimizer, settings = optimizer_of(model), StepSettings(Precision("fp32", "cpu"))
    repeats = count()

    def work() -> int:
        stream = rng.Stream(0, ("benchmark", next(repeats)))
        order = shuffled(len(examples), batch, stream.draw("order"))
        tally = Tally()
        for step, index in enumerate(order[:steps]):
            local_step(
                model, optimizer, examples, index, settings, tally,
                stream=stream, step=step, width=model.head.in_features,
            )  # fmt: skip
        return tally.seen

    return work


def bare(
    model: Classifier, inputs: torch.Tensor, labels: torch.Tensor, steps: int
) -> Callable[[], int]:
    optimizer = optimizer_of(model)

    def work() -> int:
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        return steps * len(labels)

    return work


def main() -> None:
    keep_large_blocks()  # as every run does
    draw = rng.generator(0, "benchmark")
    pixels = torch.randint(256, (2048, 3, 32, 32), generator=draw, dtype=torch.uint8)
    images = Images(pixels, torch.randint(CLASSES, (2048,), generator=draw))
    print(f"random weights and pixels, {torch.get_num_threads()} threads; images per second")
    figures, rows = {}, []
    for name, resolution, batch, steps in SETTINGS:
        row = backbones.find(name)
        backbone = backbones.create(row, resolution=resolution)
        model = Classifier(backbone, heads.linear(backbones.width(backbone), CLASSES, 0))
        pipeline = Pipeline(resolution, row.mean, row.std, Augmentation(crop_padding=4, flip=True))
        examples = ImageExamples(images, None, pipeline)
        first = torch.arange(batch)
        comparison = compare(
            {
                "fedlens": ours(model, examples, batch, steps),
                "bare": bare(
                    copy.deepcopy(model), examples.batch(first), images.labels[first], steps
                ),
            },
            uncertainty=0.01,
        )
        figures[f"{name}_{resolution}px"] = comparison.ratio
        rows.append(comparison.row(f"{name}, {resolution} px, batch {batch}"))
    print_table(["setting", "fedlens", "bare loop", "ratio", "repeats"], rows)
    met = min(figures.values()) >= MIN_RATIO
    print_verdict("train_step", figures, {"min_ratio": MIN_RATIO}, met)


if __name__ == "__main__":
    main()
