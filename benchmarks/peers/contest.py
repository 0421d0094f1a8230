"""Seconds per round of fedlens and of a peer, alternately, each as a process with the same work.

A peer is run in every configuration that its documentation suggests for such a machine, and its
fastest one counts. The sides do the same work if their parameters agree after a few rounds, before
rounding errors have grown. The arithmetic limit is the time that a round's matrix products and
convolutions take at the machine's rate for large products, measured after the last repeat.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from arithmetic import flop_of_step, gemm_rate
from peers import environments, workload
from side_by_side import Comparison, print_table, print_verdict

HERE = Path(__file__).resolve().parent
ROUNDS = {"cnn": 8, "vit": 3}
CHECKED = 2  # rounds, before the measured ones
SAME_WORK = 1e-3  # kernels round differently, and training amplifies it; more means other work

CONFIGURATIONS = {
    "flower": {
        "1 CPU an actor": ("--cpus-per-client", "1"),
        "2 CPUs an actor": ("--cpus-per-client", "2"),
    },
    "pfl": {
        "1 worker": ("--workers", "1"),
        "2 workers": ("--workers", "2"),
    },
}


@dataclass
class Side:
    """One way to do the work: a script, the interpreter it needs, and its results so far."""

    label: str
    command: tuple[str | Path, ...]
    options: tuple[str, ...] = ()
    speeds: list[float] = field(default_factory=list)  # rounds per second, in every repeat
    accuracy: float = 0.0

    def run(self, folder: Path, rounds: int) -> Path:
        """Returns the file with the results."""
        out = folder / f"{self.label}.json"
        subprocess.run(
            [*self.command, folder, out, "--rounds", str(rounds), *self.options], check=True
        )
        return out

    def parameters(self, folder: Path) -> dict[str, Tensor]:
        """After so few rounds that all sides should still agree."""
        return load_file(self.run(folder, CHECKED).with_suffix(".safetensors"))

    def measure(self, folder: Path, rounds: int) -> None:
        results = json.loads(self.run(folder, rounds + workload.WARM_UP).read_text())
        self.speeds.append(1 / statistics.median(results["seconds"][results["warm_up"] :]))
        self.accuracy = results["accuracy"]


def distance(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """The largest difference of any parameter."""
    if ours.keys() != theirs.keys():
        raise ValueError("the sides trained different models")
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


def contest(peer: str, targets: Mapping[str, float]) -> None:
    """The whole benchmark of one peer: parse, run alternately, print table and verdict."""
    options = _options(peer, list(targets))
    python = environments.python_of(peer)
    figures, rows, limits, same = {}, [], [], True
    for name in options.workloads:
        ours = Side(options.ours, (sys.executable, HERE / f"{options.ours}_side.py"))
        theirs = [
            Side(f"{peer}, {how}", (python, "-W", "ignore", HERE / f"{peer}_side.py"), arguments)
            for how, arguments in CONFIGURATIONS[peer].items()
        ]
        rounds = options.rounds or ROUNDS[name]
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            workload.prepare(name, folder, max(CHECKED, rounds + workload.WARM_UP))
            expected = ours.parameters(folder)
            distances = [distance(expected, side.parameters(folder)) for side in theirs]
            for _ in range(options.repeats):
                for side in (ours, *theirs):
                    side.measure(folder, rounds)
        ratios = [Comparison({"ours": ours.speeds, "theirs": side.speeds}).ratio for side in theirs]
        figures[name] = min(ratios)
        same = same and max(distances) <= SAME_WORK
        rows.append([name, ours.label, *_measured(ours), "", ""])
        limits.append(_limit(name, ours))
        rows += [
            [name, side.label, *_measured(side), f"{ratio:.2f}", f"{apart:.1e}"]
            for side, ratio, apart in zip(theirs, ratios, distances, strict=True)
        ]
    print_table(["workload", "side", "s/round", "accuracy", "ratio", "difference"], rows)
    print("", *limits, sep="\n")
    wanted = {name: targets[name] for name in options.workloads}
    met = same and all(figures[name] >= wanted[name] for name in wanted)
    print_verdict(f"vs_{peer}", figures, wanted, met)


def _measured(side: Side) -> list[str]:
    return [f"{1 / statistics.median(side.speeds):.3f}", f"{side.accuracy:.3f}"]


def _limit(name: str, ours: Side) -> str:
    """How near our rounds are to what the machine can compute."""
    steps = workload.COHORT * workload.SHARD // workload.BATCH
    size = workload.SETTINGS[name].resolution
    inputs = torch.randn(workload.BATCH, 3, size, size)
    flop = steps * flop_of_step(workload.model(name), inputs)
    rate = gemm_rate()
    seconds, limit = 1 / statistics.median(ours.speeds), flop / rate
    return (
        f"{name}: {flop / 1e9:.0f} GFLOP a round at {rate / 1e9:.0f} GFLOP/s take {limit:.3f} s; "
        f"ours takes {seconds:.3f} s, {limit / seconds:.0%} of the machine's arithmetic"
    )


def _options(peer: str, workloads: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=f"fedlens against {peer}; {os.cpu_count()} cores")
    parser.add_argument("--workloads", nargs="+", choices=workloads, default=workloads)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--rounds", type=int, help=f"measured ones; by default {ROUNDS}")
    parser.add_argument("--ours", choices=("fedlens", "bare"), default="fedlens")
    return parser.parse_args()
