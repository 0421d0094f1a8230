"""Files that survive a kill: a reader sees the old content or the new, never a half.

Written to a temporary name beside the target, fsynced, renamed; the folder is fsynced too.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import platformdirs

from fedlens.errors import FedlensError

TEMPORARY = ".partial-"


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


def clear_partials(folder: Path) -> None:
    """Removes what a kill half-way through `replacing` or `discard` left behind."""
    for leftover in folder.glob(f"{TEMPORARY}*"):
        _remove(leftover)


def write_json(path: Path, value: Any) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


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
