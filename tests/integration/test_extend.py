"""Rows from outside the package: the examples of docs/how-to/extend.md, run to a report."""

import json
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedlens.config.compose import compose
from fedlens.config.labels import labels
from fedlens.experiments.run import start
from fedlens.registry import REGISTRIES
from fedlens.reporting import report
from fedlens.reporting.study.content import About
from fedlens.store.run_folder import RunFolder

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "extend.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
ROWS = {
    "aggregator": "geometric_median",
    "server_optimizer": "sign_of_momentum",
    "client_optimizer": "fixed_momentum",
    "correction": "weight_pull",
    "model_average": "first_and_last",
    "sampling": "neighbours",
    "diagnostic": "largest_update",
    "mask_rule": "largest_saliency",
    "merge_method": "sign_mean",
    "partitioner": "sorted_blocks",
    "dataset": "stripes",
    "backbone": "small_resnet",
    "head": "shrunken_means",
    "engine": "last_to_first",
    "trainable": "attention_only",
    "question": "batch_sizes",
}
TINY = [
    *("data=stripes", "backbone=vit_pico", "backbone.pretrained=false", "augment=none"),
    *("federated.clients=4", "federated.participation=0.5", "federated.rounds=2"),
    *("federated.local_steps=2", "train.batch_size=8", "train.lr=0.01", "threads=1"),
    *("evaluate.every=1", "checkpoint.every=1"),
]
# What is run, and how the report's records call it.
RUNS: dict[str, tuple[list[str], dict[str, str]]] = {
    "dataset": ([], {"data": "stripes", "algorithm": "FedAvg", "partition": "IID"}),
    "aggregator": (
        ["algorithm.aggregator=geometric_median", "algorithm.aggregator.steps=3"],
        {"algorithm": "geometric median, steps 3"},
    ),
    "merge method": (["algorithm.aggregator=sign_mean"], {"algorithm": "sign mean"}),
    "server optimizer": (
        ["algorithm.server=sign_of_momentum", "algorithm.server.lr=0.001"],
        {"algorithm": "sign of momentum"},
    ),
    "client optimizer": (
        ["train.optimizer=fixed_momentum"],
        {"optimizer": "SGD with fixed momentum"},
    ),
    "correction": (
        ["algorithm.correction=weight_pull", "algorithm.correction.strength=0.1"],
        {"algorithm": "pull to the start, strength 0.1"},
    ),
    "model average": (
        ["algorithm.average=first_and_last"],
        {"algorithm": "FedAvg, evaluated by the mean of first and last round"},
    ),
    "sampling": (["algorithm.sampling=neighbours"], {"algorithm": "FedAvg, neighbouring clients"}),
    "partition": (
        ["partition=sorted_blocks", "partition.blocks=4"],
        {"partition": "sorted into 4 blocks"},
    ),
    "trainable": (
        ["train.trainable=attention_only", "seed=3"],
        {"trainable": "attention only"},
    ),
    "backbone": (
        ["backbone=small_resnet", "backbone.width=16", "backbone.pretrained=null"],
        {"backbone": "small_resnet"},
    ),
    "head": (["head=shrunken_means", "head.shrink=0.2"], {"head": "shrunken class means"}),
    "mask rule": (
        ["head=ridge", "sparse.density=0.1", "sparse.rounds=2", "sparse.rule=largest_saliency"],
        {"mask_rule": "largest saliency"},
    ),
    "engine": (["engine=last_to_first", "seed=1"], {"algorithm": "FedAvg"}),
    "question": (["train.batch_size=4"], {"algorithm": "FedAvg"}),
}


@pytest.fixture(scope="module", autouse=True)
def outside() -> Iterator[dict[str, Any]]:
    """The page's code blocks as one module of somebody else's."""
    before = {kind: dict(registry.added) for kind, registry in REGISTRIES.items()}
    module = types.ModuleType("mine")
    exec("\n".join(BLOCK.findall(PAGE.read_text(encoding="utf-8"))), module.__dict__)
    yield module.__dict__
    for kind, registry in REGISTRIES.items():
        registry.added = before[kind]


def test_the_page_has_one_row_of_every_kind() -> None:
    added = {kind: list(registry.added) for kind, registry in REGISTRIES.items()}
    assert added == {kind: [name] for kind, name in ROWS.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunFolder]:
    root = tmp_path_factory.mktemp("outside") / "runs"
    diagnostics = ["update_norms", "drift", "cosine", "sign_agreement", "largest_update"]
    common = [*TINY, f"federated.diagnostics=[{','.join(diagnostics)}]", f"run.root={root}"]
    return {
        name: start(compose("fedavg_iid", [*common, *words])) for name, (words, _) in RUNS.items()
    }


@pytest.mark.parametrize("name", RUNS)
def test_a_row_from_outside_is_checked_run_and_named(name: str, runs: dict[str, RunFolder]) -> None:
    result = runs[name].result
    assert result is not None
    assert result["labels"].items() >= RUNS[name][1].items()
    assert (runs[name].manifest or {})["labels"] == result["labels"]
    records = [record for record in runs[name].journal("metrics").read() if record["round"]]
    assert len(records) == 2
    for record in records:
        assert record["largest_update"] == max(record["update_norms"]) > 0


def test_an_engine_from_outside_gives_the_same_bits(runs: dict[str, RunFolder]) -> None:
    config = compose("fedavg_iid", [*TINY, "seed=1", f"run.root={runs['engine'].path.parent}-2"])
    assert labels(config)["algorithm"] == "FedAvg"
    serial = start(config).result
    assert serial is not None
    assert (runs["engine"].result or {})["choice"] == serial["choice"]


def test_parameters_of_outside_rows_are_recorded(runs: dict[str, RunFolder]) -> None:
    assert (runs["head"].result or {})["facts"]["shrink"] == 0.2
    assert (runs["partition"].partition or {})["blocks"] == 4
    assert "steps-3" in runs["aggregator"].name


def test_a_report_needs_none_of_the_rows(
    runs: dict[str, RunFolder],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    unsaved_figures: None,
) -> None:
    for kind, registry in REGISTRIES.items():
        if kind != "question":
            monkeypatch.setattr(registry, "added", {})
    folder = runs["dataset"].path.parent
    report.write([folder], tmp_path / "report", About())
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    tables = (tmp_path / "report" / "tables" / "tables.md").read_text(encoding="utf-8")
    assert "Does the batch size matter?" in page
    for label in ("geometric median", "sign of momentum", "sign mean", "sorted into 4 blocks"):
        assert label in tables
    content = json.loads((tmp_path / "report" / "content.json").read_text(encoding="utf-8"))
    assert "stripes" in json.dumps(content)
