import errno
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier, Event

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


class Maker:
    """Makes a text, slowly, and counts how often."""

    def __init__(self, entry: Path) -> None:
        self.entry, self.made = entry, 0

    def find(self) -> str | None:
        return self.entry.read_text() if self.entry.exists() else None

    def make(self) -> str:
        self.made += 1
        time.sleep(0.1)
        with files.replacing(self.entry) as temporary:
            temporary.write_text("it")
        return "it"

    def ask(self) -> str:
        return files.make_once(self.entry, find=self.find, make=self.make)


@contextmanager
def being_made(entry: Path) -> Iterator[None]:
    """Somebody else is at it for as long as the context lasts."""
    begun, enough = Event(), Event()

    def make() -> str:
        begun.set()
        enough.wait()
        return "theirs"

    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(files.make_once, entry, find=lambda: None, make=make)
        begun.wait()
        try:
            yield
        finally:
            enough.set()
        assert theirs.result() == "theirs"


def test_what_several_ask_for_at_once_is_made_once(tmp_path: Path) -> None:
    maker, together = Maker(tmp_path / "kind" / "it"), Barrier(4)

    def ask(_: int) -> str:
        together.wait()
        return maker.ask()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == ["it"] * 4
    assert maker.made == 1
    assert [path.name for path in maker.entry.parent.iterdir()] == ["it"]


def test_what_is_there_is_read_without_a_lock(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "kind" / "it")
    maker.make()
    assert maker.ask() == "it"
    assert maker.made == 1
    assert [path.name for path in tmp_path.iterdir()] == ["kind"]


def test_another_entry_is_not_waited_for(tmp_path: Path) -> None:
    with being_made(tmp_path / "kind" / "it"):
        for other in (tmp_path / "kind" / "other", tmp_path / "other" / "it"):
            assert Maker(other).ask() == "it"


def test_who_waits_may_give_up_and_the_maker_goes_on(tmp_path: Path) -> None:
    def stop() -> None:
        raise InterruptedError

    maker = Maker(tmp_path / "kind" / "it")
    with being_made(maker.entry):
        start = time.monotonic()
        with pytest.raises(InterruptedError):
            files.make_once(maker.entry, find=maker.find, make=maker.make, check=stop)
        assert time.monotonic() - start < 2
    assert maker.made == 0
    assert maker.ask() == "it"  # who gave up holds nothing


def test_a_maker_that_fails_leaves_it_to_the_next(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "kind" / "it")
    with pytest.raises(ZeroDivisionError):
        files.make_once(maker.entry, find=maker.find, make=lambda: str(1 // 0))
    assert maker.ask() == "it"


def test_a_maker_that_dies_frees_its_lock_and_its_leftovers_go(tmp_path: Path) -> None:
    entry = tmp_path / "kind" / "it"
    others = entry.with_name(f"{files.TEMPORARY}that-12345678")
    code = f"""
import time
from pathlib import Path
from fedlens import files

def make():
    with files.replacing(Path({str(entry)!r})) as temporary:
        temporary.write_text("half")
        print("begun", flush=True)
        time.sleep(60)

files.make_once(Path({str(entry)!r}), find=lambda: None, make=make)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        others.write_text("half of another, which may still be in the making")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(Maker(entry).ask)
            time.sleep(0.1)
            assert not waiting.done()
            process.kill()
            assert waiting.result(timeout=10) == "it"
    assert sorted(path.name for path in entry.parent.iterdir()) == [others.name, "it"]


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "locks").write_text("in the way")
    with pytest.raises(FedlensError, match=r"Cannot write .*: set FEDLENS_CACHE .*\.$") as caught:
        Maker(tmp_path / "kind" / "it").ask()
    assert "\n" not in str(caught.value)
