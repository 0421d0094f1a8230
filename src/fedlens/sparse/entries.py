"""The entries of a tensor that a mask trains, in row-major order whatever the memory format."""

import torch


def positions(mask: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Positions where the mask is True, as int64, with which torch gathers in parallel."""
    return mask.reshape(-1).nonzero()[:, 0].to(device)


def taken(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """A copy of the entries at `index`."""
    return tensor.take(index)


def put(tensor: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
    """Writes `values` at `index`, in place; all other entries keep their bits."""
    flat = tensor.reshape(-1)  # a view, or a copy if the memory format is another
    flat.index_copy_(0, index, values)
    if not tensor.is_contiguous():
        tensor.copy_(flat.view_as(tensor))
