"""Numeric precision: float32, or autocast to half precision where it works.

Some CPUs advertise bfloat16 units whose use kills the process, so half precision is first tried in
a child process, and refused if the child fails.
"""

import math
import signal
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache

import torch

from fedlens.errors import FedlensError, suggest

CHOICES = ("fp32", "amp")
BACKOFF = math.nextafter(1.0, 0.0)  # a scaler must be able to shrink; in float32, this is 1

_PROBE = """
import sys, torch
device, dtype = sys.argv[1], getattr(torch, sys.argv[2])
x = torch.randn(64, 64, device=device, requires_grad=True)
layer = torch.nn.Linear(64, 64, device=device)
with torch.autocast(device, dtype=dtype):
    loss = torch.nn.functional.scaled_dot_product_attention(*[layer(x)[None, None]] * 3).sum()
loss.backward()
assert torch.isfinite(loss) and torch.isfinite(x.grad).all()
"""


@dataclass(frozen=True)
class Precision:
    name: str
    device: str
    dtype: torch.dtype | None = None
    scaler: "torch.amp.GradScaler | None" = None

    def for_clients(self) -> "Precision":
        """With a fixed loss scale, so that a client's steps do not depend on earlier clients."""
        if self.scaler is None:
            return self
        fixed = torch.amp.GradScaler(
            self.device,
            init_scale=1024.0,
            growth_interval=2**31 - 1,
            backoff_factor=BACKOFF,
        )
        return replace(self, scaler=fixed)

    def autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device, dtype=self.dtype) if self.dtype else nullcontext()


def choose(name: str, device: torch.device) -> Precision:
    """The precision called `name` on `device`; refuses half precision that fails its probe."""
    if name not in CHOICES:
        raise FedlensError(f"Unknown precision '{name}': {suggest(name, CHOICES)}")
    if name == "fp32":
        return Precision(name, device.type)
    fp16 = device.type == "mps" or (device.type == "cuda" and not _cuda_has_bfloat16())
    dtype = torch.float16 if fp16 else torch.bfloat16
    if reason := probe(device.type, dtype):
        raise FedlensError(
            f"Half precision (amp) does not work on this {device.type} ({reason}): use "
            "precision=fp32."
        )
    scaler = torch.amp.GradScaler(device.type) if fp16 and device.type == "cuda" else None
    return Precision(name, device.type, dtype, scaler)


@cache
def probe(device: str, dtype: torch.dtype) -> str | None:
    """Why autocast to `dtype` fails on `device`, tried in a child process; None if it works.

    The child loads torch, which takes seconds: a suite tries once, not before every run.
    """
    kind = str(dtype).removeprefix("torch.")
    child = [sys.executable, "-c", _PROBE, device, kind]
    try:
        done = subprocess.run(child, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return f"{kind} autocast hangs"
    if done.returncode < 0:
        return f"{kind} autocast kills the process with {signal.Signals(-done.returncode).name}"
    if done.returncode > 0:
        return f"{kind} autocast fails: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
    return None


def _cuda_has_bfloat16() -> bool:
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))
