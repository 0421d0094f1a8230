"""The list of runs: one line each, with ids that commands take, at the width of a terminal."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from fedlens.reporting.terminal.runs import runs_table
from fedlens.store.run_folder import RunFolder, find_run, runs

NAME = "sparse_fedavg_cifar100_vit_tiny-64px_ridge-full_nc={nc}_fedavg-J4_s{seed}_{hash:08x}"
LABELS = {
    "data": "CIFAR-100",
    "backbone": "vit_tiny",
    "head": "ridge head",
    "trainable": "full fine-tuning",
    "mask_rule": "least sensitive",
}


def make(root: Path, number: int, **manifest: object) -> RunFolder:
    """A finished run, different from those of other numbers."""
    run = root / NAME.format(nc=number, seed=number, hash=number)
    run.mkdir(parents=True)
    labels = {**LABELS, "partition": f"Nc={number}", "algorithm": "FedAvg" + number * ", extended"}
    record = {"unit": "round", "clients": 100, "local_steps": 4, "seed": number, "density": 0.1,
              "backbone": "vit_tiny", "resolution": 64, "pretrained": True,
              "experiment": "sparse_fedavg", "labels": labels, **manifest}  # fmt: skip
    (run / "config.yaml").write_text("{}")
    (run / "manifest.json").write_text(json.dumps(record))
    result = {"units": 8, "validation": {"top1": 0.25}, "test": {"top1": number / 10}}
    (run / "result.json").write_text(json.dumps(result))
    return RunFolder(run)


def lines(folders: list[RunFolder], width: int) -> list[str]:
    console = Console(width=width, record=True)
    console.print(runs_table(folders))
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_run_is_one_line_with_an_id_that_finds_it(width: int, tmp_path: Path) -> None:
    made = [make(tmp_path, number) for number in (1, 2, 3)]
    heading, _, _, *rows = lines(made, width)
    assert heading.startswith("3 runs, all finished; sparse_fedavg; CIFAR-100;")
    table = rows[-3:]
    assert [find_run(row.split()[0], tmp_path) for row in table] == made
    assert [row.split()[-1] for row in table] == ["10.00%", "20.00%", "30.00%"]
    assert all(len(row) <= width for row in table)


def test_only_what_differs_is_a_column(tmp_path: Path) -> None:
    text = "\n".join(lines([make(tmp_path, 1), make(tmp_path, 2)], 200))
    assert text.count("least sensitive 10%") == 1
    assert text.count("Nc=1") == 1
    assert "FedAvg, extended, extended" in text
    assert "1 run, finished;" in lines([make(tmp_path, 3)], 200)[0]


def test_damaged_runs_are_listed_by_an_id_that_finds_them(tmp_path: Path) -> None:
    damaged = [make(tmp_path, number) for number in (4, 5)]
    own = RunFolder(damaged[0].path.rename(tmp_path / ("a-long-name-of-my-own-" * 3)))
    for run in (own, damaged[1]):
        (run.path / "result.json").write_text("{")
    make(tmp_path, 6)
    text = "".join(lines(runs(tmp_path), 80))
    folded = "".join(line.partition(" ")[0] for line in lines(runs(tmp_path), 80))
    assert own.name in folded
    assert find_run("00000005", tmp_path) == damaged[1]
    assert "00000005" in text
    assert text.count("unreadable") == 2


def test_runs_with_one_id_are_listed_by_their_names(tmp_path: Path) -> None:
    names = ["first_0123abcd", "second_0123abcd"]
    for name in names:
        make(tmp_path, 7).path.rename(tmp_path / name)
    text = "\n".join(lines(runs(tmp_path), 80))
    assert all(name in text for name in names)


def test_an_interrupted_run_is_as_far_as_its_last_round_not_its_last_validation(
    tmp_path: Path,
) -> None:
    run = tmp_path / "one"
    run.mkdir()
    (run / "config.yaml").write_text("{}")
    (run / "manifest.json").write_text(json.dumps({"unit": "round", "data": "synthetic"}))
    records = [{"round": 0, "validation": {"top1": 0.25}}, {"round": 1}, {"round": 2}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    console = Console(width=120, record=True)
    console.print(runs_table([RunFolder(run)]))
    (line,) = [line for line in console.export_text().splitlines() if line.startswith("one")]
    assert "interrupted" in line
    assert "2 rounds" in line
    assert "25.00%" in line
