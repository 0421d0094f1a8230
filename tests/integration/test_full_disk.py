"""A disk that is full at any write: one sentence, and the run resumes once there is room."""

import errno
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from fedlens import cache, files
from fedlens.config.compose import compose
from fedlens.data.sources import synthetic
from fedlens.errors import FedlensError
from fedlens.experiments.run import start
from fedlens.runtime.logs import LogFile
from fedlens.sparse import mask_files
from fedlens.store import checkpoints, client_states, client_updates
from fedlens.store.run_folder import RunFolder
from tests.integration.conftest import FEDERATED, TINY, facts

OPTIONS = [
    *TINY, *FEDERATED, "data.train_per_class=2", "data.test_per_class=1", "federated.rounds=2",
    "federated.keep_updates=1", "algorithm=scaffold", "head=ridge", "sparse.density=0.1",
    "sparse.rounds=1", "sparse.examples=8", "run.name=it",
]  # fmt: skip
WRITERS = (cache, mask_files, checkpoints, client_states, client_updates)


class Disk:
    """Has room for `room` writes; None: for all."""

    def __init__(self, room: int | None) -> None:
        self.room = room
        self.writes = 0

    @property
    def full(self) -> bool:
        return self.room is not None and self.writes > self.room

    def write(self) -> None:
        self.writes += 1
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def disk(room: int | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """Every open file for writing, fsync, new folder and safetensors file is a write."""
    one = Disk(room)
    open_file, fsync, mkdir = io.open, os.fsync, os.mkdir

    def opened(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if set(mode) & set("wax+"):
            one.write()
        return open_file(file, mode, *args, **options)

    def saved(save: Callable[..., None]) -> Callable[..., None]:
        def wrapped(tensors: Any, path: Path, **options: Any) -> None:
            try:
                one.write()
            except OSError:
                Path(path).touch()  # as much of it as had room
                reason = 'IoError(Os { code: 28, kind: StorageFull, message: "No space left" })'
                raise SafetensorError(f"Error while serializing: {reason}") from None
            save(tensors, path, **options)

        return wrapped

    def before(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            one.write()
            return function(*args, **options)

        return wrapped

    def flushed(self: LogFile) -> None:
        if one.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(io, "open", opened)
        patch.setattr(os, "fsync", before(fsync))
        patch.setattr(os, "mkdir", before(mkdir))
        patch.setattr(LogFile, "flush", flushed)
        for module in WRITERS:
            patch.setattr(module, "save_file", saved(module.save_file))
        yield one


@pytest.fixture(scope="module", autouse=True)
def _drawn_once() -> Iterator[None]:
    """Every test writes the images to a cache of its own, but they are computed once, and only so
    many of a class as the runs read: all of them would be 77 MB."""
    drawn: dict[str, Any] = {}
    draw = synthetic._draw

    def remembered(classes: Any, split: str, per_class: int) -> Any:
        if split not in drawn:
            drawn[split] = draw(classes, split, 2)
        return drawn[split]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic, "_draw", remembered)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], int]:
    """What an undisturbed run gives, and its number of writes."""
    monkeypatch = pytest.MonkeyPatch()
    root = tmp_path_factory.mktemp("whole")
    with monkeypatch.context() as patch:
        patch.setenv("FEDLENS_CACHE", str(root / "cache"))
        with disk(None, patch) as counted:
            folder = start(compose("quickstart", [*OPTIONS, f"run.root={root}"]))
    return facts(folder), counted.writes


@pytest.mark.parametrize("share", [0.02, 0.15, 0.3, 0.45, 0.6, 0.7, 0.8, 0.9, 0.97])
def test_a_disk_that_is_full_after_some_writes(
    share: float,
    whole: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    expected, writes = whole
    monkeypatch.setenv("FEDLENS_CACHE", str(tmp_path / "cache"))
    config = compose("quickstart", [*OPTIONS, f"run.root={tmp_path}"])
    with disk(round(share * writes), monkeypatch), pytest.raises(FedlensError) as caught:
        start(config)
    assert "No space left on device" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "Traceback" not in capfd.readouterr().err
    assert facts(start(config)) == expected
    assert not list(tmp_path.rglob(f"{files.TEMPORARY}*"))


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tmpfs of a given size; called again, it changes the size."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("only root can mount a tmpfs, on Linux")
    place = tmp_path / "small"
    place.mkdir()
    mounted = False

    def mount_or_resize(size: str) -> Path:
        nonlocal mounted
        options = f"remount,size={size}" if mounted else f"size={size}"
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
        mounted = True
        return place

    yield mount_or_resize
    if mounted:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("size", ["32k", "256k", "768k", "1536k"])
def test_a_small_tmpfs(
    size: str,
    whole: Any,
    mount: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    place = mount(size)
    monkeypatch.setenv("FEDLENS_CACHE", str(place / "cache"))
    config = compose("quickstart", [*OPTIONS, f"run.root={place / 'runs'}"])
    with pytest.raises(FedlensError) as caught:
        start(config)
    assert "\n" not in str(caught.value)
    assert "Traceback" not in capfd.readouterr().err
    mount("256m")
    folder = start(config)
    assert facts(folder) == whole[0]
    assert isinstance(folder, RunFolder)
