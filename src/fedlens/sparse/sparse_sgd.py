"""SGD with momentum on the entries a mask trains; all others stay as they are, bit for bit.

At the trained entries g = ∇w + λw, v ← μv + (1 − τ)g and w ← w − ηv, or w − η(g + μv) if Nesterov;
nothing is kept, decayed or written elsewhere. Iurada et al., 2025, https://arxiv.org/abs/2504.02620.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from fedlens.errors import FedlensError
from fedlens.params import digest
from fedlens.sparse.entries import positions, put, taken

WHOLE = torch.empty(0, dtype=torch.bool)  # stands for "no index" in a digest
DIGEST = "masks_digest"


class SparseSGDM(torch.optim.Optimizer):
    """`torch.optim.SGD` that trains {w : mask}; a parameter without a mask is trained whole.

    `masks` maps names to bool tensors of their parameters' shapes. A parameter whose mask is all
    False stops requiring gradients, so the backward pass ends above it. Momentum has one value per
    trained entry, in row-major order; a parameter trained whole is stepped as SGD would.
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
        masks: Mapping[str, Tensor],
    ) -> None:
        for what, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            if value < 0:
                raise ValueError(f"{what} must not be negative, but is {value}")
        if nesterov and (momentum == 0 or dampening != 0):
            raise ValueError("Nesterov momentum needs momentum > 0 and dampening 0")
        groups = _groups(params)
        if masks:
            _check([item for group in groups for item in group["params"]], masks)
        self._index: dict[Tensor, Tensor] = {}  # not in `state`: loading would cast it to floats
        for group in groups:
            group["params"] = [item for item in group["params"] if self._admits(item, masks)]
        if not any(group["params"] for group in groups):
            raise FedlensError(
                "Nothing is left to train: every parameter is frozen or has a mask that is all "
                "False; raise the density."
            )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(groups, defaults)

    def _admits(self, item: Tensor | tuple[str, Tensor], masks: Mapping[str, Tensor]) -> bool:
        """Whether there is something to train; notes its index, or freezes it."""
        name, parameter = item if isinstance(item, tuple) else ("", item)
        mask = masks.get(name)
        if mask is not None and parameter.requires_grad:
            trained = int(mask.count_nonzero())
            if trained == 0:
                parameter.requires_grad_(False)
                parameter.grad = None
            elif trained < mask.numel():
                self._index[parameter] = positions(mask, parameter.device)
        return parameter.requires_grad

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    raise RuntimeError("SparseSGDM takes dense gradients only")
                self._step(parameter, group)
        return loss

    def _step(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        assert parameter.grad is not None
        index, state = self._index.get(parameter), self.state[parameter]
        if index is None:
            _move(parameter, parameter.grad, state, group)
            return
        weights = taken(parameter, index)
        _move(weights, taken(parameter.grad, index), state, group)
        put(parameter, index, weights)

    def state_dict(self) -> dict[str, Any]:
        """SGD's, and in every group a digest of what it trains."""
        found = super().state_dict()
        for packed, group in zip(found["param_groups"], self.param_groups, strict=True):
            packed[DIGEST] = self._digest(group)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = state_dict["param_groups"]
        if [one.get(DIGEST) for one in saved] != [self._digest(one) for one in self.param_groups]:
            raise FedlensError(
                "The saved optimizer state belongs to other masks or parameters: build the "
                "optimizer with those it was saved with."
            )
        for theirs, ours in zip(saved, self.param_groups, strict=True):
            for key, parameter in zip(theirs["params"], ours["params"], strict=True):
                buffer = state_dict["state"].get(key, {}).get("momentum_buffer")
                index = self._index.get(parameter)
                expected = parameter.shape if index is None else index.shape
                if buffer is not None and buffer.shape != expected:
                    raise FedlensError(
                        f"The saved momentum of parameter {key} has shape {tuple(buffer.shape)} "
                        f"instead of {tuple(expected)}: the state is damaged, start afresh."
                    )
        groups = [{key: one[key] for key in one if key != DIGEST} for one in saved]
        super().load_state_dict({**state_dict, "param_groups": groups})

    def _digest(self, group: Mapping[str, Any]) -> str:
        names = group.get("param_names", [""] * len(group["params"]))
        return digest(
            {
                f"{position} {name} {tuple(parameter.shape)}": self._index.get(parameter, WHOLE)
                for position, (name, parameter) in enumerate(
                    zip(names, group["params"], strict=True)
                )
            }
        )


def sgdm(
    named: Iterable[tuple[str, nn.Parameter]],
    masks: Mapping[str, Tensor] | None,
    *,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> torch.optim.Optimizer:
    """SGD over what requires gradients if there are no masks, else SparseSGDM."""
    if not masks:
        trained = [parameter for _, parameter in named if parameter.requires_grad]
        return torch.optim.SGD(trained, lr, momentum, 0, weight_decay, nesterov)
    return SparseSGDM(named, lr, momentum, 0, weight_decay, nesterov, masks=masks)


def memory(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes held between steps: of momentum, and of the index of trained entries."""
    buffers = [state.get("momentum_buffer") for state in optimizer.state.values()]
    index = optimizer._index.values() if isinstance(optimizer, SparseSGDM) else ()
    return {
        "momentum": sum(buffer.nbytes for buffer in buffers if buffer is not None),
        "index": sum(one.nbytes for one in index),
    }


def _move(
    weights: Tensor, grad: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]
) -> None:
    """One step of `weights` in place, with SGD's own kernels in SGD's order."""
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


def _groups(params: ParamsT) -> list[dict[str, Any]]:
    """Parameter groups of our own, whatever form torch allows them to come in."""
    given: list[Any] = list(params)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    found = []
    for group in groups:
        inside = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
        inside = list(inside)
        named = bool(inside) and isinstance(inside[0], tuple)
        # Known to be named even if nothing in it is trained: torch wants all groups alike.
        found.append({**group, "params": inside, **({"param_names": []} if named else {})})
    return found


def _check(items: list[Tensor | tuple[str, Tensor]], masks: Mapping[str, Tensor]) -> None:
    """Refuses masks that do not fit, before anything is touched."""
    if not all(isinstance(item, tuple) for item in items):
        raise FedlensError("Masks go by name: pass model.named_parameters(), not parameters().")
    named = dict(item for item in items if isinstance(item, tuple))
    faults = [f"{name} has no parameter" for name in masks if name not in named]
    for name in masks.keys() & named.keys():
        mask, parameter = masks[name], named[name]
        if mask.dtype != torch.bool:
            faults.append(f"{name} is {mask.dtype}, not bool")
        elif mask.shape != parameter.shape:
            faults.append(f"{name} is {tuple(mask.shape)}, not {tuple(parameter.shape)}")
        elif not parameter.requires_grad and mask.any():
            faults.append(f"{name} would train a parameter that does not require gradients")
    if faults:
        shown = "; ".join(sorted(faults)[:3])
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise FedlensError(f"The masks do not fit the parameters: {shown}{more}.")
