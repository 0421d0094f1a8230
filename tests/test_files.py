import errno
import json
from pathlib import Path

import pytest

from fedlens import files
from fedlens.errors import FedlensError


def test_a_failed_write_keeps_the_old_content_and_leaves_no_trace(tmp_path: Path) -> None:
    target = tmp_path / "value.json"
    files.write_json(target, {"x": 1})
    with pytest.raises(RuntimeError), files.replacing(target) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert json.loads(target.read_text()) == {"x": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["value.json"]


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    target = tmp_path / "value.json"
    files.write_json(target, {"x": 1})
    with pytest.raises(FedlensError, match=r"No space left.*kept") as caught:  # noqa: SIM117
        with files.replacing(target):
            raise OSError(errno.ENOSPC, "No space left on device")
    assert "\n" not in str(caught.value)
    assert files.read_json(target) == {"x": 1}


def test_a_folder_is_replaced_whole(tmp_path: Path) -> None:
    for number in (1, 2):
        with files.replacing(tmp_path / "folder") as temporary:
            temporary.mkdir()
            (temporary / f"file{number}").write_text("x")
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["file2"]
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_leftovers_of_a_kill_are_cleared(tmp_path: Path) -> None:
    (tmp_path / f"{files.TEMPORARY}a").write_text("half")
    (tmp_path / f"{files.TEMPORARY}b").mkdir()
    (tmp_path / "whole").write_text("x")
    files.clear_partials(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_nan_never_reaches_a_record(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        files.write_json(tmp_path / "x.json", {"loss": float("nan")})
    assert not list(tmp_path.iterdir())


def test_unreadable_json_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(FedlensError, match=r"x\.json cannot be read"):
        files.read_json(tmp_path / "x.json")


def test_the_cache_is_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDLENS_CACHE", str(tmp_path))
    assert files.cache_dir() == tmp_path
    monkeypatch.delenv("FEDLENS_CACHE")
    assert files.cache_dir().name == "fedlens"
