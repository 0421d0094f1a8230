"""A module replaced by its first-order expansion: f(x; θ₀) + J(x; θ₀)·(θ − θ₀).

The product with the Jacobian is a forward-mode derivative, and gradients of θ go through it.
Ortiz-Jimenez et al., 2023, https://arxiv.org/abs/2305.12827.
"""

import warnings
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedlens.params import Params

with warnings.catch_warnings():  # torch loads these on first use, with a warning about its own code
    warnings.simplefilter("ignore", FutureWarning)
    import torch._decomp.decompositions_for_jvp


def expansion(module: nn.Module, origin: Params, inputs: torch.Tensor) -> torch.Tensor:
    """The expansion of `module` around the parameters `origin`, at the module's own parameters."""
    parameters = dict(module.named_parameters())
    tangents = {name: parameters[name] - value for name, value in origin.items()}

    def at(values: Params) -> torch.Tensor:
        output: torch.Tensor = functional_call(module, dict(values), (inputs,))
        return output

    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels of attention have no forward derivative
        value_and_derivative: Any = jvp(at, (dict(origin),), (tangents,))
    value, derivative = value_and_derivative
    expanded: torch.Tensor = value + derivative
    return expanded
