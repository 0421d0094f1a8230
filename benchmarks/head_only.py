"""Federated head training on cached features: a vectorised cohort against one client at a time.

Whole rounds, recorded as in a run: sampling, local steps, aggregation and diagnostics.
Run: python benchmarks/head_only.py
"""

import torch
from torch import nn

from federation import equal_shards, experiment, federation, rounds
from fedlens import rng
from fedlens.data.examples import FeatureExamples
from fedlens.experiments.build import Experiment
from fedlens.models import heads
from fedlens.models.classifier import Classifier
from fedlens.runtime.allocator import keep_large_blocks
from side_by_side import compare, print_table, print_verdict

CLIENTS, SHARD, STEPS, BATCH, WIDTH, CLASSES = 100, 450, 4, 64, 384, 100
EACH = 100  # rounds in a repeat
MIN_SPEED = 100.0  # rounds/s


def main() -> None:
    keep_large_blocks()
    draw = rng.generator(0, "benchmark")
    count = CLIENTS * SHARD
    examples = FeatureExamples(
        torch.randn(count, WIDTH, generator=draw), torch.randint(CLASSES, (count,), generator=draw)
    )
    overrides = ["train=head", f"federated.local_steps={STEPS}", f"train.batch_size={BATCH}"]

    def head_training() -> Experiment:
        model = Classifier(nn.Identity(), heads.linear(WIDTH, CLASSES, 0))
        return experiment(model, examples, equal_shards(CLIENTS, SHARD), CLASSES)

    with (
        federation(head_training(), overrides) as together,
        federation(head_training(), [*overrides, "engine.vectorise=false"]) as apart,
    ):
        comparison = compare(
            {"vectorised": rounds(together, EACH), "one by one": rounds(apart, EACH // 4)},
            uncertainty=0.02,
        )
    speed = comparison.speed("vectorised")
    print(
        f"K={CLIENTS}, 10 clients × {STEPS} steps × batch {BATCH}, {WIDTH} → {CLASSES}, "
        f"{torch.get_num_threads()} threads; rounds per second"
    )
    print_table(
        ["vectorised", "one by one", "ratio", "repeats"],
        [
            [
                *(f"{comparison.speed(side):.1f}" for side in comparison.speeds),
                f"{comparison.ratio:.2f}",
                str(len(comparison.ratios)),
            ]
        ],
    )
    figures = {"rounds_per_second": speed, "ratio": comparison.ratio}
    print_verdict("head_only", figures, {"rounds_per_second": MIN_SPEED}, speed >= MIN_SPEED)


if __name__ == "__main__":
    main()
