"""The work that every side does: one folder with data, plan and initial weights, read by all.

The sides run in environments of their own, without fedlens, so this file needs only torch, timm and
safetensors, except for `prepare`, which the main environment calls. Rounds are counted from 1; the
first one is for warming up and is not measured.
"""

import argparse
import hashlib
import importlib.metadata
import json
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

SEED = 0
CLIENTS, COHORT, SHARD, BATCH = 100, 10, 128, 32
CLASSES, TEST_PER_CLASS = 100, 20
MOMENTUM = 0.9
WARM_UP = 1  # rounds


@dataclass(frozen=True)
class Setting:
    """What differs between the workloads."""

    resolution: int
    lr: float


SETTINGS = {"cnn": Setting(resolution=32, lr=0.03), "vit": Setting(resolution=64, lr=0.01)}


def model(name: str) -> nn.Module:
    """With weights from torch's global generator; no dropout and no running statistics."""
    if name == "vit":
        return timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=CLASSES)
    net = nn.Sequential(  # McMahan et al., 2017, for three channels
        nn.Conv2d(3, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 5 * 5, 512),
        nn.ReLU(),
        nn.Linear(512, CLASSES),
    )
    for layer in net:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")  # learns from round 1 on
    return net


# --- writing the folder


def prepare(name: str, folder: Path, rounds: int) -> None:
    """Writes what `Workload` reads; needs fedlens, whose data and random streams these are."""
    from fedlens import rng
    from fedlens.data import examples
    from fedlens.data.images import Images
    from fedlens.data.sources import synthetic
    from fedlens.federated.sampling import uniform

    def sized(images: Images) -> dict[str, Tensor]:
        inputs = images.pixels.float().div_(127.5).sub_(1)
        size = SETTINGS[name].resolution
        if inputs.shape[-1] != size:
            inputs = F.interpolate(inputs, (size, size), mode="bicubic", align_corners=False)
        return {"inputs": inputs, "labels": images.labels}

    def order(round_: int, client: int) -> Tensor:
        draw = rng.Stream(SEED, ("client", round_, client)).draw("order", 0)
        return torch.stack(examples.shuffled(SHARD, BATCH, draw))

    data = synthetic.draw_dataset(
        train_per_class=CLIENTS * SHARD // CLASSES, test_per_class=TEST_PER_CLASS
    )
    everyone = torch.randperm(CLIENTS * SHARD, generator=rng.generator(SEED, "partition"))
    clients = everyone.view(CLIENTS, SHARD).sort().values
    numbers = range(1, rounds + 1)
    cohorts = [uniform(SEED, round_, CLIENTS, COHORT) for round_ in numbers]
    plan = {
        "clients": clients,
        "cohorts": torch.tensor(cohorts),
        "batches": torch.stack(
            [
                torch.stack([clients[k][order(round_, k)] for k in members])
                for round_, members in zip(numbers, cohorts, strict=True)
            ]
        ),
    }
    with rng.scoped(rng.generator(SEED, "model", name)):
        initial = model(name).state_dict()
    pretrained = _pretrained() if name == "vit" else {}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(sized(data.load_train()), folder / "train.safetensors")
    save_file(sized(data.load_test()), folder / "test.safetensors")
    save_file(plan, folder / "plan.safetensors")
    save_file({**initial, **pretrained}, folder / "initial.safetensors")
    about = {
        "name": name,
        "seed": SEED,
        "rounds": rounds,
        "lr": SETTINGS[name].lr,
        "momentum": MOMENTUM,
        "initial": "pretrained" if pretrained else "random",
    }
    (folder / "workload.json").write_text(json.dumps(about, indent=2) + "\n")


def _pretrained() -> dict[str, Tensor]:
    """The published weights of the ViT without its head, if they are on this machine, else none."""
    from fedlens.errors import FedlensError
    from fedlens.models.architectures import backbones, weights

    row = backbones.find("vit_tiny")
    backbone = backbones.create(row, resolution=SETTINGS["vit"].resolution)
    try:
        weights.load(backbone, row, weights.find(row, download=False))
    except FedlensError:
        return {}
    return backbone.state_dict()


# --- reading it


@dataclass(frozen=True)
class Workload:
    """Everything is in memory and nothing mapped, so no side loads pages while it is timed."""

    folder: Path

    @cached_property
    def about(self) -> dict[str, Any]:
        return json.loads((self.folder / "workload.json").read_text())

    @cached_property
    def train(self) -> dict[str, Tensor]:
        """float32 `inputs` [12800, 3, R, R] and int64 `labels`."""
        return self._read("train")

    @cached_property
    def test(self) -> dict[str, Tensor]:
        return self._read("test")

    @cached_property
    def plan(self) -> dict[str, Tensor]:
        """`clients` [100, 128]; `cohorts` [rounds, 10]; `batches` [rounds, 10, 4, 32]."""
        return self._read("plan")

    @cached_property
    def initial(self) -> dict[str, Tensor]:
        return self._read("initial")

    def cohort(self, round_: int) -> list[int]:
        return self.plan["cohorts"][round_ - 1].tolist()

    def batches(self, round_: int, client: int) -> Tensor:
        """Of a client in a round that it takes part in: indices [4, 32] into the training set."""
        return self.plan["batches"][round_ - 1, self.cohort(round_).index(client)]

    def model(self) -> nn.Module:
        """With the initial weights."""
        built = model(self.about["name"])
        built.load_state_dict(self.initial)
        return built

    def _read(self, part: str) -> dict[str, Tensor]:
        mapped = load_file(self.folder / f"{part}.safetensors")
        return {name: tensor.clone() for name, tensor in mapped.items()}


def train_client(net: nn.Module, work: Workload, round_: int, client: int) -> None:
    """The local work, in place, as torch's own tutorials write it."""
    optimizer = torch.optim.SGD(
        net.parameters(), lr=work.about["lr"], momentum=work.about["momentum"]
    )
    for batch in work.batches(round_, client):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(work.train["inputs"][batch]), work.train["labels"][batch])
        loss.backward()
        optimizer.step()


# --- arguments and results of a side


def arguments() -> argparse.ArgumentParser:
    """The command line that all sides share."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="written by workload.prepare")
    parser.add_argument("out", type=Path, help="JSON; final parameters go to .safetensors beside")
    parser.add_argument("--rounds", type=int, required=True, help="the first is for warming up")
    return parser


@dataclass
class Laps:
    """Seconds from one call to the next; the clock is running as soon as this exists."""

    seconds: list[float] = field(default_factory=list)
    last: float = field(default_factory=time.perf_counter)

    def lap(self) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.last)
        self.last = now


def report(
    out: Path,
    work: Workload,
    parameters: dict[str, Tensor],
    laps: Laps,
    *,
    packages: tuple[str, ...],
    processes: int,
    threads: int,
) -> None:
    """Writes the results: time, versions, accuracy and hash of the final parameters."""
    parameters = {name: tensor.detach().contiguous() for name, tensor in parameters.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file(parameters, out.with_suffix(".safetensors"))
    digest = hashlib.sha256()
    for name in sorted(parameters):
        digest.update(name.encode() + parameters[name].numpy().tobytes())
    results = {
        "workload": work.about,
        "versions": {name: importlib.metadata.version(name) for name in ("torch", *packages)},
        "processes": processes,
        "threads": threads,  # of each process
        "warm_up": WARM_UP,  # so many of the seconds do not count
        "seconds": laps.seconds,
        **evaluate(work, parameters),
        "sha256": digest.hexdigest(),
    }
    out.write_text(json.dumps(results, indent=2) + "\n")


@torch.inference_mode()
def evaluate(work: Workload, parameters: dict[str, Tensor]) -> dict[str, float]:
    """Accuracy and loss on the test set."""
    net = work.model().eval()
    net.load_state_dict(parameters)
    labels = work.test["labels"]
    logits = torch.cat([net(inputs) for inputs in work.test["inputs"].split(250)])
    return {
        "accuracy": (logits.argmax(1) == labels).float().mean().item(),
        "loss": F.cross_entropy(logits, labels).item(),
    }
