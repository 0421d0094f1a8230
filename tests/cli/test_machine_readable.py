"""`fedlens ls --json | --csv` and `fedlens show --json`, read back by programs."""

import csv
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer

from fedlens.cli import app
from fedlens.errors import FedlensError
from fedlens.store.table import COLUMNS, load_runs

RESULT = {
    "choice": {"unit": 3},
    "validation": {"loss": 2.5, "top1": 0.25},
    "test": {"loss": 2.0, "top1": 0.5},
    "seconds": 1.5,
}


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    typer.main.get_command(app).main(list(words), standalone_mode=False)
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def make(folder: Path, *, seed: int, finished: bool) -> None:
    folder.mkdir(parents=True)
    setting = {"experiment": "fedavg_iid", "seed": seed, "backbone": "vit_tiny", "clients": 10,
               "local_steps": 4}  # fmt: skip
    labels = {"data": "CIFAR-100", "partition": 'Dirichlet α=0.5, "skewed"', "head": "linear"}
    config = f"{{experiment: fedavg_iid, seed: {seed}, train: {{clip_norm: .inf}}}}"
    (folder / "config.yaml").write_text(config)
    (folder / "manifest.json").write_text(json.dumps({**setting, "labels": labels}))
    (folder / "metrics.jsonl").write_text('{"round": 0, "lr": 0.1}\n{"round": 1, "lr"')
    partition = {"name": "dirichlet", "alpha": 0.5, "histogram": [[1, 2]], "statistics": {"x": 1}}
    (folder / "partition.json").write_text(json.dumps(partition))
    if finished:
        (folder / "result.json").write_text(json.dumps({**RESULT, **setting, "labels": labels}))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for seed in range(3):
        make(tmp_path / "runs" / f"run_s{seed}", seed=seed, finished=seed > 0)
    (tmp_path / "runs" / "run_s2" / "result.json").write_text("{")
    return tmp_path / "runs"


def test_runs_are_filtered_by_name_label_or_state_and_by_age(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(3):
        os.utime(root / f"run_s{number}" / "config.yaml", (number, number))

    def names(*options: str) -> list[str]:
        rows = json.loads(printed(capsys, "ls", "--json", "--runs", str(root), *options))
        return [row["name"] for row in rows]

    assert names("--last", "2") == ["run_s1", "run_s2"]
    assert names("--filter", "S1") == names("--filter", "finished") == ["run_s1"]
    assert names("--filter", "cifar-100", "--last", "1") == ["run_s1"]  # run_s2 is unreadable
    assert names("--filter", "cifar", "--filter", "s2") == []
    text = printed(capsys, "ls", "--runs", str(root), "--filter", "nothing")
    assert "has 3 runs, but none matches 'nothing'" in text


def test_json_lists_every_run_with_the_columns_of_load_runs(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = json.loads(printed(capsys, "ls", "--json", "--runs", str(root)))
    assert [tuple(row) for row in rows] == [COLUMNS] * 3
    by_name = {row["name"]: row for row in rows}
    assert [by_name[f"run_s{seed}"]["state"] for seed in range(3)] == [
        "interrupted", "finished", "unreadable",
    ]  # fmt: skip
    table = load_runs(root).set_index("name")
    for name, row in by_name.items():
        for column in COLUMNS[1:]:
            value = table.loc[name, column]
            missing = table[column].isna()[name]
            assert row[column] is None if missing else row[column] == value, column
    assert by_name["run_s1"]["test_top1"] == 0.5
    assert by_name["run_s1"]["partition"] == 'Dirichlet α=0.5, "skewed"'
    assert "result.json" in by_name["run_s2"]["error"]


def test_csv_has_the_same_values(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(printed(capsys, "ls", "--json", "--runs", str(root)))
    text = printed(capsys, "ls", "--csv", "--runs", str(root))
    table = list(csv.DictReader(io.StringIO(text)))
    assert tuple(table[0]) == COLUMNS
    assert table == [
        {key: "" if value is None else str(value) for key, value in row.items()} for row in rows
    ]


def test_no_runs_are_an_empty_list_and_a_header(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in (tmp_path, tmp_path / "absent"):
        assert json.loads(printed(capsys, "ls", "--json", "--runs", str(place))) == []
        assert printed(capsys, "ls", "--csv", "--runs", str(place)) == ",".join(COLUMNS) + "\n"


def test_only_one_format(tmp_path: Path) -> None:
    with pytest.raises(FedlensError, match="exclude each other"):
        typer.main.get_command(app).main(["ls", "--json", "--csv"], standalone_mode=False)


def test_show_prints_all_records_of_a_run(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record: dict[str, Any] = json.loads(printed(capsys, "show", str(root / "run_s1"), "--json"))
    assert list(record) == [
        "name", "state", "error", "path", "config", "manifest", "result", "partition", "metrics",
        "test_curve",
    ]  # fmt: skip
    assert (record["name"], record["state"], record["error"]) == ("run_s1", "finished", None)
    assert record["config"]["train"] == {"clip_norm": "inf"}  # JSON has no infinity
    assert record["result"]["test"] == RESULT["test"]
    assert record["manifest"] == json.loads((root / "run_s1" / "manifest.json").read_text())
    assert record["partition"] == {"name": "dirichlet", "alpha": 0.5, "statistics": {"x": 1}}
    assert record["metrics"] == [{"round": 0, "lr": 0.1}]
    assert record["test_curve"] == []
    unfinished = json.loads(printed(capsys, "show", str(root / "run_s0"), "--json"))
    assert (unfinished["result"], unfinished["state"]) == (None, "interrupted")
    with pytest.raises(FedlensError, match=r"result\.json cannot be read as JSON"):
        printed(capsys, "show", str(root / "run_s2"), "--json")


def test_a_hundred_runs_are_listed_at_once(tmp_path: Path) -> None:
    """CPU time of the whole command, which leaves out what other processes of a machine take."""
    for seed in range(120):
        make(tmp_path / f"run_s{seed}", seed=seed, finished=True)
    code = (
        "import sys, time; from fedlens.cli import main\n"
        f"sys.argv = ['fedlens', 'ls', '--json', '--runs', {str(tmp_path)!r}]\n"
        "try:\n    main()\nfinally:\n    print(time.process_time(), file=sys.stderr)"
    )
    best = float("inf")
    began = time.monotonic()
    while best > 0.6 and time.monotonic() - began < 30:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert len(json.loads(done.stdout)) == 120
        best = min(best, float(done.stderr))
    assert best < 0.6
