"""What more clients cost: time per round for many clients, peak memory for large cohorts.

Time: K = 100 against K = 100,000 clients with shards of one size, at the same cohort of 10. Memory:
the peak of a process whose rounds have 100 clients over that of one with 10, on a model whose
parameters take more memory than all else. Run: python benchmarks/fl_scale.py
"""

import argparse
import resource
import subprocess
import sys

import torch
from torch import nn

from federation import equal_shards, experiment, federation, rounds
from fedlens import rng
from fedlens.data.examples import TensorExamples
from fedlens.experiments.build import Experiment
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


def setting(clients: int, hidden: int) -> Experiment:
    draw = rng.generator(0, "benchmark")
    count = clients * SHARD
    inputs = torch.randn(count, INPUTS, generator=draw)
    labels = torch.randint(CLASSES, (count,), generator=draw)
    shards = equal_shards(clients, SHARD)
    return experiment(network(hidden), TensorExamples(inputs, labels), shards, CLASSES)


def overrides(clients: int, cohort: int) -> list[str]:
    return [f"federated.participation={cohort / clients}", f"train.batch_size={BATCH}"]


def peak_memory(cohort: int) -> float:
    """MiB of a child process that runs three rounds of `cohort` clients."""
    child = [sys.executable, __file__, "--cohort", str(cohort)]
    return float(subprocess.run(child, check=True, capture_output=True, text=True).stdout)


def run_in_child(cohort: int) -> None:
    with federation(setting(FEW, LARGE), overrides(FEW, cohort)) as federated:
        rounds(federated, 3)()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--cohort",
        type=int,
        help="clients a round, in a child process",
    )
    if cohort := parser.parse_args().cohort:
        run_in_child(cohort)
        return
    keep_large_blocks()
    with (
        federation(setting(MANY, SMALL), overrides(MANY, COHORT)) as many,
        federation(setting(FEW, SMALL), overrides(FEW, COHORT)) as few,
    ):
        comparison = compare({f"K={MANY:,}": rounds(many, 20), f"K={FEW}": rounds(few, 20)})
    time_ratio = 1 / comparison.ratio
    seconds = [f"{1000 / comparison.speed(side):.1f} ms" for side in comparison.speeds]
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
