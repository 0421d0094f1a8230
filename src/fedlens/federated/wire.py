"""What an update weighs when it travels: the bytes of its safetensors serialisation.

Values at masks' positions travel as one vector, in the order of the parameters: both sides know the
masks, and a name for each would cost more than it says.
"""

from collections.abc import Collection
from functools import lru_cache

import torch
from safetensors.torch import save

from fedlens.params import Params

SPARSE = "sparse"


def encoded(parameters: Params, masked: Collection[str] = ()) -> dict[str, torch.Tensor]:
    """The tensors that are serialised; those named in `masked` are 1-D, and joined."""
    whole = {name: value for name, value in parameters.items() if name not in masked}
    values = [value for name, value in parameters.items() if name in masked]
    return whole | ({SPARSE: torch.cat(values)} if values else {})


def decoded(tensors: Params, like: Params, masked: Collection[str] = ()) -> dict[str, torch.Tensor]:
    """The inverse of `encoded`, for parameters of the layout of `like`."""
    names = [name for name in like if name in masked]
    joined = torch.split(tensors[SPARSE], [like[name].numel() for name in names]) if names else ()
    values = dict(zip(names, joined, strict=True))
    return {name: values[name] if name in values else tensors[name] for name in like}


def size(parameters: Params, masked: Collection[str] = ()) -> int:
    """len(serialised): it depends on names, types and shapes alone, so each layout is done once."""
    return _size(
        tuple((name, v.dtype, tuple(v.shape)) for name, v in parameters.items()), tuple(masked)
    )


@lru_cache(maxsize=16)
def _size(
    layout: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...], masked: tuple[str, ...]
) -> int:
    zeros = {name: torch.zeros(shape, dtype=kind) for name, kind, shape in layout}
    return len(save(encoded(zeros, masked)))
