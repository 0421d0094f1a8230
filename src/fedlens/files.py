"""Atomic writes: after a kill at any moment, a file has its old content or its new one.

Content goes to a temporary file next to the target, is fsynced and renamed; the folder is fsynced
too. What several processes need is made by one of them while the others wait.
"""

import glob
import hashlib
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import platformdirs
from filelock import FileLock, Timeout
from safetensors import SafetensorError

from fedlens.errors import FedlensError
from fedlens.paths import expanded

TEMPORARY = ".partial-"
POLL_S = 0.5  # seconds between two checks while another process makes an entry
CHUNK_BYTES = 2**20  # read at a time
MAX_DEPTH = 50  # of nested lists and objects: no file of ours comes near it
OS_ERROR = re.compile(r"(?:code: |os error )(\d+)")  # as safetensors reports one

T = TypeVar("T")

log = logging.getLogger(__name__)


def cache_dir() -> Path:
    """The folder of downloads and intermediate results: FEDLENS_CACHE, else the user's cache."""
    folder = os.environ.get("FEDLENS_CACHE")
    return expanded(folder) if folder else platformdirs.user_cache_path("fedlens")


@contextmanager
def replacing(target: Path, *, sync: bool = True) -> Iterator[Path]:
    """Yields a temporary path for a file or a folder, which replaces `target` on success.

    On failure the temporary one is removed and `target` stays as it was. Without `sync` a power
    failure may lose content: for what is checked when it is read, and can be made again.
    """
    temporary = target.parent / f"{TEMPORARY}{target.name}-{uuid.uuid4().hex[:8]}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        if sync:
            parts = temporary.rglob("*") if temporary.is_dir() else []
            for part in (*parts, temporary):
                _sync(part)
        if temporary.is_dir():
            discard(target)
        temporary.replace(target)
        _sync(target.parent)
    except (OSError, SafetensorError) as error:
        _remove(temporary)
        if (reason := _os_reason(error)) is None:
            raise
        raise FedlensError(
            f"Could not write {target} ({reason}); its former content is kept: "
            "free some space or check the permissions, then run the same command again."
        ) from error
    except BaseException:
        _remove(temporary)
        raise


def _os_reason(error: OSError | SafetensorError) -> str | None:
    """What the system says; None for an error of safetensors that does not come from the system."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    number = OS_ERROR.search(str(error))
    return os.strerror(int(number[1])) if number else None


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
    for leftover in folder.glob(f"{TEMPORARY}{glob.escape(of)}-*" if of else f"{TEMPORARY}*"):
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
    """The content of a JSON file; refuses one that is not JSON, or is nested very deeply."""
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FedlensError(f"{path} cannot be read as JSON ({error}).") from error


def read_object(path: Path) -> dict[str, Any]:
    """The content of a JSON file that holds names and values."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise FedlensError(f"{path} is not a record: it must be a JSON object.")
    return value


def parse_json(text: str) -> Any:
    """`json.loads`, with a ValueError also for what is nested too deeply to walk through."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if text.count("[") + text.count("{") > MAX_DEPTH:  # else it cannot be that deep
        check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """Raises a ValueError if lists and objects are nested more than MAX_DEPTH deep."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        inner = (one for each in level for one in (each.values() if type(each) is dict else each))
        level = list({id(one): one for one in inner if isinstance(one, dict | list)}.values())
    if level:
        raise ValueError("it is nested too deeply")


def sha256(path: Path, *, length: int | None = None) -> str:
    """The SHA-256 of a file, or of its first `length` bytes; EOFError if it has fewer."""
    with path.open("rb") as stream:
        if length is None:
            return hashlib.file_digest(stream, "sha256").hexdigest()
        digest = hashlib.sha256()
        while length:
            chunk = stream.read(min(length, CHUNK_BYTES))
            if not chunk:
                raise EOFError(f"{path} is too short")
            digest.update(chunk)
            length -= len(chunk)
        return digest.hexdigest()


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
