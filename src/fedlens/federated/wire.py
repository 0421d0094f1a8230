"""What an update weighs when it travels: the bytes of its safetensors serialisation."""

from functools import lru_cache

import torch
from safetensors.torch import save

from fedlens.params import Params


def size(parameters: Params) -> int:
    """len(serialised): it depends on names, types and shapes alone, so each layout is done once."""
    return _size(tuple((name, v.dtype, tuple(v.shape)) for name, v in parameters.items()))


@lru_cache(maxsize=16)
def _size(layout: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]) -> int:
    return len(save({name: torch.zeros(shape, dtype=kind) for name, kind, shape in layout}))
