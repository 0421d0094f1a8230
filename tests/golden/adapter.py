"""All that the golden numbers know of fedlens: the one file to edit when its modules or keys move.

Everything goes out under neutral names, which are those of `expected.json` and never change. Left
of each arrow below is what fedlens calls a thing today, right of it what it is called here. Library
functions are imported where they are called, so that one that moved breaks its own test only.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import fedlens

PACKAGE = Path(fedlens.__file__).parent

# --- runs


def run(experiment: str, overrides: list[str], root: Path, name: str) -> Path:
    """Composes a config, runs it to the end, and returns its folder below `root`."""
    from fedlens.config.compose import compose
    from fedlens.experiments.run import start

    told = [*overrides, f"run.root={root}", f"run.name={name}"]
    return start(compose(experiment, told)).path


# Of one epoch or round. A dot goes one level down.
METRICS = {
    "epoch": "unit",
    "round": "unit",
    "lr": "learning_rate",
    "steps": "steps",
    "train.loss": "train_loss",
    "train.accuracy": "train_top1",
    "validation.loss": "validation_loss",
    "validation.top1": "validation_top1",
    "validation.top5": "validation_top5",
    "participants": "participants",
    "clients": "counted",
    "dropped": "dropped",
    "rejected": "rejected",
    "local_steps": "local_steps",
    "client_losses": "client_losses",
    "update_norms": "update_norms",
    "drift": "drift",
    "cosine": "cosine",
    "sign_agreement": "sign_agreement",
    "bytes_down": "bytes_down",
    "bytes_up": "bytes_up",
    "per_client.mean": "clients_mean_top1",
    "per_client.worst_decile": "clients_worst_decile_top1",
}
TEST_CURVE = {
    "epoch": "unit",
    "round": "unit",
    "loss": "test_loss",
    "top1": "test_top1",
    "top5": "test_top5",
    "test.loss": "test_loss",
    "test.top1": "test_top1",
    "test.top5": "test_top5",
}
RESULT = {
    "unit": "counts",
    "units": "units",
    "choice.unit": "chosen_unit",
    "choice.chosen_on": "chosen_on",
    "validation.loss": "validation_loss",
    "validation.top1": "validation_top1",
    "validation.top5": "validation_top5",
    "test.loss": "test_loss",
    "test.top1": "test_top1",
    "test.top5": "test_top5",
    "test.count": "test_count",
    "test.per_class": "test_per_class",
    "per_client.mean": "clients_mean_top1",
    "per_client.worst_decile": "clients_worst_decile_top1",
    "facts.l2": "ridge_lambda",
    "facts.temperature": "temperature",
    "facts.statistics_bytes_up": "statistics_bytes_up",
    "facts.calibration_bytes_up": "calibration_bytes_up",
    "facts.head_rounds": "head_rounds",
    "facts.head_bytes_up": "head_bytes_up",
    "facts.weights_trained": "weights_trained",
    "facts.weights_maskable": "weights_maskable",
}
# Values that may be renamed with the keys.
WORDS: dict[str, str] = {"requested": "asked for"}


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Of every epoch or round, without what the clock said."""
    return [neutral(line, METRICS) for line in _lines(folder / "metrics.jsonl")]


def test_curve(folder: Path) -> list[dict[str, Any]]:
    return [neutral(line, TEST_CURVE) for line in _lines(folder / "test_curve.jsonl")]


def result(folder: Path) -> dict[str, Any]:
    return neutral(_json(folder / "result.json"), RESULT)


def class_counts(folder: Path) -> list[list[int]] | None:
    """How many training examples of each class each client holds; None of a central run."""
    path = folder / "partition.json"
    return _json(path)["histogram"] if path.exists() else None


def parameters(folder: Path) -> dict[str, list[torch.Tensor]]:
    """What was learned, the head included: as chosen, and as it was at the end."""
    told = _json(folder / "result.json")
    units = {"chosen": told["choice"]["unit"], "last": told["units"]}
    found = {}
    for which, number in units.items():
        name = f"{told['unit']}-{number:06d}"
        tensors = load_file(folder / "checkpoints" / name / "tensors.safetensors")
        found[which] = [value for key, value in tensors.items() if key.startswith("model/")]
    return found


def masks(folder: Path) -> list[torch.Tensor] | None:
    """Which weights are trained, in the model's order; None where all are."""
    path = folder / "masks.safetensors"
    if not path.exists():
        return None
    from fedlens.sparse.mask_files import load

    return list(load(path)[0].values())


# --- analyses of finished runs

RECORD = {
    "kind": "kind",
    "norm": "norm",
    "round": "round",
    "rounds": "rounds",
    "clients": "clients",
    "coefficients": "coefficients",
    "chosen": "chosen",
    "choice.unit": "chosen_unit",
    "choice.chosen_on": "chosen_on",
    "barrier": "barrier",
    "test.loss": "test_loss",
    "test.top1": "test_top1",
    "test.top5": "test_top5",
    "test.target": "test_target_top1",
    "test.control": "test_control_top1",
    "cosine": "cosine",
    "sign_conflict": "sign_conflict",
    "sign_conflict_of_all": "sign_conflict_of_all",
    "pair": "pair",
    "disentanglement_error": "disentanglement_error",
    "disentanglement_error_by_task": "disentanglement_error_by_task",
    "accuracy_merged": "accuracy_merged",
    "accuracy_alone": "accuracy_alone",
    "accuracy_normalised": "accuracy_normalised",
    "accuracy_normalised_mean": "accuracy_normalised_mean",
}
CANDIDATE = {
    "alpha": "alpha",
    "method": "method",
    "scale": "scale",
    "edit": "edit",
    "target": "target_top1",
    "control": "control_top1",
    "validation.loss": "validation_loss",
    "validation.top1": "validation_top1",
    "validation.top5": "validation_top5",
}


def analyse(words: list[str], folder: Path) -> dict[str, Any]:
    """`fedlens arithmetic WORDS` about runs that lie beside `folder`; its record is of `folder`."""
    from fedlens.cli import app

    records = folder / "arithmetic"
    before = set(records.glob("*/record.json"))
    told = sys.argv
    sys.argv = ["fedlens", "arithmetic", *words, "--runs", str(folder.parent)]
    try:
        app(standalone_mode=False)
    finally:
        sys.argv = told
    (path,) = set(records.glob("*/record.json")) - before
    record = _json(path)
    rows = [neutral(row, CANDIDATE) for row in record.get("candidates", [])]
    return {**neutral(record, RECORD), **({"candidates": rows} if rows else {})}


# --- the library by itself, to tell where a change begins


def random_numbers() -> torch.Tensor:
    """Of a stream, by its address."""
    from fedlens import rng

    return torch.randint(1 << 40, (64,), generator=rng.generator(3, "golden", 1, "two"))


def synthetic_images() -> dict[str, torch.Tensor]:
    from fedlens.data.sources import synthetic

    data = synthetic.draw_dataset(train_per_class=4, test_per_class=2)
    train, test = data.load_train(), data.load_test()
    return {"train": train.pixels, "test": test.pixels, "train_labels": train.labels}


def held_out(labels: torch.Tensor, fraction: float, seed: int) -> list[torch.Tensor]:
    """The places of training and validation examples."""
    from fedlens.data.splits import stratified

    return list(stratified(labels, fraction, seed))


def shards(
    labels: torch.Tensor, clients: int, name: str, seed: int, **keys: float
) -> list[torch.Tensor]:
    """The places of every client's examples."""
    from fedlens.data.partitions.partition import partition

    if name in ("dirichlet", "quantity"):
        keys = {"min_size": 1, **keys}
    found = partition(labels, clients=clients, by=name, seed=seed, **keys)
    return [found.shard(client) for client in range(len(found))]


def cohorts(name: str, seed: int, clients: int, size: int, rounds: int) -> list[list[int]]:
    """Who takes part in each round."""
    from fedlens.registry import sampling

    draw = sampling[name].make
    return [list(draw(seed, n, clients=clients, size=size)) for n in range(1, rounds + 1)]


def initial_weights(seed: int) -> list[torch.Tensor]:
    """Of the embedded world's backbone, before anything is learned."""
    from fedlens.models.architectures import backbones

    backbone = backbones.create(backbones.find("vit_pico"), seed=seed)
    return [value.detach() for value in backbone.parameters()]


def learning_rates(shape: str, steps: int, **keys: Any) -> list[float]:
    """The factors of a schedule."""
    from fedlens.training.schedules import Schedule

    schedule = Schedule(name=shape, **keys)
    return [schedule.factor(step, steps) for step in range(steps)]


def sensitivities(
    backbone: torch.nn.Module,
    head: torch.nn.Linear,
    inputs: torch.Tensor,
    truth: torch.Tensor,
    labels: str,
    target: str,
) -> list[torch.Tensor]:
    """The diagonal Fisher scores of all parameters of the backbone, in its order."""
    from fedlens import rng
    from fedlens.data.examples import FeatureExamples
    from fedlens.models.classifier import Classifier
    from fedlens.sparse.sensitivity.fisher import sensitivity
    from fedlens.sparse.sensitivity.per_example_gradients import SquaredGradients

    model = Classifier(backbone, head).eval()
    names = [name for name, _ in model.named_parameters() if name.startswith("backbone")]
    found = sensitivity(
        SquaredGradients(model, names, inputs[:2]),
        FeatureExamples(inputs, truth),
        labels=labels,
        target=target,
        passes=2,
        micro_batch=3,
        stream=rng.Stream(0, ("golden",)),
    )
    return [found.mean()[name] for name in names]


# --- reading


def neutral(record: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """What `record` says of `names`, under our own; what it does not say is left out."""
    found: dict[str, Any] = {}
    for path, name in names.items():
        value: Any = record
        for key in path.split("."):
            value = value.get(key, ...) if isinstance(value, Mapping) else ...
        if value is not ...:
            found[name] = WORDS.get(value, value) if isinstance(value, str) else value
    return found


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _lines(path: Path) -> list[Any]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
