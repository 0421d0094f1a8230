"""The device a run computes on."""

import os

import torch

from fedlens.errors import FedlensError


def choose_device(name: str) -> torch.device:
    """The torch device of that name; `auto` takes the first of cuda, mps and cpu that exists."""
    available = {"cuda": torch.cuda.device_count(), "mps": int(torch.mps.is_available()), "cpu": 1}
    if name == "auto":
        name = next(kind for kind, count in available.items() if count)
    kind, _, number = name.partition(":")
    if int(number or 0) >= available[kind]:
        raise FedlensError(f"device={name} is not available here: use device=auto.")
    if name.startswith("cuda"):  # the same bits every time, where CUDA can
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    return torch.device(name)
