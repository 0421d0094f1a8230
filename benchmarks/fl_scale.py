"""What more clients cost: time per round for many clients, peak memory for large cohorts.

Time: K = 100 against K = 100,000 clients with shards of one size, at the same cohort of 10. Memory:
the peak of a process that plays rounds with 100 clients over that of one with 10, on a model whose
parameters outweigh the rest. Run: python benchmarks/fl_scale.py
"""

import argparse
import resource
import subprocess
import sys

import torch
from torch import nn

from federation import equal_shards, federation, parts, rounds
from fedlens import rng
from fedlens.data.examples import FeatureExamples
from fedlens.models import heads
from fedlens.models.classifier import Classifier
from fedlens.runtime.allocator import keep_large_blocks
from side_by_side import compare, print_table, print_verdict

FEW, MANY, COHORT = 100, 100_000, 10
SHARD, BATCH, INPUTS, CLASSES = 32, 8, 16, 10
SMALL, LARGE = 256, 2048  # hidden units: for time, and for memory
MAX_RATIO = 1.1


def network(hidden: int) -> Classifier:
    layers = [nn.Linear(INPUTS, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()]
    return Classifier(nn.Sequential(*layers), heads.linear(hidden, CLASSES, 0))


def world(clients: int, hidden: int) -> object:
    draw = rng.generator(0, "benchmark")
    count = clients * SHARD
    features = torch.randn(count, INPUTS, generator=draw)
    labels = torch.randint(CLASSES, (count,), generator=draw)
    shards = equal_shards(clients, SHARD)
    return parts(network(hidden), FeatureExamples(features, labels), shards, CLASSES)


def told(clients: int, cohort: int) -> list[str]:
    return [
        f"federated.participation={cohort / clients}",
        f"train.batch_size={BATCH}",
        "engine.vectorise=false",
    ]


def peak_memory(cohort: int) -> float:
    """MiB of a child process that plays three rounds of `cohort` clients."""
    child = [sys.executable, __file__, "--cohort", str(cohort)]
    return float(subprocess.run(child, check=True, capture_output=True, text=True).stdout)


def play_in_child(cohort: int) -> None:
    with federation(world(FEW, LARGE), told(FEW, cohort)) as played:
        rounds(played, 3)()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cohort", type=int, help="what the child process is asked for")
    if cohort := parser.parse_args().cohort:
        play_in_child(cohort)
        return
    keep_large_blocks()
    with (
        federation(world(MANY, SMALL), told(MANY, COHORT)) as many,
        federation(world(FEW, SMALL), told(FEW, COHORT)) as few,
    ):
        found = compare({f"K={MANY:,}": rounds(many, 20), f"K={FEW}": rounds(few, 20)})
    time_ratio = 1 / found.ratio
    seconds = [f"{1000 / found.speed(side):.1f} ms" for side in found.speeds]
    large, small = peak_memory(100), peak_memory(10)
    memory_ratio = large / small
    print_table(
        ["", "many", "few", "ratio"],
        [
            [f"time per round, K = {MANY:,} / {FEW}", *seconds, f"{time_ratio:.3f}"],
            [
                "peak memory, cohort of 100 / 10",
                f"{large:.0f} MiB",
                f"{small:.0f} MiB",
                f"{memory_ratio:.3f}",
            ],
        ],
    )
    figures = {"time": time_ratio, "memory": memory_ratio}
    print_verdict("fl_scale", figures, {"max_ratio": MAX_RATIO}, max(figures.values()) <= MAX_RATIO)


if __name__ == "__main__":
    main()
