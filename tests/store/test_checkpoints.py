import logging
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlens.errors import FedlensError
from fedlens.files import TEMPORARY, read_json, write_json
from fedlens.store import hashes
from fedlens.store.checkpoints import STATE, TENSORS, Checkpoints, Journals
from fedlens.store.hashes import HASHES
from fedlens.store.records import SEAL
from fedlens.store.run_folder import RunFolder


def save(
    where: Checkpoints, number: int, *, score: float | None = None, best: str | None = None
) -> None:
    tensors = {"w": torch.full((3,), float(number))}
    where.save(name(number), tensors, {"number": number}, score=score, best=best)


def name(number: int) -> str:
    return f"epoch-{number:04d}"


def test_tensors_and_state_come_back_bit_for_bit(tmp_path: Path) -> None:
    where = Checkpoints(tmp_path)
    tensors = {"a": torch.randn(5, 4).T, "b": torch.tensor(0.1, dtype=torch.float64)}
    state = {"loss": 0.1 + 0.2, "none": None}
    where.save("epoch-0001", tensors, state, score=0.5, best="epoch-0001")
    checkpoint = where.latest()
    assert checkpoint is not None
    assert checkpoint.state == state
    assert all(torch.equal(checkpoint.tensors[key], tensors[key]) for key in tensors)


def test_the_last_two_and_the_best_are_kept(tmp_path: Path) -> None:
    where = Checkpoints(tmp_path, keep_best=1, keep_last=2)
    best = name(0)
    for number, score in enumerate([0.1, 0.9, 0.2, 0.3, 0.9]):
        best = name(number) if number < 2 else best
        save(where, number, score=score, best=best)
    assert where.names() == [name(1), name(3), name(4)]


def test_best_k_by_score_and_what_the_last_refer_to(tmp_path: Path) -> None:
    where = Checkpoints(tmp_path, keep_best=2, keep_last=1)
    for number, score in enumerate([0.5, 0.7, 0.6, 0.1]):
        save(where, number, score=score, best=name(1))
    assert where.names() == [name(1), name(2), name(3)]


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["bit", "truncated", "gone", "state"])
def test_a_damaged_last_one_falls_back_with_a_warning(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    where = Checkpoints(tmp_path)
    save(where, 1)
    save(where, 2)
    tensors = tmp_path / name(2) / TENSORS
    if how == "bit":
        damage(tensors)
    elif how == "truncated":
        tensors.write_bytes(tensors.read_bytes()[:10])
    elif how == "gone":
        tensors.unlink()
    else:
        (tmp_path / name(2) / STATE).write_text("{")
    with caplog.at_level(logging.WARNING):
        checkpoint = where.latest()
    assert checkpoint is not None
    assert checkpoint.state == {"number": 1}
    assert "epoch-0002 is damaged" in caplog.text
    assert where.names() == [name(1)]


def test_a_checkpoint_whose_best_is_damaged_is_not_resumed(tmp_path: Path) -> None:
    where = Checkpoints(tmp_path)
    save(where, 1, score=0.9, best=name(1))
    save(where, 2, score=0.1, best=name(1))
    damage(tmp_path / name(1) / TENSORS)
    assert where.latest() is None
    save(where, 1, score=0.9, best=name(1))
    damage(tmp_path / name(1) / TENSORS)
    with pytest.raises(FedlensError, match="damaged"):
        where.load(name(1))


def test_nothing_there_is_none(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "absent").latest() is None


def test_what_a_kill_left_is_cleared(tmp_path: Path) -> None:
    where = Checkpoints(tmp_path)
    save(where, 1)
    half = tmp_path / f"{TEMPORARY}epoch-0002-abc"
    half.mkdir()
    (half / STATE).write_text("{}")
    assert where.names() == [name(1)]
    assert where.latest() is not None
    assert not half.exists()


def test_another_schema_is_refused_not_skipped(tmp_path: Path) -> None:
    where = Checkpoints(tmp_path)
    save(where, 1)
    header = read_json(tmp_path / name(1) / STATE)
    write_json(tmp_path / name(1) / STATE, {**header, "schema": 99})
    hashes.write(tmp_path / name(1), (TENSORS, STATE), {})
    with pytest.raises(FedlensError, match="schema 99"):
        where.latest()


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = Checkpoints(tmp_path)
    save(where, 1)

    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedlens.store.checkpoints.save_file", full)
    with pytest.raises(FedlensError, match="No space left on device"):
        save(where, 2)
    assert where.names() == [name(1)]
    assert not list(tmp_path.glob(f"{TEMPORARY}*"))


def test_what_ranks_among_the_best_is_known(tmp_path: Path) -> None:
    where = Checkpoints(tmp_path, keep_best=2)
    assert where.ranks(0.0)
    save(where, 1, score=0.5, best=name(1))
    save(where, 2, score=0.7, best=name(2))
    assert [where.ranks(score) for score in (0.4, 0.5, 0.6)] == [False, False, True]


@pytest.mark.parametrize(
    "change", [{"score": "high"}, {"score": 9.0}, {"best": [1]}, {"state": 3}, {"schema": 1}]
)
def test_an_earlier_checkpoint_that_was_changed_decides_nothing(
    change: dict[str, object], tmp_path: Path
) -> None:
    """It is not the one that is resumed, but the scores and states of all of them are asked for."""
    where = Checkpoints(tmp_path, keep_last=3)
    for number, score in ((1, 0.5), (2, 0.6), (3, 0.4)):
        save(where, number, score=score, best=name(min(number, 2)))
    path = tmp_path / name(1) / STATE
    write_json(path, {**read_json(path), **change})
    assert [where.ranks(score) for score in (0.55, 0.65)] == [False, True]
    assert where.states() == [{"number": 2}, {"number": 3}]
    save(where, 4, score=0.3, best=name(2))
    assert {name(2), name(3), name(4)} <= set(where.names())


@pytest.mark.parametrize("run", [3, {"a": 3}, {"a": {}}])
def test_hashes_without_a_seal_are_damaged(run: object, tmp_path: Path) -> None:
    where = Checkpoints(tmp_path)
    save(where, 1)
    save(where, 2)
    path = tmp_path / name(2) / HASHES
    unsealed = {key: value for key, value in read_json(path).items() if key != SEAL}
    write_json(path, {**unsealed, "run": run})
    latest = where.latest()
    assert latest is not None
    assert latest.name == name(1)


def test_a_missing_checkpoint_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(FedlensError, match=r"no checkpoint .*epoch-0001: an archive .* has none"):
        Checkpoints(tmp_path).load(name(1))


def test_restoring_cuts_the_journals_to_their_length_at_the_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    journals = Journals(folder, Checkpoints(folder.checkpoints))
    assert journals.restore() is None
    journals.record("metrics", {"epoch": 1})
    journals.save(name(1), {"w": torch.zeros(1)}, {"number": 1})
    journals.record("metrics", {"epoch": 2})
    journals.record("timings", {"epoch": 2})
    checkpoint = journals.restore()
    assert checkpoint is not None
    assert checkpoint.state["number"] == 1
    assert folder.journal("metrics").read() == [{"epoch": 1}]
    assert folder.journal("timings").read() == []


def saved_run(path: Path) -> tuple[RunFolder, Journals]:
    """Two checkpoints of a run with journals and, from the second on, a file beside them."""
    folder = RunFolder(path)
    path.mkdir()
    journals = Journals(folder, Checkpoints(folder.checkpoints))
    beside: dict[str, hashes.FileHash] = {}
    for number in (1, 2):
        journals.record("metrics", {"epoch": number})
        journals.record("test_curve", {"unit": number})
        journals.record("timings", {"epoch": number})
        if number == 2:
            (path / "clients").mkdir()
            (path / "clients" / "c.safetensors").write_bytes(bytes(range(64)))
            beside = {"clients/c.safetensors": hashes.of_file(path / "clients/c.safetensors")}
        journals.save(name(number), {"w": torch.full((3,), 1.0)}, {"number": number}, files=beside)
    return folder, journals


FILES = [
    *(f"checkpoints/{name(2)}/{file}" for file in (TENSORS, STATE, HASHES)),
    "clients/c.safetensors",
    "metrics.jsonl",
    "test_curve.jsonl",
]


@given(data=st.data(), file=st.sampled_from(FILES))
def test_any_bit_of_any_file_that_a_checkpoint_needs(data: st.DataObject, file: str) -> None:
    """The checkpoint before is used if only the newest is concerned, else none; never the bit."""
    with TemporaryDirectory() as root:
        folder, journals = saved_run(Path(root) / "run")
        content = bytearray((folder.path / file).read_bytes())
        bit = data.draw(st.integers(0, 8 * len(content) - 1))
        content[bit // 8] ^= 1 << bit % 8
        (folder.path / file).write_bytes(content)
        checkpoint = journals.restore()
        if checkpoint is not None:
            assert checkpoint.state["number"] == 1
            assert folder.journal("metrics").read() == [{"epoch": 1}]
        else:
            assert file.endswith(".jsonl")
            assert folder.journal("metrics").read() == []


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("how", ["missing", "empty", "folder", "half"])
def test_any_file_that_is_lost(file: str, how: str, tmp_path: Path) -> None:
    folder, journals = saved_run(tmp_path / "run")
    path = folder.path / file
    content = path.read_bytes()
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how != "missing":
        path.write_bytes(content[: len(content) // 2] if how == "half" else b"")
    checkpoint = journals.checkpoints.latest()
    assert checkpoint is None or checkpoint.state["number"] == 1


@pytest.mark.parametrize("how", ["missing", "bits", "folder", "half"])
def test_the_clock_never_stops_a_run(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, journals = saved_run(tmp_path / "run")
    path = folder.journal("timings").path
    content = path.read_bytes()
    path.unlink()
    if how == "folder":
        (path / "below").mkdir(parents=True)
    elif how != "missing":
        path.write_bytes(content[:5] if how == "half" else b"\xff" * len(content))
    checkpoint = journals.restore()
    assert checkpoint is not None
    assert checkpoint.state["number"] == 2
    journals.record("timings", {"epoch": 3})
    assert path.read_bytes().endswith(b'{"epoch": 3}\n')


def test_a_checkpoint_of_a_schema_without_hashes_is_refused_and_kept(tmp_path: Path) -> None:
    where = Checkpoints(tmp_path)
    save(where, 1)
    folder = tmp_path / name(1)
    write_json(folder / STATE, {**read_json(folder / STATE), "schema": 1})
    (folder / HASHES).unlink()
    with pytest.raises(FedlensError, match="schema 1, not 2"):
        where.latest()
    assert folder.exists()


def test_rounds_of_updates_that_were_replaced_since_are_not_missed(tmp_path: Path) -> None:
    folder, journals = saved_run(tmp_path / "run")
    file = folder.updates / "round-000002" / "start.safetensors"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"update")
    files = {"updates/round-000002/start.safetensors": hashes.of_file(file)}
    journals.save(name(3), {"w": torch.zeros(1)}, {"number": 3}, files=files)
    file.write_bytes(b"upDate")
    copy = tmp_path / "copy"
    shutil.copytree(folder.path, copy / "run")
    other = Journals(RunFolder(copy / "run"), Checkpoints(copy / "run" / "checkpoints"))
    checkpoint = other.restore()
    assert checkpoint is not None
    assert checkpoint.state["number"] == 2
    shutil.rmtree(file.parent)
    checkpoint = journals.restore()
    assert checkpoint is not None
    assert checkpoint.state["number"] == 3
