"""An aggregator and a mask rule of your own; see `fedlens config rows KIND --plugin plugin.py`."""

from collections.abc import Mapping, Sequence
from typing import Annotated

import torch
from torch import Tensor

import fedlens as fl


@fl.aggregator(label="mean without outliers")
def mean_without_outliers(
    updates: Sequence[Mapping[str, Tensor]],
    weights: Sequence[float],
    *,
    keep: Annotated[float, fl.Range("(0, 1]"), "share of the clients that is kept"] = 0.8,
) -> dict[str, Tensor]:
    """The weighted mean of the updates with the smallest norms."""
    norms = [sum(float(value.square().sum()) for value in one.values()) for one in updates]
    order = sorted(range(len(updates)), key=norms.__getitem__)
    kept = order[: max(1, round(keep * len(updates)))]
    total = sum(weights[client] for client in kept)
    return {
        name: torch.stack([updates[k][name] * (weights[k] / total) for k in kept]).sum(0)
        for name in updates[0]
    }


@fl.mask_rule(label="lowest saliency", sensitivity=True, largest=False)
def lowest_saliency(weight: Tensor, sensitivity: Tensor | None) -> Tensor:
    """Trains the weights with the smallest w² times sensitivity."""
    assert sensitivity is not None
    return weight.square().cpu() * sensitivity.cpu()
