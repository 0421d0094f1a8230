"""Are the estimates of `fedlens suite --dry-run` right? Predicted beside measured, for eight runs.

Every run is short and a process of its own. Memory: the peak of its resident set, as the system
counts it. Time: seconds per training image, as the run records them. Ratios: predicted / measured.

    python benchmarks/estimates.py            # about four minutes on two cores
    python benchmarks/estimates.py pico       # shapes whose name contains it
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from fedlens.config.compose import compose
from fedlens.runtime.units import size_text
from fedlens.store.run_folder import RunFolder
from fedlens.suites.estimates.calculator import Calculator
from fedlens.suites.estimates.cost import on_features
from fedlens.suites.estimates.machines import KNOWN, ThisMachine
from fedlens.suites.plan import folder_of

SMALL = ["backbone.pretrained=false", "evaluate.test=false", "data.train_per_class=40"]
TINY = [*SMALL, "backbone=vit_tiny", "data=cifar100", "augment=none"]
CLIENTS = ["federated.clients=10", "federated.participation=0.3", "federated.rounds=2",
           "federated.local_steps=4"]  # fmt: skip
STEPS = ["train.epochs=1", "train.steps_per_epoch=8"]

SHAPES = {
    "pico, central": ["quickstart", *SMALL, *STEPS],
    "pico, sparse FedAvg": ["quickstart_sparse", *SMALL, "federated.rounds=2", "sparse.rounds=1",
                            "sparse.examples=128"],
    "ViT-Ti/16 at 64 px, central, batch 64":
        ["centralized", *TINY, *STEPS, "backbone.resolution=64", "train.batch_size=64"],
    "ViT-Ti/16 at 112 px, central, batch 32":
        ["centralized", *TINY, *STEPS, "backbone.resolution=112", "train.batch_size=32"],
    "ViT-Ti/16 at 64 px, FedAvg, batch 64":
        ["fedavg_iid", *TINY, *CLIENTS, "backbone.resolution=64", "train.batch_size=64"],
    "ViT-Ti/16 at 112 px, FedAvg, batch 32":
        ["fedavg_iid", *TINY, *CLIENTS, "backbone.resolution=112", "train.batch_size=32"],
    "ViT-Ti/16 at 64 px, sparse FedAvg, batch 32":
        ["sparse_fedavg", *TINY, *CLIENTS, "backbone.resolution=64", "train.batch_size=32",
         "sparse.rounds=1", "sparse.examples=64"],
    "ViT-Ti/16 at 64 px, head on features":
        ["head_only", *TINY, "backbone.resolution=64", "train.epochs=2"],
}  # fmt: skip


def main() -> None:
    texts = sys.argv[1:]
    chosen = {n: w for n, w in SHAPES.items() if not texts or any(t in n for t in texts)}
    verdict = {}
    with Calculator() as calculator, TemporaryDirectory() as folder:
        for name, (experiment, *words) in chosen.items():
            words = [*words, "device=cpu", f"run.root={folder}"]
            config = compose(experiment, words)
            machine = ThisMachine(calculator)
            predicted_bytes = machine.peak_memory(config)
            measured_bytes = run_and_measure(experiment, words)
            ratios = {"memory": predicted_bytes / measured_bytes}
            line = f"memory {size_text(predicted_bytes)} / {size_text(measured_bytes)}"
            if not on_features(config):
                measured = seconds_per_image(folder_of(config))
                predicted = machine(config, ["train"])["train"]
                ratios["time"] = predicted / measured
                rate = machine.counts.count(config, "train").flops / measured
                line += f", {1e3 * predicted:.2f} / {1e3 * measured:.2f} ms an image"
                line += f", {rate / 1e9:.1f} GFLOP/s ({rate / KNOWN['cpu2'].single:.0%} of cpu2)"
            shown = ", ".join(f"{key} {ratio:.2f}" for key, ratio in ratios.items())
            print(f"{name}: {line}; ratios: {shown}", flush=True)
            verdict[name] = {key: round(ratio, 3) for key, ratio in ratios.items()}
    worst = max(abs(one["memory"] - 1) for one in verdict.values())
    print(json.dumps({"ratios": verdict, "largest error of memory": round(worst, 3)}))


def run_and_measure(experiment: str, words: list[str]) -> int:
    """Bytes of the largest resident set of `fedlens run`."""
    command = [sys.executable, "-m", "fedlens.cli", "run", experiment, *words]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    errors = child.stderr.read()
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed:\n{errors}")
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def seconds_per_image(folder: RunFolder) -> float:
    """Of the last epoch or round."""
    lines = Path(folder.journal("timings").path).read_text(encoding="utf-8").splitlines()
    return 1 / float(json.loads(lines[-1])["images_per_second"])


if __name__ == "__main__":
    main()
