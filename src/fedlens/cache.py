"""Tensors that can always be computed again, kept on disk with a digest of their own bits."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fedlens import files, params
from fedlens.runtime.threads import limited_threads

log = logging.getLogger(__name__)


def cached(
    path: Path,
    make: Callable[[], dict[str, torch.Tensor]],
    *,
    threads: int = 1,
    check: Callable[[], None] = lambda: None,
) -> dict[str, torch.Tensor]:
    """What `make` returns, read from `path` if it is there and whole, else made and kept there.

    It is made with one thread, so that its bits do not depend on how many the machine has, or with
    as many as its path tells. While another process makes it, `check` may raise to give up.
    """

    def made() -> dict[str, torch.Tensor]:
        with limited_threads(threads):
            tensors = make()
        store(path, tensors)
        return tensors

    return files.once(path, find=lambda: recall(path), make=made, check=check)


def store(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    with files.replacing(path) as temporary:
        save_file(dict(tensors), temporary, metadata={"digest": params.digest(tensors)})


def recall(path: Path) -> dict[str, torch.Tensor] | None:
    """What was stored at `path`; None if nothing is there, or if it is damaged, with a warning."""
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
            expected = (stored.metadata() or {}).get("digest")
        if params.digest(tensors) == expected:
            return tensors
        reason = "its content does not match its digest"
    except (SafetensorError, OSError) as error:
        reason = str(error)
    log.warning("%s is damaged (%s): it is made again.", path, reason)
    return None
