import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedlens.errors import FedlensError
from fedlens.store.export import write_records
from fedlens.store.table import load_runs


def make(root: Path, name: str, config: dict[str, Any], **files: dict[str, Any]) -> None:
    (root / name).mkdir(parents=True)
    (root / name / "config.yaml").write_text(yaml.safe_dump(config))
    for file, content in files.items():
        (root / name / f"{file}.json").write_text(json.dumps(content))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    def config(seed: int, lr: float, partition: dict[str, Any]) -> dict[str, Any]:
        return {
            "experiment": "sparse_fedavg",
            "seed": seed,
            "backbone": {"name": "vit_tiny"},
            "train": {"lr": lr, "batch_size": 8},
            "sparse": {"density": 0.1},
            "federated": {"clients": 100, "local_steps": 4, "diagnostics": ["drift"]},
            "partition": partition,
        }

    labels = {"data": "CIFAR-100", "head": "ridge head", "partition": "Nc=5", "algorithm": "FedAvg"}
    result = {
        "choice": {"parameters": "1f0c", "unit": 7},
        "validation": {"loss": 2.5, "top1": 0.25},
        "test": {"loss": 2.0, "top1": 0.5},
        "seconds": 3.0,
    }
    folder = tmp_path / "runs"
    classes = {"name": "classes", "classes_per_client": 5}
    make(folder, "b", config(1, 0.1, classes), manifest={"labels": labels}, result=result)
    make(folder, "a", config(0, 0.3, {"name": "iid"}), manifest={"labels": labels})
    central = {"experiment": "ridge", "seed": 0, "federated": {"clients": None, "local_steps": 4}}
    make(folder, "c", central, result={**result, "validation": None, "labels": labels})
    return folder


def test_a_row_has_what_a_run_is_and_how_it_ended(root: Path) -> None:
    row = load_runs(root).set_index("name").loc["b"]
    expected = {
        "state": "finished", "experiment": "sparse_fedavg", "seed": 1, "data": "CIFAR-100",
        "backbone": "vit_tiny", "head": "ridge head", "partition": "Nc=5", "algorithm": "FedAvg",
        "density": 0.1, "clients": 100, "local_steps": 4, "validation_top1": 0.25,
        "validation_loss": 2.5, "test_top1": 0.5, "test_loss": 2.0, "chosen_round": 7,
        "seconds": 3.0, "train.lr": 0.1, "partition.classes_per_client": 5,
    }  # fmt: skip
    assert {key: row[key] for key in expected} == expected


def test_runs_are_sorted_and_what_is_unknown_is_missing(root: Path) -> None:
    table = load_runs(root)
    assert list(table["name"]) == ["a", "b", "c"]
    assert list(table["state"]) == ["interrupted", "finished", "finished"]
    assert list(table["test_top1"].isna()) == [True, False, False]
    assert list(table["validation_top1"].isna()) == [True, False, True]
    assert list(table["local_steps"].isna()) == [False, False, True]
    assert list(table["head"]) == ["ridge head"] * 3
    assert str(table["chosen_round"].dtype) == "Int64"


def test_config_keys_are_columns_where_runs_differ(root: Path) -> None:
    two = load_runs(root).iloc[:2]
    assert set(two["partition.name"]) == {"iid", "classes"}
    assert list(two["federated.diagnostics"]) == [("drift",), ("drift",)]
    make(root.parent / "one", "a", {"seed": 0, "train": {"lr": 0.1}})
    assert "train.lr" not in load_runs(root.parent / "one").columns


def test_an_archive_gives_the_table_of_its_folder(root: Path) -> None:
    archive = root.parent / "runs.tar.xz"
    write_records(root, archive)
    table = load_runs(archive)
    expected = load_runs(root).iloc[1:].reset_index(drop=True)
    assert table.equals(expected)


def test_nothing_to_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FedlensError, match="no runs in"):
        load_runs(tmp_path)
    with pytest.raises(FedlensError, match="No run"):
        load_runs(tmp_path / "absent")


def test_reading_runs_loads_no_torch(root: Path) -> None:
    code = f"""
import sys
from fedlens.store.table import load_runs
assert "pandas" not in sys.modules
load_runs({str(root)!r})
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
