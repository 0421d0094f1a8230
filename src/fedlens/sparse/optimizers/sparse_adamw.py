"""AdamW on the entries a mask trains; all others stay as they are, bit for bit.

m ← β₁m + (1 − β₁)g, v ← β₂v + (1 − β₂)g², w ← (1 − ηλ)w − η m̂/(√v̂ + ε), where m̂ = m/(1 − β₁ᵗ) and
v̂ = v/(1 − β₂ᵗ). Loshchilov & Hutter, 2019, https://arxiv.org/abs/1711.05101.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fedlens.sparse.optimizers.masked_optimizer import MaskedOptimizer, refuse_negative


class SparseAdamW(MaskedOptimizer):
    """`torch.optim.AdamW` on {w : mask}; a parameter without a mask is trained whole, as by AdamW.

    Its bits are those of `torch.optim.AdamW(foreach=False)`, the default on CPUs.

    Args:
        params: Named parameters, `model.named_parameters()`, or groups of them.
        lr: The learning rate η.
        betas: β₁ and β₂, as in AdamW.
        eps: ε, as in AdamW.
        weight_decay: λ, as in AdamW.
        maximize: Climb instead of descending.
        masks: Name → bool tensor: of these parameters, only the entries that are True are trained.

    Examples:
        >>> import torch
        >>> import fedlens as fl
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> masks = {"weight": torch.tensor([[True, False]])}
        >>> optimizer = fl.SparseAdamW(layer.named_parameters(), lr=0.1, masks=masks)
        >>> before = layer.weight.detach().clone()
        >>> layer(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> (layer.weight != before).tolist()
        [[True, False]]
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        masks: Mapping[str, Tensor],
    ) -> None:
        refuse_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be in [0, 1), but are {betas}")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, defaults, masks=masks)

    def _move(
        self, weights: Tensor, grad: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]
    ) -> None:
        """With AdamW's own kernels in AdamW's order, so that the bits are AdamW's."""
        beta1, beta2 = group["betas"]
        if group["maximize"]:
            grad = -grad
        if not state:
            state["step"] = torch.tensor(0.0)  # on the CPU, as torch keeps it
            state["exp_avg"] = torch.zeros_like(weights)
            state["exp_avg_sq"] = torch.zeros_like(weights)
        state["step"] += 1
        if group["weight_decay"] != 0:
            weights.mul_(1 - group["lr"] * group["weight_decay"])
        mean = state["exp_avg"].lerp_(grad, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        step = state["step"].item()
        root = (square.sqrt() / (1 - beta2**step) ** 0.5).add_(group["eps"])
        weights.addcdiv_(mean, root, value=-group["lr"] / (1 - beta1**step))
