"""Parameters of a model as a mapping, name → tensor."""

import hashlib
import math
from collections.abc import Mapping

import torch

Params = Mapping[str, torch.Tensor]
NO_FLOAT64 = ("mps",)  # devices without that type


def digest(params: Params) -> str:
    """SHA-256 over names, types, shapes and bytes: equal if and only if bit-identical."""
    total = hashlib.sha256()
    for name in sorted(params):
        value = params[name].detach().cpu().contiguous()
        total.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        total.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def copy(params: Params) -> dict[str, torch.Tensor]:
    """A copy without gradients."""
    return {name: value.detach().clone() for name, value in params.items()}


def norm(params: Params) -> float:
    """Of all values together, in float64."""
    norms = [torch.linalg.vector_norm(one, dtype=torch.float64).item() for one in params.values()]
    return math.hypot(*norms)


def zeros_like(params: Params, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(value, dtype=dtype) for name, value in params.items()}


def float64_device(device: torch.device) -> torch.device:
    """The device for sums in float64: this one, or the CPU if it has none."""
    return torch.device("cpu") if device.type in NO_FLOAT64 else device


def with_float64(params: Params) -> dict[str, torch.Tensor]:
    """The same tensors, on the CPU where their device has no float64."""
    return {name: value.to(float64_device(value.device)) for name, value in params.items()}


def double(value: torch.Tensor) -> torch.Tensor:
    """In float64, without a gradient, on the CPU where the device has no float64."""
    return value.detach().to(float64_device(value.device)).double()


def assign(target: Params, source: Params) -> None:
    """Copies the values of `source` into the tensors of `target`; names and shapes must agree."""
    if fault := mismatch(target, source):
        raise ValueError(fault)
    with torch.no_grad():
        for name, value in target.items():
            value.copy_(source[name])


def mismatch(expected: Params, actual: Params) -> str | None:
    """How the names or shapes of two mappings differ, in words; None if they agree."""
    faults = []
    if missing := sorted(expected.keys() - actual.keys()):
        faults.append(f"missing {_names(missing)}")
    if unexpected := sorted(actual.keys() - expected.keys()):
        faults.append(f"unexpected {_names(unexpected)}")
    faults += [
        f"{name} has shape {tuple(actual[name].shape)} instead of {tuple(expected[name].shape)}"
        for name in sorted(expected.keys() & actual.keys())
        if actual[name].shape != expected[name].shape
    ][:3]
    return "; ".join(faults) or None


def _names(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
