import os
from pathlib import Path

import pytest

from fedlens.errors import FedlensError
from fedlens.store.archive import pack
from fedlens.store.run_folder import Journal, RunFolder, find_run, find_runs, runs


def make(root: Path, name: str) -> RunFolder:
    folder = RunFolder(root / name)
    folder.path.mkdir(parents=True)
    folder.config.write_text("seed: 0\n")
    return folder


def test_a_journal_rewinds_to_what_was_synced(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.append({"epoch": 1, "loss": 0.1})
    length = journal.sync()
    journal.append({"epoch": 2, "loss": 0.2})
    journal.rewind(length)
    journal.append({"epoch": 2, "loss": 0.3})
    assert journal.read() == [{"epoch": 1, "loss": 0.1}, {"epoch": 2, "loss": 0.3}]


def test_a_line_cut_by_a_kill_is_not_read(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.append({"epoch": 1})
    with journal.path.open("a") as stream:
        stream.write('{"epoch": 2, "lo')
    assert journal.read() == [{"epoch": 1}]


def test_a_journal_shorter_than_its_checkpoint_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    with pytest.raises(FedlensError, match="shorter than its checkpoint says"):
        journal.rewind(10)


def test_nan_is_not_recorded(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError):
        journal.append({"loss": float("inf")})
    assert journal.read() == []


def test_states(tmp_path: Path) -> None:
    folder = make(tmp_path, "run")
    assert folder.state() == "interrupted"
    folder.write("failure", {"message": "no space"})
    assert (folder.state(), folder.failure) == ("failed", "no space")
    folder.clear_failure()
    assert folder.state() == "interrupted"
    with folder.lock():
        assert folder.state() == "running"
        with pytest.raises(FedlensError, match="another process"), folder.lock(timeout=0):
            pass
    folder.write("result", {"test": {}})
    assert folder.state() == "finished"


def test_runs_are_found_by_path_name_and_part(tmp_path: Path) -> None:
    one, two = make(tmp_path, "ridge_s0"), make(tmp_path, "ridge_s1")
    (tmp_path / "notes").mkdir()
    assert set(runs(tmp_path)) == {one, two}
    assert find_run(str(one.path), Path("nowhere")) == one
    assert find_run("ridge_s1", tmp_path) == two
    assert find_run("s1", tmp_path) == two
    with pytest.raises(FedlensError, match="did you mean 'ridge_s0'"):
        find_run("ridge_s00", tmp_path)
    with pytest.raises(FedlensError, match="no runs in"):
        find_run("x", tmp_path / "empty")


def test_of_several_matches_the_newest_run_is_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["fedavg_s0_0123abcd", "fedavg_s1_89abcdef", "fedavg_0123abcd_s2"]
    old, new, other = (make(tmp_path, name) for name in names)
    for number, run in enumerate((new, old, other)):  # the order in which they were begun
        os.utime(run.config, (number, number))
    assert find_run("fedavg", tmp_path) == other
    assert "3 runs match 'fedavg': using the newest, fedavg_0123abcd_s2" in caplog.text
    assert find_run("fedavg_s", tmp_path) == old
    caplog.clear()
    assert [find_run(run.short_id, tmp_path) for run in (old, new)] == [old, new]
    assert not caplog.text  # an id names one run, even where it is part of another's name


def test_a_short_id_is_the_hash_of_a_name_or_a_name_that_was_chosen(tmp_path: Path) -> None:
    assert make(tmp_path, "ridge_cifar100_s0_0123abcd").short_id == "0123abcd"
    assert make(tmp_path, "my-run").short_id == "my-run"
    assert make(tmp_path, "0123abcd").short_id == "0123abcd"


def test_looking_at_a_run_leaves_no_trace(tmp_path: Path) -> None:
    folder = make(tmp_path, "run")
    before = sorted(tmp_path.rglob("*"))
    assert folder.state() == "interrupted"
    assert sorted(tmp_path.rglob("*")) == before


def test_a_damaged_journal_is_one_sentence(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.path.write_text("nonsense\n")
    with pytest.raises(FedlensError, match="not JSON"):
        journal.read()


def test_the_position_is_the_last_complete_line_of_the_journal(tmp_path: Path) -> None:
    folder = make(tmp_path, "run")
    assert folder.position() == 0
    for number in range(3):
        folder.journal("metrics").append({"round": number, "losses": [0.1] * 2000})
    with folder.journal("metrics").path.open("a") as stream:
        stream.write('{"round": 3, "lo')
    assert folder.position() == 2
    assert folder.journal("test_curve").last() is None


def test_rounds_with_updates_are_listed(tmp_path: Path) -> None:
    folder = make(tmp_path, "run")
    assert folder.kept_rounds() == []
    for number in (12, 3):
        (folder.updates / f"round-{number:06d}").mkdir(parents=True)
    assert folder.kept_rounds() == [3, 12]


def test_a_config_is_read_or_refused(tmp_path: Path) -> None:
    folder = make(tmp_path, "run")
    assert folder.read_config() == {"seed": 0}
    for broken in ("seed: [0", "just words"):
        folder.config.write_text(broken)
        with pytest.raises(FedlensError, match=r"config\.yaml"):
            folder.read_config()


def test_runs_of_an_archive_are_runs(tmp_path: Path) -> None:
    one, two = make(tmp_path / "runs", "ridge_s0"), make(tmp_path / "runs", "ridge_s1")
    archive = tmp_path / "study.tar.xz"
    pack({f"{run.name}/config.yaml": run.config for run in (two, one)}, archive)
    assert [run.name for run in runs(archive)] == ["ridge_s0", "ridge_s1"]
    assert runs(archive)[0].read_config() == {"seed": 0}
    assert find_run("s1", archive).name == find_run("ridge_s1", archive).name == "ridge_s1"
    assert find_runs(archive) == runs(archive)


def test_a_path_is_a_run_or_many_or_a_name(tmp_path: Path) -> None:
    one, two = make(tmp_path / "runs", "ridge_s0"), make(tmp_path / "runs", "ridge_s1")
    assert find_runs(one.path) == [one]
    assert set(find_runs(tmp_path / "runs")) == {one, two}
    assert find_runs(Path("s1"), tmp_path / "runs") == [two]
    (tmp_path / "empty").mkdir()
    with pytest.raises(FedlensError, match=r"no runs in .*empty"):
        find_runs(tmp_path / "empty")
