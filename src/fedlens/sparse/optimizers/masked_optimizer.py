"""Optimizers that train the entries {w : mask} and leave all others as they are, bit for bit.

State has one value per trained entry, in row-major order; a parameter without a mask, or with one
that is all True, is trained whole. Subclasses define the step.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fedlens.errors import FedlensError
from fedlens.params import digest
from fedlens.sparse.entries import Entries

WHOLE = torch.empty(0, dtype=torch.bool)  # stands for "no index" in a digest
DIGEST = "masks_digest"


class MaskedOptimizer(torch.optim.Optimizer, ABC):
    """`masks` maps parameter names to bool tensors of the parameters' shapes.

    A parameter whose mask is all False stops requiring gradients, so that the backward pass ends
    above it.
    """

    def __init__(
        self, params: ParamsT, defaults: dict[str, Any], *, masks: Mapping[str, Tensor]
    ) -> None:
        groups = _groups(params)
        if masks:
            _check([item for group in groups for item in group["params"]], masks)
        self._index: dict[Tensor, Entries] = {}  # not in `state`: loading would cast it to floats
        for group in groups:
            group["params"] = [item for item in group["params"] if self._admits(item, masks)]
        if not any(group["params"] for group in groups):
            raise FedlensError(
                "Nothing is left to train: every parameter is frozen or has a mask that is all "
                "False; raise the density."
            )
        super().__init__(groups, defaults)

    @abstractmethod
    def _move(
        self, weights: Tensor, grad: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]
    ) -> None:
        """One step of `weights` in place; all tensors hold the trained entries only."""

    def _admits(self, item: Tensor | tuple[str, Tensor], masks: Mapping[str, Tensor]) -> bool:
        """Whether the parameter has entries to train; stores their index, or freezes it."""
        name, parameter = item if isinstance(item, tuple) else ("", item)
        mask = masks.get(name)
        if mask is not None and parameter.requires_grad:
            trained = int(mask.count_nonzero())
            if trained == 0:
                parameter.requires_grad_(False)
                parameter.grad = None
            elif trained < mask.numel():
                self._index[parameter] = Entries(mask, parameter.device)
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
                    raise RuntimeError(f"{type(self).__name__} takes dense gradients only")
                self._step(parameter, group)
        return loss

    def _step(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        assert parameter.grad is not None
        index, state = self._index.get(parameter), self.state[parameter]
        if index is None:
            self._move(parameter, parameter.grad, state, group)
            return
        grad, weights = index.taken(parameter.grad), index.taken(parameter)
        self._move(weights, grad, state, group)
        index.put(parameter, weights)  # while the parameter is still in the cache

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with a digest of what it trains in every group."""
        state = super().state_dict()
        for saved, group in zip(state["param_groups"], self.param_groups, strict=True):
            saved[DIGEST] = self._digest(group)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = state_dict["param_groups"]
        if [one.get(DIGEST) for one in saved] != [self._digest(one) for one in self.param_groups]:
            raise FedlensError(
                "The saved optimizer state belongs to other masks or parameters: build the "
                "optimizer with those it was saved with."
            )
        for theirs, ours in zip(saved, self.param_groups, strict=True):
            for key, parameter in zip(theirs["params"], ours["params"], strict=True):
                index = self._index.get(parameter)
                expected = parameter.shape if index is None else index.positions.shape
                _check_shapes(key, state_dict["state"].get(key, {}), expected)
        groups = [{key: one[key] for key in one if key != DIGEST} for one in saved]
        super().load_state_dict({**state_dict, "param_groups": groups})

    def _digest(self, group: Mapping[str, Any]) -> str:
        names = group.get("param_names", [""] * len(group["params"]))
        trained = {}
        for position, (name, parameter) in enumerate(zip(names, group["params"], strict=True)):
            index = self._index.get(parameter)
            positions = WHOLE if index is None else index.positions.long()
            trained[f"{position} {name} {tuple(parameter.shape)}"] = positions
        return digest(trained)


def memory(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes held between steps: of state such as momentum, and of the index of trained entries."""
    index = optimizer._index.values() if isinstance(optimizer, MaskedOptimizer) else ()
    return {
        "state": sum(
            value.nbytes
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ),
        "index": sum(one.nbytes for one in index),
    }


def refuse_negative(**settings: float) -> None:
    for name, value in settings.items():
        if not value >= 0:
            raise ValueError(f"{name} must not be negative, but is {value}")


def _check_shapes(key: int, state: Mapping[str, Any], expected: torch.Size) -> None:
    for name, value in state.items():
        if name != "step" and isinstance(value, Tensor) and value.shape != expected:
            raise FedlensError(
                f"The saved {name} of parameter {key} has shape {tuple(value.shape)} instead of "
                f"{tuple(expected)}: the state is damaged, train again from the start."
            )


def _groups(params: ParamsT) -> list[dict[str, Any]]:
    """Parameter groups that the optimizer may change, from any form that torch allows."""
    listed: list[Any] = list(params)
    groups = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
    copies = []
    for group in groups:
        inside = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
        inside = list(inside)
        named = bool(inside) and isinstance(inside[0], tuple)
        # Marked as named even if nothing in it is trained: torch wants all groups named, or none.
        copies.append({**group, "params": inside, **({"param_names": []} if named else {})})
    return copies


def _check(items: list[Tensor | tuple[str, Tensor]], masks: Mapping[str, Tensor]) -> None:
    """Refuses masks that do not fit, before anything is changed."""
    if not all(isinstance(item, tuple) for item in items):
        raise FedlensError(
            "Masks belong to parameter names: pass model.named_parameters(), not parameters()."
        )
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
