"""What federation costs: rounds of FedAvg against a bare loop with the same number of steps.

Ours samples the cohort, gathers and normalises uint8 images, loads and aggregates parameters,
computes diagnostics, and writes records; the bare loop trains one model on tensors
prepared beforehand. Run: python benchmarks/fl_overhead.py
"""

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F

from federation import equal_shards, experiment, federation, rounds
from fedlens import rng
from fedlens.data.examples import ImageExamples
from fedlens.data.images import Images
from fedlens.data.transforms import Pipeline
from fedlens.models import heads
from fedlens.models.architectures import backbones
from fedlens.models.classifier import Classifier
from fedlens.runtime.allocator import keep_large_blocks
from side_by_side import compare, print_table, print_verdict

BACKBONE, RESOLUTION = "dino_vits16", 96
CLIENTS, COHORT, STEPS, BATCH, CLASSES = 100, 10, 4, 32, 100
MIN_RATIO = 0.95


def bare(model: Classifier, inputs: torch.Tensor, labels: torch.Tensor) -> Callable[[], int]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4)

    def work() -> int:
        for _ in range(COHORT * STEPS):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        return 1

    return work


def main() -> None:
    keep_large_blocks()  # as every run does
    draw = rng.generator(0, "benchmark")
    count = CLIENTS * BATCH * STEPS
    pixels = torch.randint(256, (count, 3, 32, 32), generator=draw, dtype=torch.uint8)
    images = Images(pixels, torch.randint(CLASSES, (count,), generator=draw))
    row = backbones.find(BACKBONE)
    backbone = backbones.create(row, resolution=RESOLUTION)
    model = Classifier(backbone, heads.linear(backbones.width(backbone), CLASSES, 0))
    examples = ImageExamples(images, None, Pipeline(RESOLUTION, row.mean, row.std))
    first = torch.arange(BATCH)
    plain = bare(copy.deepcopy(model), examples.batch(first), images.labels[first])
    shards = equal_shards(CLIENTS, BATCH * STEPS)
    overrides = [f"federated.local_steps={STEPS}", f"train.batch_size={BATCH}", "augment=none"]
    with federation(experiment(model, examples, shards, CLASSES), overrides) as federated:
        comparison = compare(
            {"fedlens": rounds(federated), "bare": plain},
            min_repeats=3,
            max_repeats=4,
            uncertainty=0.01,
        )
    seconds = [f"{1 / comparison.speed(side):.2f}" for side in comparison.speeds]
    print(
        f"{BACKBONE} at {RESOLUTION} px, {COHORT} clients × {STEPS} steps × batch {BATCH}, "
        f"{torch.get_num_threads()} threads; seconds per round"
    )
    print_table(
        ["fedlens", "bare loop", "ratio", "repeats"],
        [[*seconds, f"{comparison.ratio:.3f}", str(len(comparison.ratios))]],
    )
    met = comparison.ratio >= MIN_RATIO
    print_verdict("fl_overhead", {"ratio": comparison.ratio}, {"min_ratio": MIN_RATIO}, met)


if __name__ == "__main__":
    main()
