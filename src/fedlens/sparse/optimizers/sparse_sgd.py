"""SGD with momentum on the entries a mask trains; all others stay as they are, bit for bit.

At the trained entries g = ∇w + λw, v ← μv + (1 − τ)g and w ← w − ηv, or w − η(g + μv) if Nesterov;
nothing is stored, decayed or written elsewhere. Iurada et al., 2025, arXiv:2504.02620.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fedlens.sparse.optimizers.masked_optimizer import MaskedOptimizer, refuse_negative


class SparseSGDM(MaskedOptimizer):
    """`torch.optim.SGD` on {w : mask}; a parameter without a mask is trained whole, as by SGD.

    Args:
        params: Named parameters, `model.named_parameters()`, or groups of them.
        lr: The learning rate η.
        momentum: μ, as in SGD.
        dampening: τ, as in SGD.
        weight_decay: λ, as in SGD.
        nesterov: Nesterov momentum, which needs momentum > 0 and no dampening.
        maximize: Climb instead of descending.
        fused: One pass over the entries instead of four, as in SGD: faster, equal up to rounding.
        masks: Name → bool tensor: of these parameters, only the entries that are True are trained.

    Examples:
        >>> import torch
        >>> import fedlens as fl
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> masks = {"weight": torch.tensor([[True, False]])}
        >>> optimizer = fl.SparseSGDM(layer.named_parameters(), lr=0.1, momentum=0.9, masks=masks)
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
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        fused: bool = False,
        masks: Mapping[str, Tensor],
    ) -> None:
        refuse_negative(lr=lr, momentum=momentum, weight_decay=weight_decay)
        if nesterov and (momentum == 0 or dampening != 0):
            raise ValueError("Nesterov momentum needs momentum > 0 and dampening 0")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "fused": fused,
        }
        super().__init__(params, defaults, masks=masks)

    def _move(
        self, weights: Tensor, grad: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]
    ) -> None:
        """With SGD's own kernels in SGD's order, so that the bits are SGD's."""
        if group.get("fused"):  # older checkpoints do not say
            _fused_move(weights, grad, state, group)
            return
        if group["maximize"]:
            grad = -grad
        if group["weight_decay"] != 0:
            grad = grad.add(weights, alpha=group["weight_decay"])
        if group["momentum"] != 0:
            velocity = state.get("momentum_buffer")
            if velocity is None:
                velocity = state["momentum_buffer"] = grad.clone()
            else:
                velocity.mul_(group["momentum"]).add_(grad, alpha=1 - group["dampening"])
            grad = grad.add(velocity, alpha=group["momentum"]) if group["nesterov"] else velocity
        weights.add_(grad, alpha=-group["lr"])


def _fused_move(
    weights: Tensor, grad: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]
) -> None:
    first = "momentum_buffer" not in state
    if first and group["momentum"]:
        state["momentum_buffer"] = torch.empty_like(grad)  # the first step writes it
    torch._fused_sgd_(
        [weights],
        [grad],
        [state["momentum_buffer"]] if group["momentum"] else [],
        lr=group["lr"],
        momentum=group["momentum"],
        dampening=group["dampening"],
        weight_decay=group["weight_decay"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        is_first_step=first,
    )
