import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedlens.errors import FedlensError
from fedlens.store.export import write_records
from fedlens.store.run_folder import RunFolder
from fedlens.store.table import COLUMNS, load_metrics, load_runs, run_row


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
    for function in (load_runs, load_metrics):
        with pytest.raises(FedlensError, match=r"No runs at .*absent"):
            function(tmp_path / "absent")
        with pytest.raises(FedlensError, match="no runs in"):
            function(tmp_path)
    (tmp_path / "text.txt").write_text("no archive")
    with pytest.raises(FedlensError, match="not an intact archive"):
        load_runs(tmp_path / "text.txt")


def test_a_name_is_no_path(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of ./runs is not meant by a path that does not exist."""
    monkeypatch.chdir(root.parent)
    assert (root.parent / "runs" / "a").exists()
    with pytest.raises(FedlensError, match="No runs at a"):
        load_runs("a")


DAMAGED = {
    "not json": ("result.json", "{"),
    "empty": ("result.json", ""),
    "a list": ("result.json", "[1]"),
    "test is a number": ("result.json", '{"test": 3}'),
    "an accuracy in words": ("result.json", '{"test": {"top1": "high"}}'),
    "an infinite loss": ("result.json", '{"test": {"top1": 0.5, "loss": Infinity}}'),
    "a seed in words": ("config.yaml", "{experiment: ridge, seed: first}"),
    "labels in a list": ("manifest.json", '{"labels": ["CIFAR-100"]}'),
    "no config": ("config.yaml", "{"),
    "binary": ("config.yaml", "\x00\x01"),
    "failure": ("failure.json", "[]"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_run_is_named_and_the_others_are_read(root: Path, damage: str) -> None:
    file, text = DAMAGED[damage]
    before = load_runs(root).drop(index=0).reset_index(drop=True)
    (root / "a" / file).write_text(text)
    table = load_runs(root).set_index("name")
    row = table.loc["a"]
    assert row["state"] == "unreadable"
    assert str(root / "a") in row["error"]
    assert row[[name for name in COLUMNS if name not in ("name", "state", "error")]].isna().all()
    for name in ("b", "c"):
        expected = before.set_index("name").loc[name, list(COLUMNS[1:])]
        assert table.loc[name, list(COLUMNS[1:])].equals(expected)
        assert table.loc[name, "error"] is None or table["error"].isna()[name]


def test_config_keys_of_an_unreadable_run_are_missing(root: Path) -> None:
    make(root.parent / "two", "a", {"seed": 0, "train": {"lr": 0.1, "batch_size": 8}})
    make(root.parent / "two", "b", {"seed": 1, "train": {"lr": 0.2, "batch_size": 8}})
    make(root.parent / "two", "c", {"seed": 1})
    (root.parent / "two" / "c" / "config.yaml").write_text("[")
    table = load_runs(root.parent / "two")
    assert "train.batch_size" not in table.columns
    assert list(table["train.lr"])[:2] == [0.1, 0.2]
    assert table["train.lr"].isna()[2]


def test_an_unfinished_run_has_the_error_it_failed_with(root: Path) -> None:
    (root / "a" / "failure.json").write_text('{"message": "The disk is full."}')
    row = load_runs(root).set_index("name").loc["a"]
    assert (row["state"], row["error"]) == ("failed", "The disk is full.")


def test_a_row_is_the_same_from_the_manifest_and_from_the_config(root: Path) -> None:
    """Runs write their setting into the manifest; the YAML is slower to read."""
    plain = run_row(RunFolder(root / "b"))
    setting = {
        "experiment": "sparse_fedavg", "seed": 1, "backbone": "vit_tiny", "density": 0.1,
        "clients": 100, "local_steps": 4,
    }  # fmt: skip
    manifest = json.loads((root / "b" / "manifest.json").read_text())
    (root / "b" / "manifest.json").write_text(json.dumps({**manifest, **setting}))
    assert run_row(RunFolder(root / "b")) == plain
    (root / "b" / "config.yaml").write_text("not read")
    assert run_row(RunFolder(root / "b")) == plain
    assert tuple(plain) == COLUMNS


def journal(run: Path, name: str, *records: dict[str, Any]) -> None:
    lines = [json.dumps(record) + "\n" for record in records]
    (run / f"{name}.jsonl").write_text("".join(lines))


@pytest.fixture
def curves(root: Path) -> Path:
    """Curves of the federated runs a and b, and of the central run c."""
    start = {"round": 0, "validation": {"loss": 4.5, "top1": 0.125}}
    first = {
        "round": 1, "lr": 0.1, "train": {"loss": 4.0, "accuracy": 0.25}, "clients": [3, 1],
        "update_norms": [0.5, 1.5], "drift": 2.0, "cosine": None, "bytes_up": 80, "density": 0.5,
    }  # fmt: skip
    journal(root / "a", "metrics", start)
    journal(root / "b", "metrics", start, first)
    journal(root / "b", "test_curve", {"unit": 1, "loss": 3.0, "top1": 0.25})
    journal(root / "c", "metrics", {"epoch": 1, "steps": 7, "validation": {"loss": 2.0}})
    return root


def test_metrics_have_a_row_for_each_run_and_round(curves: Path) -> None:
    table = load_metrics(curves)
    assert list(zip(table["name"], table["unit"], table["round"], strict=True)) == [
        ("a", "round", 0),
        ("b", "round", 0),
        ("b", "round", 1),
        ("c", "epoch", 1),
    ]
    row = table.iloc[2]
    expected = {
        "seed": 1, "partition": "Nc=5", "clients": 100, "lr": 0.1, "train_loss": 4.0,
        "train_accuracy": 0.25, "drift": 2.0, "bytes_up": 80, "density": 0.1,
        "metric_density": 0.5, "test_curve_top1": 0.25, "test_curve_loss": 3.0,
    }  # fmt: skip
    assert {key: row[key] for key in expected} == expected
    assert row.isna()["validation_top1"]
    assert row.isna()["cosine"]
    assert not {"update_norms", "epoch", "test_curve_unit"} & set(table.columns)
    assert list(table["validation_top1"].isna()) == [False, False, True, True]
    assert table["bytes_up"].dtype == table["steps"].dtype == "Int64"
    assert table["drift"].dtype == "float64"


def test_metrics_can_be_grouped_by_what_the_runs_are(curves: Path) -> None:
    best = load_metrics(curves).groupby(["algorithm", "seed"])["validation_top1"].max()
    assert best.loc["FedAvg", 1] == 0.125


def test_metrics_of_an_archive_and_of_one_run(curves: Path) -> None:
    archive = curves.parent / "runs.tar.xz"
    write_records(curves, archive)
    of_folder = load_metrics(curves).iloc[1:].reset_index(drop=True)
    assert load_metrics(archive).equals(of_folder)
    assert list(load_metrics(curves / "b")["round"]) == [0, 1]


def test_a_run_without_metrics_has_no_rows(root: Path) -> None:
    journal(root / "b", "metrics", {"round": 0, "lr": 0.1})
    (root / "a" / "metrics.jsonl").write_text('{"round": 0, "lr"')  # killed while it wrote
    assert list(load_metrics(root)["name"]) == ["b"]
    empty = load_metrics(root / "a")
    assert len(empty) == 0
    assert {"name", "seed", "unit", "round"} <= set(empty.columns)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("metrics.jsonl", "{]\n", "not JSON"),
        ("metrics.jsonl", "3\n", "not a record"),
        ("metrics.jsonl", '{"lr": 0.1}\n', "without the number"),
        ("metrics.jsonl", '{"round": "first"}\n', "without the number"),
        ("manifest.json", "{", "cannot be read"),
    ],
)
def test_damaged_metrics_are_refused_in_a_sentence(
    curves: Path, file: str, text: str, message: str
) -> None:
    (curves / "b" / file).write_text(text)
    with pytest.raises(FedlensError, match=message) as caught:
        load_metrics(curves)
    assert "/b" in str(caught.value)


@pytest.mark.slow
def test_reading_runs_loads_no_torch(root: Path) -> None:
    code = f"""
import sys
from fedlens.store.run_folder import RunFolder
from fedlens.store.table import COLUMNS, load_metrics, load_runs, run_row
assert "pandas" not in sys.modules
load_runs({str(root)!r})
load_metrics({str(root)!r})
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
