"""Rules for squared per-example weight gradients, from a layer's input x and output gradient g.

The gradient of example b is g_bᵀx_b for a linear layer (Goodfellow, 2015, arXiv:1510.01799); it is
computed, squared, added to a sum and discarded.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from timm.layers.layer_scale import LayerScale
from torch import nn

Sums = Mapping[str, torch.Tensor]
Rule = Callable[[nn.Module, torch.Tensor, torch.Tensor, Sums], None]  # module, x, g; adds to sums
SCRATCH = {"cpu": 4 << 20}  # bytes of gradients at a time: about what fits into a cache
LARGE_SCRATCH = 256 << 20  # on other devices: enough to keep them busy


def _linear(module: nn.Module, x: torch.Tensor, g: torch.Tensor, sums: Sums) -> None:
    del module
    x, g = x.reshape(len(x), -1, x.shape[-1]), g.reshape(len(g), -1, g.shape[-1])
    if "weight" in sums:
        _add_products(sums["weight"][None], g.transpose(1, 2)[:, None], x[:, None])
    if "bias" in sums:
        _add_sums(sums["bias"], g)


def _conv(module: nn.Module, x: torch.Tensor, g: torch.Tensor, sums: Sums) -> None:
    assert isinstance(module, nn.Conv2d)
    if isinstance(module.padding, str) or module.padding_mode != "zeros":
        raise ValueError(f"no rule for padding={module.padding}, {module.padding_mode}")
    groups, g = module.groups, g.flatten(2)  # [B, O, L]
    if "weight" in sums:
        weight = sums["weight"]
        columns = weight[0].numel() * groups * g.shape[2]  # of one unfolded example
        for part in _parts(x, columns):
            unfolded = F.unfold(
                x[part], module.kernel_size, module.dilation, module.padding, module.stride
            )
            _add_products(
                weight.view(groups, len(weight) // groups, -1),
                g[part].reshape(-1, groups, len(weight) // groups, g.shape[2]),
                unfolded.view(len(unfolded), groups, -1, g.shape[2]).transpose(2, 3),
            )
    if "bias" in sums:
        _add_sums(sums["bias"], g.transpose(1, 2))


def _layer_norm(module: nn.Module, x: torch.Tensor, g: torch.Tensor, sums: Sums) -> None:
    assert isinstance(module, nn.LayerNorm)
    shape = module.normalized_shape
    if "weight" in sums:
        normal = F.layer_norm(x, shape, None, None, module.eps)
        _add_sums(sums["weight"], (g * normal).reshape(len(x), -1, *shape))
    if "bias" in sums:
        _add_sums(sums["bias"], g.reshape(len(x), -1, *shape))


def _layer_scale(module: nn.Module, x: torch.Tensor, g: torch.Tensor, sums: Sums) -> None:
    del module
    _add_sums(sums["gamma"], (g * x).reshape(len(x), -1, x.shape[-1]))


RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: _linear,
    nn.Conv2d: _conv,
    nn.LayerNorm: _layer_norm,
    LayerScale: _layer_scale,
}


def _add_sums(total: torch.Tensor, parts: torch.Tensor) -> None:
    """`parts` [B, T, ...]: an example's gradient is the sum over T."""
    total.add_(parts.sum(1).square_().sum(0))


def _add_products(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """`left` [B, G, O, T] and `right` [B, G, T, I]: an example's gradient is their product."""
    if left.shape[3] == 1:  # the square of an outer product is the outer product of squares
        squares = left[..., 0].square().permute(1, 2, 0), right[:, :, 0].square().transpose(0, 1)
        total.baddbmm_(*squares)
        return
    parts = _parts(left, total.numel())
    scratch = total.new_empty(parts[0].stop, *total.shape)
    for part in parts:
        gradients = scratch[: part.stop - part.start]
        torch.bmm(left[part].flatten(0, 1), right[part].flatten(0, 1), out=gradients.flatten(0, 1))
        for gradient in gradients:  # each still in the cache; reducing over the first axis is slow
            total.addcmul_(gradient, gradient)


def _parts(batch: torch.Tensor, each: int) -> list[slice]:
    """Slices of examples whose scratch, `each` numbers per example, fits; at least one example."""
    room = SCRATCH.get(batch.device.type, LARGE_SCRATCH)
    step = min(len(batch), max(1, room // (each * batch.element_size())))
    return [slice(start, min(start + step, len(batch))) for start in range(0, len(batch), step)]


def rule_of(module: nn.Module) -> Rule | None:
    return next((rule for kind, rule in RULES.items() if isinstance(module, kind)), None)
