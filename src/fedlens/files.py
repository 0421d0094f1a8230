"""Files that survive a kill: a reader sees the old content or the new, never a half.

Written to a temporary name beside the target, fsynced, renamed; the folder is fsynced too.
What several processes need is made by one of them while the others wait.
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
from typing import Any, TypeVar

import platformdirs
from filelock import FileLock, Timeout

from fedlens.errors import FedlensError

TEMPORARY = ".partial-"
PATIENCE = 0.5  # seconds between two looks at whether waiting still makes sense

T = TypeVar("T")

log = logging.getLogger(__name__)


def cache_dir() -> Path:
    """Where downloads and everything recomputable live: FEDLENS_CACHE, else the user's cache."""
    named = os.environ.get("FEDLENS_CACHE")
    return Path(named).expanduser() if named else platformdirs.user_cache_path("fedlens")


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yields a temporary path (create a file or a folder there); on success it becomes `target`.

    On any failure the temporary is removed and what stood at `target` stays.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f"{TEMPORARY}{target.name}-{uuid.uuid4().hex[:8]}"
    try:
        yield temporary
        for part in [*temporary.rglob("*"), temporary] if temporary.is_dir() else [temporary]:
            _sync(part)
        if temporary.is_dir():
            discard(target)
        temporary.replace(target)
        _sync(target.parent)
    except OSError as error:
        _remove(temporary)
        raise FedlensError(
            f"Could not write {target} ({error.strerror or error}); what was there before is kept: "
            "free some space or check the permissions, then run the same command again."
        ) from error
    except BaseException:
        _remove(temporary)
        raise


def discard(folder: Path) -> None:
    """Removes a folder so that a kill half-way leaves no folder of that name with parts missing."""
    if folder.exists():
        doomed = folder.parent / f"{TEMPORARY}{folder.name}-{uuid.uuid4().hex[:8]}"
        folder.replace(doomed)
        _remove(doomed)


def clear_partials(folder: Path, *, of: str | None = None) -> None:
    """Removes what a kill half-way through `replacing` or `discard` left behind, maybe `of` one."""
    for leftover in folder.glob(f"{TEMPORARY}{of}-*" if of else f"{TEMPORARY}*"):
        _remove(leftover)


def once(
    entry: Path,
    *,
    find: Callable[[], T | None],
    make: Callable[[], T],
    check: Callable[[], None] = lambda: None,
    assist: Callable[[], bool] = lambda: False,
) -> T:
    """What `find` finds of `entry`, else what `make` makes and keeps there, one process at a time.

    A second process waits, then finds it; meanwhile `check` is called, which may raise to give up,
    and `assist`, which may do a part of what is being made, and says whether there was one to do.
    What is there is read without the lock, so a cache that can only be read serves too.
    """
    found = find()
    if found is None:
        with _alone(entry, check, assist):
            found = find()
            if found is None:
                found = make()
    return found


@contextmanager
def _alone(entry: Path, check: Callable[[], None], assist: Callable[[], bool]) -> Iterator[None]:
    """Holds the entry's lock, which the kernel frees if the process dies.

    Locks lie in a folder of their own and stay: who waits for a removed one waits alone.
    """
    kind, name = entry.parts[-2:]
    lock = FileLock(entry.parent.parent / "locks" / f"{kind}-{name}.lock")
    if not _acquired(lock, 0):
        log.info("Another process is making %s; waiting for it.", entry)
        patience = PATIENCE
        while not _acquired(lock, patience):
            check()
            patience = 0 if assist() else PATIENCE
    try:
        clear_partials(entry.parent, of=entry.name)
        yield
    finally:
        lock.release()


def _acquired(lock: FileLock, patience: float) -> bool:
    try:
        Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=patience)
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
    """Flushes a file or a folder to the disk; some systems cannot fsync folders, which is fine."""
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
