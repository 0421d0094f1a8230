"""What a checkpoint holds of a model and its optimizer, as one flat map of tensors.

Weights that stay as pretrained are left out: the manifest has their hash.
"""

from collections.abc import Mapping

import torch
from torch import nn

from fedlens import params
from fedlens.errors import FedlensError
from fedlens.models.classifier import Classifier

MODEL, OPTIMIZER = "model/", "optimizer/"


def learned(model: Classifier) -> dict[str, nn.Parameter]:
    """The parameters that differ from the pretrained: all that is trained, and the head."""
    return {
        name: value
        for name, value in model.named_parameters()
        if value.requires_grad or name.startswith("head.")
    }


def take(model: Classifier, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name, value in learned(model).items():
        tensors[MODEL + name] = value.detach()
        for key, buffer in (optimizer.state.get(value, {}) if optimizer else {}).items():
            if isinstance(buffer, torch.Tensor):
                tensors[f"{OPTIMIZER}{name}/{key}"] = buffer
    return tensors


def put_back(
    tensors: Mapping[str, torch.Tensor],
    model: Classifier,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """The inverse of `take`; without an optimizer only the parameters are put back."""
    expected = learned(model)
    given = {
        name.removeprefix(MODEL): value for name, value in tensors.items() if name.startswith(MODEL)
    }
    if fault := params.mismatch(expected, given):
        raise FedlensError(f"The checkpoint does not fit this model: {fault}.")
    with torch.no_grad():
        for name, parameter in expected.items():
            parameter.copy_(given[name])
    if optimizer is None:
        return
    optimizer.state.clear()
    for full, value in tensors.items():
        if full.startswith(OPTIMIZER):
            name, key = full.removeprefix(OPTIMIZER).rsplit("/", 1)
            optimizer.state[expected[name]][key] = value.to(expected[name].device, copy=True)
