import logging
from pathlib import Path

import pytest
import torch

from fedlens.errors import FedlensError
from fedlens.files import TEMPORARY, read_json, write_json
from fedlens.store.checkpoints import STATE, TENSORS, Checkpoints, Journals
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
