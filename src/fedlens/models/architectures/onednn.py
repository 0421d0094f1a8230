"""Linear layers by oneDNN's matrix product instead of MKL's, the same up to rounding.

torch multiplies float32 matrices on a CPU by MKL, which uses AVX-512 on Intel's processors only.
oneDNN, which torch has for convolutions, uses it on all that have it. Which of them is faster
depends on the machine: `benchmarks/step_levers.py` prints the rates of both.
"""

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlens.runtime.threads import limited_threads

MIN_SPEEDUP = 1.25  # of oneDNN's product over MKL's, so that the same machine always decides alike
ROWS, INPUTS, OUTPUTS = 512, 192, 576  # of the product that is timed, a layer of ViT-Ti
REPEATS = 10


class OneDnnLinear(nn.Linear):
    """Other inputs than float32 on a CPU take torch's own way."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (as torch calls it)
        kinds = {(one.dtype, one.device.type) for one in (input, self.weight)}
        if kinds != {(torch.float32, "cpu")} or torch.is_autocast_enabled("cpu"):
            return super().forward(input)
        rows = input.reshape(-1, self.in_features)
        outputs: Tensor = _Linear.apply(rows, self.weight, self.bias)
        return outputs.view(*input.shape[:-1], self.out_features)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return product(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        by_rows, by_weight, by_bias = ctx.needs_input_grad
        return (
            product(slope, weight.t()) if by_rows else None,
            product(slope.t(), rows.t()) if by_weight else None,
            slope.sum(0) if by_bias else None,
        )


def product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """rows · weightᵀ + bias"""
    if not rows.numel():
        return F.linear(rows, weight, bias)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return out


def available() -> bool:
    """Whether this build of torch has the product."""
    return torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@cache
def is_faster() -> bool:
    """Whether it is on this machine, by a measurement of some milliseconds."""
    if not available():
        return False
    rows, weight = torch.ones(ROWS, INPUTS), torch.ones(OUTPUTS, INPUTS)  # nothing is drawn
    with limited_threads(1):
        by_mkl = _seconds(lambda: F.linear(rows, weight))
        by_onednn = _seconds(lambda: product(rows, weight))
    return by_mkl / by_onednn >= MIN_SPEEDUP


def chosen(asked: bool | None, device: torch.device) -> bool:
    """What was asked for; where nothing was, what is faster on this machine."""
    return device.type == "cpu" and is_faster() if asked is None else asked


def _seconds(work: Callable[[], object]) -> float:
    """The shortest of some times of the processor, which other programs disturb little."""
    work()
    seconds = []
    for _ in range(REPEATS):
        began = time.thread_time()
        work()
        seconds.append(time.thread_time() - began)
    return min(seconds)


def use_onednn(model: nn.Module) -> bool:
    """Changes the model's linear layers in place; whether there were any.

    The changed layers cannot be differentiated by `torch.func`.
    """
    if not available():
        return False
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    for layer in layers:
        layer.__class__ = OneDnnLinear
    return bool(layers)
