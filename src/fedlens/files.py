"""Atomic writes: after a kill at any moment, a file has its old content or its new one.

Content goes to a temporary file next to the target, is fsynced and renamed; the folder is fsynced
too. What several processes need is made by one of them while the others wait.
"""

import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import platformdirs
from filelock import FileLock, Timeout

from fedlens.errors import FedlensError

TEMPORARY = ".partial-"
POLL_S = 0.5  # seconds between two checks while another process makes an entry

T = TypeVar("T")

log = logging.getLogger(__name__)


def cache_dir() -> Path:
    """The folder of downloads and intermediate results: FEDLENS_CACHE, else the user's cache."""
    folder = os.environ.get("FEDLENS_CACHE")
    return Path(folder).expanduser() if folder else platformdirs.user_cache_path("fedlens")


@contextmanager
def replacing(target: Path, *, sync: bool = True) -> Iterator[Path]:
    """Yields a temporary path for a file or a folder, which replaces `target` on success.

    On failure the temporary one is removed and `target` stays as it was. Without `sync` a power
    failure may lose content: for what is checked when it is read, and can be made again.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f"{TEMPORARY}{target.name}-{uuid.uuid4().hex[:8]}"
    try:
        yield temporary
        if sync:
            parts = temporary.rglob("*") if temporary.is_dir() else []
            for part in (*parts, temporary):
                _sync(part)
        if temporary.is_dir():
            discard(target)
        temporary.replace(target)
        _sync(target.parent)
    except OSError as error:
        _remove(temporary)
        raise FedlensError(
            f"Could not write {target} ({error.strerror or error}); its former content is kept: "
            "free some space or check the permissions, then run the same command again."
        ) from error
    except BaseException:
        _remove(temporary)
        raise


def private_log(path: Path) -> BinaryIO:
    """Opens a file to append to, which only its owner can read; an existing one becomes so."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.fchmod(handle, 0o600)
    return os.fdopen(handle, "ab")


def make_private(folder: Path) -> None:
    """Lets only the owner read a folder and all that is in it."""
    folder.chmod(0o700)
    for path in folder.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)


def discard(folder: Path) -> None:
    """Removes a folder; a kill in between leaves no incomplete folder of that name."""
    if folder.exists():
        renamed = folder.parent / f"{TEMPORARY}{folder.name}-{uuid.uuid4().hex[:8]}"
        folder.replace(renamed)
        _remove(renamed)


def clear_partials(folder: Path, *, of: str | None = None) -> None:
    """Removes temporary files of killed processes: all of a folder, or those of the file `of`."""
    for leftover in folder.glob(f"{TEMPORARY}{of}-*" if of else f"{TEMPORARY}*"):
        _remove(leftover)


def make_once(
    entry: Path,
    *,
    find: Callable[[], T | None],
    make: Callable[[], T],
    check: Callable[[], None] = lambda: None,
    assist: Callable[[], bool] = lambda: False,
) -> T:
    """Returns what `find` reads of `entry`; where it is None, what `make` returns and stores.

    One process makes an entry at a time. The others wait and then find it. While they wait, `check`
    is called, which may raise to give up, and `assist`, which may do a part of the work and returns
    whether there was any left. An existing entry is read without the lock, so a read-only cache
    works too.
    """
    result = find()
    if result is None:
        with _locked(entry, check, assist):
            result = find()
            if result is None:
                result = make()
    return result


@contextmanager
def _locked(entry: Path, check: Callable[[], None], assist: Callable[[], bool]) -> Iterator[None]:
    """Holds the entry's lock; the kernel frees the lock of a process that dies.

    Lock files are never removed: two processes could lock the removed file and a new one.
    """
    kind, name = entry.parts[-2:]
    lock = FileLock(entry.parent.parent / "locks" / f"{kind}-{name}.lock")
    if not _acquired(lock, 0):
        log.info("Another process is making %s; waiting for it.", entry)
        timeout = POLL_S
        while not _acquired(lock, timeout):
            check()
            timeout = 0 if assist() else POLL_S
    try:
        clear_partials(entry.parent, of=entry.name)
        yield
    finally:
        lock.release()


def _acquired(lock: FileLock, timeout: float) -> bool:
    try:
        Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=timeout)
    except Timeout:
        return False
    except OSError as error:
        raise FedlensError(
            f"Cannot write {lock.lock_file} ({error.strerror or error}): set FEDLENS_CACHE to a "
            "folder you may write to."
        ) from error
    return True


def write_json(path: Path, value: Any, *, indent: int | None = 2) -> None:
    with replacing(path) as temporary:
        text = json.dumps(value, indent=indent, allow_nan=False)
        temporary.write_text(text + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FedlensError(f"{path} cannot be read as JSON ({error}).") from error


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Flushes a file or a folder to the disk; not all systems can do that for folders."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():
            raise
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    with suppress(OSError):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
