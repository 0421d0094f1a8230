"""The table of tiny runs, of analyses of them, and of pieces of the library; and how it is lived.

`python -m tests.golden.runs FILE` writes what all of them come to on this machine.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer

from tests.golden import adapter, sketches

Facts = dict[str, Any]

TREE = Path(__file__).resolve().parents[2]

# --- how runs are asked for: these words may be renamed, the names on the left of tables may not

WORLD = [
    *("data=synthetic", "augment=none", "backbone=vit_pico", "backbone.pretrained=false"),
    *("data.train_per_class=4", "data.test_per_class=2", "data.validation=0.25"),
    *("train.epochs=2", "train.lr=0.05", "train.schedule.warmup=0.1", "train.batch_size=64"),
    *("threads=1", "device=cpu", "evaluate.every=1", "checkpoint.every=1"),
]
CLIENTS = [
    *("federated.clients=5", "federated.participation=0.6", "federated.rounds=2"),
    *("federated.local_steps=2", "train.batch_size=16"),
]
IN_TURN = ["federated.clients=6", "federated.participation=0.5", "federated.rounds=3"]
SKEWED = ["partition=dirichlet", "partition.alpha=0.3", "partition.min_size=5"]
ONE_CLASS = [
    *("federated.clients=100", "federated.participation=0.04"),
    *("partition=classes", "partition.classes_per_client=1"),
]
ON_FEATURES = ["train=head", "train.lr=0.3", "train.batch_size=16"]
# The last parameters meet the test split: the best on validation may be those before training.
TENTH = [
    *("head=ridge", "sparse.density=0.1", "sparse.rounds=2", "sparse.examples=32"),
    "evaluate.select=last",
]
BY_CLIENTS = ["sparse.source=clients", "sparse.examples=8"]

CENTRAL = ("quickstart", WORLD)
FEDERATED = ("quickstart_fedavg", [*WORLD, *CLIENTS])
SPARSE = ("sparse_fedavg", [*WORLD, *CLIENTS, *TENTH])

Row = tuple[tuple[str, list[str]], list[str]]

RUNS: dict[str, Row] = {
    "central": (CENTRAL, []),
    "central_early_stopping": (
        CENTRAL,
        [
            *("train.epochs=6", "train.early_stopping=1", "train.schedule.name=step"),
            *(
                "train.schedule.gamma=0.5",
                "train.optimizer.nesterov=true",
                "train.label_smoothing=0.1",
            ),
        ],
    ),
    "central_clipped_and_curve": (
        CENTRAL,
        [
            *("train.clip_norm=1.0", "train.micro_batch=32", "train.optimizer.weight_decay=0.01"),
            *("train.schedule.name=linear", "train.schedule.floor=0.1", "evaluate.test_curve=true"),
        ],
    ),
    "central_augmented_last_blocks": (
        CENTRAL,
        ["augment=standard", "train.trainable=last_blocks:2", "train.schedule.name=exponential"],
    ),
    "central_strongly_augmented": (
        CENTRAL,
        ["augment=strong", "train.epochs=1", "backbone.freeze_blocks=1", "head.dropout=0.2"],
    ),
    "central_sparse": (
        ("sparse_centralized", [*WORLD, *TENTH]),
        ["train.epochs=2", "train.optimizer.weight_decay=0.01"],
    ),
    "central_head": (("head_only", WORLD), ["train.lr=0.3"]),
    "central_ridge": (("ridge", WORLD), []),
    "central_class_means": (("ridge", WORLD), ["head=class_means"]),
    "central_trained_head": (CENTRAL, ["head=trained", "head.steps=20", "head.lr=0.3"]),
    "fedavg_iid": (FEDERATED, []),
    "fedavg_one_class": (FEDERATED, ONE_CLASS),
    "fedavg_dirichlet": (FEDERATED, SKEWED),
    "fedavg_quantity": (
        FEDERATED,
        ["partition=quantity", "partition.sigma=0.8", "partition.min_size=5"],
    ),
    "fedavg_budget_last": (
        ("fedavg_noniid", [*WORLD, *CLIENTS]),
        [
            *("partition.classes_per_client=20", "federated.rounds=auto"),
            *("federated.local_step_budget=5", "evaluate.select=last", "seed=3"),
        ],
    ),
    "fedprox": (FEDERATED, [*SKEWED, "algorithm=fedprox", "algorithm.proximal=0.5"]),
    "scaffold": (FEDERATED, [*SKEWED, "algorithm=scaffold", "federated.rounds=3"]),
    "fednova": (FEDERATED, [*SKEWED, "algorithm=fednova", "federated.min_local_steps=1"]),
    "fedadam": (FEDERATED, [*SKEWED, "algorithm=fedadam", "algorithm.server.lr=0.003"]),
    "fedyogi": (FEDERATED, [*SKEWED, "algorithm=fedyogi", "algorithm.server.lr=0.003"]),
    "fedavgm": (FEDERATED, [*SKEWED, "algorithm=fedavgm", "federated.rounds=3"]),
    "median": (FEDERATED, [*SKEWED, "algorithm=median"]),
    "clipped_mean": (
        FEDERATED,
        [*SKEWED, "algorithm=norm_clipping", "algorithm.aggregator.clip_norm=0.1"],
    ),
    "trimmed_mean": (
        FEDERATED,
        [
            *SKEWED,
            "algorithm=trimmed_mean",
            "algorithm.aggregator.trim=0.2",
            "federated.participation=1",
        ],
    ),
    "task_arithmetic": (FEDERATED, [*SKEWED, "algorithm=task_arithmetic"]),
    "ties": (FEDERATED, [*SKEWED, "algorithm=ties"]),
    "dare": (FEDERATED, [*SKEWED, "algorithm=dare"]),
    "breadcrumbs": (FEDERATED, [*SKEWED, "algorithm=breadcrumbs"]),
    "consensus": (
        FEDERATED,
        [*SKEWED, "algorithm=consensus", "algorithm.aggregator.threshold=0.1"],
    ),
    "cyclic": (FEDERATED, [*IN_TURN, "algorithm=cyclic", "algorithm.server.lr=2"]),
    "cyclic_ties": (FEDERATED, [*IN_TURN, "algorithm=cyclic_ties"]),
    "dropout_and_stragglers": (
        FEDERATED,
        [
            *("federated.dropout=0.4", "federated.min_local_steps=1", "federated.rounds=3"),
            *("federated.local_steps=3", "federated.participation=1"),
        ],
    ),
    "early_stopping_of_rounds": (
        FEDERATED,
        [
            *("federated.rounds=6", "train.early_stopping=1", "head=ridge", "train.lr=0.2"),
            "train.schedule.name=constant",
        ],
    ),
    "ridge_head": (FEDERATED, [*SKEWED, "head=ridge", "evaluate.select=last"]),
    "ridge_head_alone": (("federated_ridge", [*WORLD, *CLIENTS]), []),
    "class_means_head": (FEDERATED, ["head=class_means"]),
    "trained_head": (FEDERATED, ["head=trained", "head.steps=8", "head.lr=0.3"]),
    "head_vectorised": (("federated_head", [*WORLD, *CLIENTS]), ON_FEATURES),
    "head_vectorised_one_class": (
        ("federated_head", [*WORLD, *CLIENTS]),
        [*ON_FEATURES, *ONE_CLASS, "federated.rounds=4"],
    ),
    "head_one_by_one": (
        ("federated_head", [*WORLD, *CLIENTS]),
        [*ON_FEATURES, "engine.vectorise=false"],
    ),
    "updates_kept": (
        ("federated_head", [*WORLD, *CLIENTS]),
        [
            *(*ON_FEATURES, *SKEWED, "federated.local_steps=10", "federated.rounds=4"),
            *("train.lr=0.3", "federated.keep_updates=2", "evaluate.select=last"),
        ],
    ),
    "least_sensitive": (SPARSE, []),
    "most_sensitive": (SPARSE, ["sparse.rule=most_sensitive"]),
    "lowest_magnitude": (SPARSE, ["sparse.rule=lowest_magnitude"]),
    "highest_magnitude": (SPARSE, ["sparse.rule=highest_magnitude", "sparse.scope=tensor"]),
    "random": (SPARSE, ["sparse.rule=random"]),
    "calibrated_in_one_round": (SPARSE, ["sparse.rounds=1", "sparse.biases=true"]),
    "calibrated_in_four_rounds": (SPARSE, ["sparse.rounds=4", "sparse.norms=true"]),
    "calibrated_by_mean": (
        SPARSE,
        ["sparse.method=mean", "sparse.labels=data", "sparse.target=log_prob", "sparse.passes=2"],
    ),
    "scored_by_clients": (SPARSE, BY_CLIENTS),
    "voted_by_majority": (SPARSE, [*BY_CLIENTS, "sparse.voting=majority", "sparse.rounds=1"]),
    "voted_by_union": (
        SPARSE,
        [*BY_CLIENTS, "sparse.voting=union", "sparse.rounds=1", "sparse.clients=3"],
    ),
    "voted_by_intersection": (
        SPARSE,
        [*BY_CLIENTS, "sparse.voting=intersection", "sparse.rounds=1", "sparse.clients=3"],
    ),
    "sparse_one_class": (SPARSE, ONE_CLASS),
    "sparse_scaffold": (SPARSE, [*SKEWED, "algorithm=scaffold"]),
    "parallel": (FEDERATED, [*SKEWED, "engine=parallel", "engine.workers=2"]),
    "sparse_parallel": (SPARSE, [*BY_CLIENTS, "engine=parallel", "engine.workers=2"]),
    "sparse_flower": (SPARSE, [*BY_CLIENTS, "engine=flower_simulation", "engine.workers=1"]),
}
FLOWER = {"sparse_flower"}  # needs the extra

# Runs that differ in how they are run alone, so they end in the same bits.
TWINS = {
    "parallel": "fedavg_dirichlet",
    "sparse_parallel": "scored_by_clients",
    "sparse_flower": "scored_by_clients",
}

MERGING = ("average", "task_arithmetic", "ties", "dare", "breadcrumbs", "consensus")

# The run that is analysed, other runs that are named, and the words of the command.
ANALYSES: dict[str, tuple[str, list[str], list[str]]] = {
    "alpha": ("updates_kept", [], ["alpha", "updates_kept", "--alphas", "-0.5:2:0.5"]),
    "alpha_from_ridge": (
        "updates_kept",
        [],
        ["alpha", "updates_kept", "--base", "ridge", "--alphas", "0,0.5,1"],
    ),
    "alpha_of_sparse": (
        "least_sensitive",
        [],
        ["alpha", "least_sensitive", "--alphas", "0,0.5,1,2"],
    ),
    "composed": (
        "updates_kept",
        ["head_vectorised"],
        ["compose", "updates_kept=1", "head_vectorised=-0.5", "--alphas", "0,1"],
    ),
    "merged": (
        "updates_kept",
        [],
        [
            "merge",
            "updates_kept",
            "--scales",
            "0.3,1",
            "--parameter",
            "consensus.threshold=0.1",
            *(word for name in MERGING for word in ("--method", name)),
        ],
    ),
    "clients_edited": (
        "updates_kept",
        [],
        ["clients", "updates_kept", "--drop", "2", "--weight", "3=0.5"],
    ),
    "client_forgotten": (
        "updates_kept",
        [],
        ["forget", "updates_kept", "--client", "3", "--scales", "0,0.5,1,4", "--keep", "0.8"],
    ),
    "interference": ("updates_kept", [], ["interference", "updates_kept", "--alphas", "0,1,2"]),
}

# --- the library by itself


def _places(parts: list[torch.Tensor]) -> Facts:
    return {
        "sizes": sorted(len(part) for part in parts),
        "index_sha256": sketches.digest_in_order([part.to(torch.int64) for part in parts]),
    }


def _dealt(name: str, **keys: float) -> Callable[[], Facts]:
    labels = torch.arange(100).repeat(60)  # 6,000 examples of 100 classes
    return lambda: _places(adapter.shards(labels, 100, name, 1, **keys))


def _images() -> Facts:
    found = adapter.synthetic_images()
    return {
        split: {
            "sha256": sketches.digest([values]),
            "shape": list(values.shape),
            "mean": values.double().mean().item(),
            "std": values.double().std().item(),
        }
        for split, values in found.items()
    }


def _scores() -> Facts:
    """Of a small transformer whose weights are drawn here."""

    def drawn(*shape: int, seed: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    backbone = VisionTransformer(
        img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=0
    )
    head = torch.nn.Linear(16, 5)
    with torch.no_grad():
        for seed, value in enumerate([*backbone.parameters(), *head.parameters()]):
            value.copy_(0.3 * drawn(*value.shape, seed=seed))
    inputs, truth = drawn(8, 3, 16, 16, seed=1000), torch.arange(8) % 5
    return {
        f"{labels}_{target}": sketches.described(
            adapter.sensitivities(backbone, head, inputs, truth, labels, target)
        )
        for labels in ("sampled", "data", "expected")
        for target in ("logit", "log_prob")
    }


def _schedules() -> Facts:
    keys: dict[str, Any] = {"warmup": 0.2, "floor": 0.1, "gamma": 0.3, "stages": 3}
    shapes = ("constant", "cosine", "step", "linear", "exponential")
    return {shape: adapter.learning_rates(shape, 12, **keys) for shape in shapes}


LIBRARY: dict[str, Callable[[], Facts]] = {
    "random_numbers": lambda: {"drawn": adapter.random_numbers().tolist()[:8]},
    "synthetic_images": _images,
    "validation_split": lambda: _places(
        adapter.held_out(torch.arange(100).repeat_interleave(7), 0.15, 2)
    ),
    "partition_iid": _dealt("iid"),
    "partition_1_class": _dealt("classes", classes_per_client=1),
    "partition_5_classes": _dealt("classes", classes_per_client=5),
    "partition_50_classes": _dealt("classes", classes_per_client=50),
    "partition_dirichlet": _dealt("dirichlet", alpha=0.3, min_size=10),
    "partition_quantity": _dealt("quantity", sigma=1.0, min_size=10),
    "cohorts_by_chance": lambda: {"rounds": adapter.cohorts("uniform", 1, 20, 4, 6)},
    "cohorts_cyclic": lambda: {"rounds": adapter.cohorts("cyclic", 1, 20, 4, 6)},
    "initial_weights": lambda: sketches.described(adapter.initial_weights(0)),
    "schedules": _schedules,
    "fisher_scores": _scores,
}

# --- how the table is lived


class World:
    """Runs whatever is asked for, once, below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.known: dict[str, Facts] = {}

    @property
    def names(self) -> list[str]:
        return [*LIBRARY, *RUNS, *ANALYSES]

    def facts(self, name: str) -> Facts:
        if name not in self.known:
            with _one_thread():
                # As JSON gives it back, so that it compares with what was read from a file.
                self.known[name] = json.loads(json.dumps(self._found(name)))
        return self.known[name]

    def _found(self, name: str) -> Facts:
        if name in LIBRARY:
            return LIBRARY[name]()
        if name in ANALYSES:
            run, others, words = ANALYSES[name]
            for one in (run, *others):
                self.facts(one)
            return adapter.analyse(words, self.root / run)
        if name in FLOWER:  # Ray leaves files open, which must not trouble whoever comes next
            code = f"from tests.golden.runs import lived; lived({name!r}, {str(self.root)!r})"
            subprocess.run([sys.executable, "-c", code], cwd=TREE, check=True)
            return _of_run(self.root / name)
        return _of_run(lived(name, self.root))


def lived(name: str, root: str | Path) -> Path:
    """The folder of a run of the table, run to the end."""
    (experiment, common), overrides = RUNS[name]
    return adapter.run(experiment, [*common, *overrides], Path(root), name)


def _of_run(folder: Path) -> Facts:
    found: Facts = {
        "result": adapter.result(folder),
        "rounds": adapter.metrics(folder),
        "parameters": {
            which: sketches.described(tensors)
            for which, tensors in adapter.parameters(folder).items()
        },
    }
    if curve := adapter.test_curve(folder):
        found["test_curve"] = curve
    if held := adapter.class_counts(folder):
        found["clients"] = _places([torch.tensor(row) for row in held])
        found["clients"]["sizes"] = [sum(row) for row in held][:10]
    if masks := adapter.masks(folder):
        found["masks"] = sketches.of_masks(masks)
    return found


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def own_cache(folder: Path) -> Iterator[None]:
    """No feature and no image of another world; nothing that lies on this machine is needed."""
    told = {"FEDLENS_CACHE": str(folder)}
    hidden = ("FEDLENS_DATA", "FEDLENS_WEIGHTS")
    before = {key: os.environ.pop(key, None) for key in (*told, *hidden)}
    os.environ.update(told)
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key, None)
            if value is not None:
                os.environ[key] = value


def made_with() -> Facts:
    """The machine's arithmetic: what it calls itself, and how it rounds a few layers of torch."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(64, 3, 32, 32, generator=draw)
    kernel = torch.randn(96, 3, 8, 8, generator=draw).requires_grad_()
    weight = torch.randn(384, 96, generator=draw).requires_grad_()
    with _one_thread():
        tokens = torch.conv2d(images, kernel, stride=8).flatten(2).transpose(1, 2)
        normal = torch.nn.functional.layer_norm(tokens, (96,))
        mixed = torch.nn.functional.scaled_dot_product_attention(normal, normal, normal)
        wide = torch.nn.functional.gelu(mixed @ weight.T)
        loss = wide.mean(1).log_softmax(1)[:, 0].sum()
        loss.backward()
    rounded = [value for value in (wide.detach(), kernel.grad, weight.grad) if value is not None]
    return {
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "arithmetic": sketches.digest(rounded),
    }


def record(path: Path, names: list[str] | None = None) -> None:
    """Lives the table and writes what came of it, a line each."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        world = World(Path(folder, "runs"))
        with own_cache(Path(folder, "cache")):
            for name in names or world.names:
                began = time.monotonic()
                world.facts(name)
                print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
    lines = {"made_with": made_with(), **{n: world.known[n] for n in names or world.names}}
    written = (f"{json.dumps(name)}: {_compact(facts)}" for name, facts in lines.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(written) + "\n}\n", encoding="utf-8")


def _compact(facts: Facts) -> str:
    return json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("names", nargs="*", help="those of the table; else all")
    asked = parser.parse_args()
    print(f"with {adapter.PACKAGE}")
    record(asked.file, asked.names)
