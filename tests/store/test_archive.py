import io
import lzma
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from fedlens.errors import FedlensError
from fedlens.files import cache_dir
from fedlens.store import archive as module
from fedlens.store.archive import extracted, pack


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLENS_CACHE", str(tmp_path / "cache"))


def packed(folder: Path) -> Path:
    """An archive of two files with content that xz cannot compress."""
    names = ["run/config.yaml", "run/arithmetic/alpha/record.json"]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(os.urandom(5000))
    archive = folder / "runs.tar.xz"
    pack({name: folder / name for name in names}, archive)
    return archive


def written(folder: Path, *entries: tarfile.TarInfo, content: bytes = b"x") -> Path:
    """An archive with entries that `pack` would not write."""
    archive = folder / "bad.tar.xz"
    with tarfile.open(archive, "w:xz") as tar:
        for entry in entries:
            entry.size = len(content) if entry.isreg() else 0
            tar.addfile(entry, io.BytesIO(content) if entry.isreg() else None)
    return archive


def entry(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, target
    return made


def refused(archive: Path, match: str) -> None:
    with pytest.raises(FedlensError, match=match) as caught:
        extracted(archive)
    assert "\n" not in str(caught.value)
    assert str(archive) in str(caught.value)
    assert not list((cache_dir() / "archives").glob("*"))  # nothing is left


def test_files_come_back_as_they_were(tmp_path: Path) -> None:
    folder = extracted(packed(tmp_path))
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert names == {"run/config.yaml", "run/arithmetic/alpha/record.json"}
    assert all((folder / name).read_bytes() == (tmp_path / name).read_bytes() for name in names)


def test_a_second_read_extracts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = packed(tmp_path)
    first = extracted(archive)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_extract", None)
        assert extracted(archive) == first
        moved = archive.rename(tmp_path / "elsewhere.tar.xz")
        assert extracted(moved) == first


def test_a_cache_that_lost_a_file_is_made_again(tmp_path: Path) -> None:
    archive = packed(tmp_path)
    for damage in (Path.unlink, lambda path: path.write_bytes(bytes(5000))):
        damage(extracted(archive) / "run" / "config.yaml")
        content = (extracted(archive) / "run" / "config.yaml").read_bytes()
        assert content == (tmp_path / "run" / "config.yaml").read_bytes()


def test_a_changed_archive_is_extracted_again(tmp_path: Path) -> None:
    archive = packed(tmp_path)
    first = extracted(archive)
    pack({"run/config.yaml": tmp_path / "run/config.yaml"}, archive)
    assert extracted(archive) != first
    assert not (extracted(archive) / "run" / "arithmetic").exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: content[:-8],
        lambda content: content[:6000] + bytes([content[6000] ^ 1]) + content[6001:],
        lambda content: content[:-20] + bytes([content[-20] ^ 1]) + content[-19:],
        lambda content: b"not an archive",
        lambda content: b"",
        lambda content: lzma.compress(b"not a tar file" * 100),
        lambda content: lzma.compress(b""),
    ],
    ids=["half", "no end", "bit", "checksum", "text", "empty", "no tar", "empty xz"],
)
def test_a_damaged_archive_is_one_sentence(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    archive = packed(tmp_path)
    archive.write_bytes(damage(archive.read_bytes()))
    refused(archive, "is not an intact archive of runs .*copy or download it again")


@pytest.mark.parametrize(
    "name", ["/tmp/config.yaml", "../config.yaml", "run/../../config.yaml", "config.yaml", ".."]
)
def test_files_outside_of_runs_are_refused(tmp_path: Path, name: str) -> None:
    refused(written(tmp_path, entry(name)), "not a file in a run's folder")
    assert not (tmp_path / "config.yaml").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_refused(tmp_path: Path, kind: bytes) -> None:
    refused(written(tmp_path, entry("run/config.yaml", kind, "/etc/passwd")), "link or a device")


def test_a_file_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    refused(written(tmp_path, entry("run/a.json"), entry("./run/a.json")), "run/a.json twice")


def test_an_archive_that_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = written(tmp_path, entry("run/a.json"), entry("run/b.json"), content=b"x" * 600)
    for limit, value in (("MAX_FILES", 1), ("MAX_BYTES", 1000)):
        with monkeypatch.context() as patch:
            patch.setattr(module, limit, value)
            refused(archive, "more than")
    assert extracted(archive).exists()


def test_directories_of_an_archive_made_by_hand_are_skipped(tmp_path: Path) -> None:
    archive = written(tmp_path, entry("run", tarfile.DIRTYPE), entry("run/config.yaml"))
    assert (extracted(archive) / "run" / "config.yaml").read_text() == "x"


def test_a_missing_archive_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(FedlensError, match="cannot be read"):
        extracted(tmp_path / "absent.tar.xz")
