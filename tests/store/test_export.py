import json
from pathlib import Path

import pytest

from fedlens.errors import FedlensError
from fedlens.store.export import copy_records


def run(root: Path, name: str, *, finished: bool) -> Path:
    """A run's folder with all kinds of files."""
    folder = root / name
    for part in ("checkpoints/round-000001", "updates", "arithmetic/alpha_1"):
        (folder / part).mkdir(parents=True)
        (folder / part / "tensors.safetensors").write_bytes(b"weights")
    for kept in ("config.yaml", "manifest.json", "metrics.jsonl", "partition.json"):
        (folder / kept).write_text(json.dumps({"of": name}) + "\n")
    (folder / "arithmetic/alpha_1/record.json").write_text("{}")
    (folder / "checkpoints/round-000001/state.json").write_text("{}")
    (folder / "masks.safetensors").write_bytes(b"masks")
    (folder / "log.txt").write_text("/home/somebody")
    for empty in ("run.lock", "test_curve.jsonl"):
        (folder / empty).touch()
    if finished:
        (folder / "result.json").write_text('{"test": 1}')
    return folder


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def test_records_are_copied_and_nothing_else(tmp_path: Path) -> None:
    whole = run(tmp_path / "runs", "one", finished=True)
    run(tmp_path / "runs", "two", finished=False)
    out = tmp_path / "records"
    assert copy_records(tmp_path / "runs", out) == (["one"], ["two"])
    kept = {
        "config.yaml", "manifest.json", "metrics.jsonl", "partition.json", "result.json",
        "arithmetic/alpha_1/record.json",
    }  # fmt: skip
    assert [path.name for path in out.iterdir()] == ["one"]
    assert files(out / "one") == kept
    assert all((out / "one" / name).read_bytes() == (whole / name).read_bytes() for name in kept)


def test_the_same_command_brings_a_copy_up_to_date(tmp_path: Path) -> None:
    whole = run(tmp_path / "runs", "one", finished=True)
    out = tmp_path / "records"
    copy_records(tmp_path / "runs", out)
    (whole / "result.json").write_text('{"test": 2}')
    (whole / "arithmetic/alpha_1/record.json").unlink()
    copy_records(tmp_path / "runs", out)
    assert (out / "one" / "result.json").read_text() == '{"test": 2}'
    assert "arithmetic/alpha_1/record.json" not in files(out / "one")


def test_runs_of_the_same_name_elsewhere_keep_their_checkpoints(tmp_path: Path) -> None:
    run(tmp_path / "runs", "one", finished=True)
    theirs = run(tmp_path / "others", "one", finished=True)
    before = files(theirs)
    with pytest.raises(FedlensError, match="one is a run with checkpoints"):
        copy_records(tmp_path / "runs", tmp_path / "others")
    assert files(theirs) == before


def test_what_a_kill_left_of_a_copy_is_cleared(tmp_path: Path) -> None:
    run(tmp_path / "runs", "one", finished=True)
    out = tmp_path / "records"
    run(out, ".partial-one-0123abcd", finished=True)
    copy_records(tmp_path / "runs", out)
    assert [path.name for path in out.iterdir()] == ["one"]


def test_runs_are_not_copied_onto_themselves(tmp_path: Path) -> None:
    run(tmp_path / "runs", "one", finished=True)
    with pytest.raises(FedlensError, match="holds the runs themselves"):
        copy_records(tmp_path / "runs", tmp_path / "runs" / ".." / "runs")
    with pytest.raises(FedlensError, match="There are no runs"):
        copy_records(tmp_path / "nowhere", tmp_path / "out")
