"""The state of a model and its optimizer as one flat map of tensors, for a checkpoint.

Frozen pretrained weights are left out: the manifest has their hash.
"""

from collections.abc import Mapping

import torch

from fedlens import params
from fedlens.errors import FedlensError
from fedlens.models.classifier import Classifier, carried

MODEL, OPTIMIZER = "model/", "optimizer/"


def learned(model: Classifier) -> dict[str, torch.Tensor]:
    """What differs from the pretrained model: all trainable parameters, the head, and what
    changes without gradients, such as BatchNorm's statistics."""
    trained: dict[str, torch.Tensor] = {
        name: value
        for name, value in model.named_parameters()
        if value.requires_grad or name.startswith("head.")
    }
    return trained | carried(model, model.batch_norm)


def state_tensors(
    model: Classifier, optimizer: torch.optim.Optimizer | None
) -> dict[str, torch.Tensor]:
    """Names and tensors of what was learned; they are not copied."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in learned(model).items():
        tensors[MODEL + name] = value.detach()
        for key, buffer in (optimizer.state.get(value, {}) if optimizer else {}).items():
            if isinstance(buffer, torch.Tensor):
                tensors[f"{OPTIMIZER}{name}/{key}"] = buffer
    return tensors


def load_state(
    tensors: Mapping[str, torch.Tensor],
    model: Classifier,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Loads what `state_tensors` returned; without an optimizer only the parameters."""
    expected = learned(model)
    loaded = {
        name.removeprefix(MODEL): value for name, value in tensors.items() if name.startswith(MODEL)
    }
    if fault := params.mismatch(expected, loaded):
        raise FedlensError(f"The checkpoint does not fit this model: {fault}.")
    with torch.no_grad():
        for name, parameter in expected.items():
            parameter.copy_(loaded[name])
    if optimizer is None:
        return
    optimizer.state.clear()
    for full, value in tensors.items():
        if full.startswith(OPTIMIZER):
            name, key = full.removeprefix(OPTIMIZER).rsplit("/", 1)
            device = "cpu" if key == "step" else expected[name].device  # torch counts on the CPU
            optimizer.state[expected[name]][key] = value.to(device, copy=True)
