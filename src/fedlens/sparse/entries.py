"""The entries of a tensor that a mask trains, in row-major order whatever the memory format."""

import torch

INT32_MAX = torch.iinfo(torch.int32).max


def positions(mask: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Where the mask is True, at 4 bytes an entry where that is enough."""
    dtype = torch.int32 if mask.numel() <= INT32_MAX else torch.int64
    return mask.reshape(-1).nonzero()[:, 0].to(device, dtype)


def taken(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """A copy of the entries at `index`."""
    return tensor.reshape(-1).index_select(0, index)


def put(tensor: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
    """Writes `values` at `index`, in place; all other entries keep their bits."""
    flat = tensor.reshape(-1)  # a view, or a copy if the memory format is another
    flat.scatter_(0, index.long(), values)
    if not tensor.is_contiguous():
        tensor.copy_(flat.view_as(tensor))
