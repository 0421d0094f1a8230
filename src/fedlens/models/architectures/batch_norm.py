"""BatchNorm's running statistics: frozen as pretrained, or trained with the layers they belong to.

Modes: `frozen`; `averaged`, where clients update the statistics on their batches and the server
averages them; `local`, where every client also keeps its own BatchNorm layers between rounds
(FedBN: Li et al., 2021, https://arxiv.org/abs/2102.07623).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn

from fedlens.errors import FedlensError

Mode = Literal["frozen", "averaged", "local"]
MODES = ("frozen", "averaged", "local")
BUFFERS = ("running_mean", "running_var")

BatchNorm = nn.modules.batchnorm._BatchNorm


def layers(model: nn.Module) -> dict[str, BatchNorm]:
    """All BatchNorm layers that keep statistics, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, BatchNorm) and module.track_running_stats
    }


def trained_layers(model: nn.Module) -> dict[str, BatchNorm]:
    """Those whose scale and shift are trained: what is frozen keeps its statistics too."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return {}
    return {
        name: layer
        for name, layer in layers(model).items()
        if all(parameter.requires_grad for parameter in layer.parameters(recurse=False))
    }


def statistics(model: nn.Module) -> dict[str, torch.Tensor]:
    """Running means and variances of the layers that are trained, by name."""
    return {
        f"{name}.{buffer}": getattr(layer, buffer)
        for name, layer in trained_layers(model).items()
        for buffer in BUFFERS
    }


def own_names(model: nn.Module) -> list[str]:
    """Everything that belongs to a trained BatchNorm layer: what a client keeps if it is local."""
    return [
        f"{name}.{part}"
        for name, layer in trained_layers(model).items()
        for part in (*(one for one, _ in layer.named_parameters(recurse=False)), *BUFFERS)
    ]


@contextmanager
def updating(model: nn.Module, mode: Mode) -> Iterator[None]:
    """Meanwhile, trained layers normalise by their batch and update their statistics."""
    active = [] if mode == "frozen" else list(trained_layers(model).values())
    for layer in active:
        layer.train()
        if layer.momentum is None and layer.num_batches_tracked is not None:
            layer.num_batches_tracked.zero_()  # the mean of these batches, not of all ever seen
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise FedlensError(
            "A batch has one value for each channel, so BatchNorm has no variance to normalise by: "
            "change the batch size, so that no last batch has one example, or freeze the "
            "statistics (backbone.batch_norm=frozen)."
        ) from error
    finally:
        for layer in active:
            layer.eval()
