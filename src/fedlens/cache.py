"""A disk cache of tensors that can be computed again, each file with a digest of its content."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fedlens import files, params
from fedlens.runtime.threads import limited_threads

LARGE = 1 << 23  # bytes of a file whose digest a process computes once, unless the file changes

log = logging.getLogger(__name__)

_verified: set[tuple[str, int, int, int]] = set()  # path, inode, size and time of the last change


def cached(
    path: Path,
    make: Callable[[], dict[str, torch.Tensor]],
    *,
    threads: int = 1,
    check: Callable[[], None] = lambda: None,
) -> dict[str, torch.Tensor]:
    """What `make` returns: read from `path` if it is stored there undamaged, else made and stored.

    It is made with one thread, so that its bits do not depend on the machine; `path` must depend
    on `threads` if there are more. While another process makes it, `check` may raise to stop.
    """

    def make_and_store() -> dict[str, torch.Tensor]:
        with limited_threads(threads):
            tensors = make()
        store(path, tensors)
        return tensors

    return files.make_once(path, find=lambda: recall(path), make=make_and_store, check=check)


def store(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    with files.replacing(path) as temporary:
        save_file(dict(tensors), temporary, metadata={"digest": params.digest(tensors)})


def recall(path: Path) -> dict[str, torch.Tensor] | None:
    """What is stored at `path`; None if there is nothing, or, with a warning, if it is damaged."""
    if not path.exists():
        return None
    try:
        status = path.stat()
        file = (str(path), status.st_ino, status.st_size, status.st_mtime_ns)
        with safe_open(path, framework="pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
            expected = (stored.metadata() or {}).get("digest")
        if file in _verified or params.digest(tensors) == expected:
            if status.st_size >= LARGE:
                _verified.add(file)
            return tensors
        reason = "its content does not match its digest"
    except (SafetensorError, OSError) as error:
        reason = str(error)
    log.warning("%s is damaged (%s): it is made again.", path, reason)
    return None
