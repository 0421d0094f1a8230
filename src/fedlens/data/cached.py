"""Tensors that can always be computed again, kept on disk with a digest of their own bits."""

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fedlens import files, params

log = logging.getLogger(__name__)


def cached(path: Path, make: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What `make` returns, read from `path` if it is there and whole, else made and kept there."""
    if path.exists():
        try:
            return _read(path)
        except (SafetensorError, OSError, ValueError) as error:
            log.warning("%s is damaged (%s): it is made again.", path, error)
    tensors = make()
    with files.replacing(path) as temporary:
        save_file(tensors, temporary, metadata={"digest": params.digest(tensors)})
    return tensors


def _read(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, framework="pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        expected = (stored.metadata() or {}).get("digest")
    if params.digest(tensors) != expected:
        raise ValueError("its content does not match its digest")
    return tensors
