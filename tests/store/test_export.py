import os
from pathlib import Path

import pytest

from fedlens.errors import FedlensError
from fedlens.files import TEMPORARY
from fedlens.store.export import Export, write_records
from fedlens.store.run_folder import runs
from tests.store.runs import make_run, write_result


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_an_archive_has_the_records_of_finished_runs_and_nothing_else(tmp_path: Path) -> None:
    original = make_run(tmp_path / "runs", "one")
    make_run(tmp_path / "runs", "two", finished=False)
    archive = tmp_path / "study" / "runs.tar.xz"
    assert write_records(tmp_path / "runs", archive) == Export(["one"], [], ["two"])
    assert [path.name for path in archive.parent.iterdir()] == ["runs.tar.xz"]
    (run,) = runs(archive)
    records = {
        "config.yaml", "manifest.json", "metrics.jsonl", "partition.json", "result.json",
        "arithmetic/alpha_1/record.json",
    }  # fmt: skip
    assert files(run.path) == records
    assert all((run.path / name).read_bytes() == (original / name).read_bytes() for name in records)


def test_the_same_runs_give_the_same_bytes(tmp_path: Path) -> None:
    for root, names in (("a", ["one", "two"]), ("b", ["two", "one"])):
        for number, name in enumerate(names):
            for path in make_run(tmp_path / root, name).rglob("*"):
                os.utime(path, (number, number))
        write_records(tmp_path / root, tmp_path / f"{root}.tar.xz")
    first = (tmp_path / "a.tar.xz").read_bytes()
    assert first == (tmp_path / "b.tar.xz").read_bytes()
    write_records(tmp_path / "a", tmp_path / "a.tar.xz")  # onto itself
    assert first == (tmp_path / "a.tar.xz").read_bytes()


def test_the_same_command_brings_an_archive_up_to_date(tmp_path: Path) -> None:
    original = make_run(tmp_path / "runs", "one")
    archive = tmp_path / "runs.tar.xz"
    write_records(tmp_path / "runs", archive)
    write_result(original, test=2, choice={"parameters": "1f0c", "unit": 3})
    (original / "arithmetic/alpha_1/record.json").unlink()
    write_records(tmp_path / "runs", archive)
    (run,) = runs(archive)
    assert run.result is not None
    assert run.result["test"] == 2
    assert "arithmetic/alpha_1/record.json" not in files(run.path)


def test_runs_of_other_folders_are_added(tmp_path: Path) -> None:
    make_run(tmp_path / "here", "one")
    make_run(tmp_path / "there", "two")
    archive = tmp_path / "runs.tar.xz"
    write_records(tmp_path / "here", archive)
    assert write_records(tmp_path / "there", archive) == Export(["two"], ["one"], [])
    assert [run.name for run in runs(archive)] == ["one", "two"]
    merged = tmp_path / "merged.tar.xz"
    write_records(archive, merged)  # an archive can be read like a folder
    assert merged.read_bytes() == archive.read_bytes()


def test_another_run_of_the_same_name_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path / "here", "one")
    make_run(tmp_path / "there", "one", parameters="88ab")
    archive = tmp_path / "runs.tar.xz"
    write_records(tmp_path / "here", archive)
    before = archive.read_bytes()
    with pytest.raises(FedlensError, match="another run named one"):
        write_records(tmp_path / "there", archive)
    assert archive.read_bytes() == before


def test_leftovers_of_a_kill_are_cleared(tmp_path: Path) -> None:
    make_run(tmp_path / "runs", "one")
    archive = tmp_path / "study" / "runs.tar.xz"
    archive.parent.mkdir()
    (archive.parent / f"{TEMPORARY}{archive.name}-0123abcd").write_bytes(b"half")
    write_records(tmp_path / "runs", archive)
    assert [path.name for path in archive.parent.iterdir()] == ["runs.tar.xz"]


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path / "runs", "one")
    make_run(tmp_path / "begun", "two", finished=False)
    for root in ("nowhere", "begun"):
        with pytest.raises(FedlensError, match="There are no finished runs"):
            write_records(tmp_path / root, tmp_path / "runs.tar.xz")
    for name in ("study", "runs"):
        with pytest.raises(FedlensError, match=r"write NAME\.tar\.xz"):
            write_records(tmp_path / "runs", tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["begun", "runs"]
