"""The entries of a tensor that a mask trains, in row-major order whatever the memory format.

Of torch's kernels on a CPU, `index_select` reads entries of a flat tensor fastest and `scatter_`
writes them fastest: less than 1 ns an entry in the cache; `take` and `index_copy_` take 2 and 3.
"""

import torch
from torch import Tensor

LARGEST_INT32 = 2**31 - 1


class Entries:
    """Where a mask is True, with 4 bytes an entry, and 4 more for kernels in channels_last."""

    def __init__(self, mask: Tensor, device: torch.device) -> None:
        self.shape = mask.shape
        kind = torch.int32 if mask.numel() <= LARGEST_INT32 else torch.int64
        self.positions = mask.reshape(-1).nonzero()[:, 0].to(device, kind)  # row-major
        self._places: Tensor | None = None  # the same entries' positions in channels_last memory

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def nbytes(self) -> int:
        return self.positions.nbytes + (0 if self._places is None else self._places.nbytes)

    def taken(self, tensor: Tensor) -> Tensor:
        """A copy of the entries of `tensor`, which has the mask's shape."""
        flat, index = self._in_memory(tensor)
        return flat.index_select(0, index)

    def put(self, tensor: Tensor, values: Tensor) -> None:
        """Writes `values` to the entries, in place; all other entries keep their bits."""
        flat, index = self._in_memory(tensor)
        flat.scatter_(0, index.long(), values)  # it takes no int32
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view_as(tensor))

    def _in_memory(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """The tensor in one dimension, and where the entries are in it.

        It is a view of contiguous and of channels_last tensors, and a copy of any others.
        """
        if not tensor.is_contiguous() and _is_channels_last(tensor):
            if self._places is None:
                self._places = self._channels_last()
            return tensor.permute(0, 2, 3, 1).view(-1), self._places
        return tensor.reshape(-1), self.positions

    def _channels_last(self) -> Tensor:
        _, channels, height, width = self.shape
        pixels = height * width
        row, pixel = self.positions // pixels, self.positions % pixels
        kernel, channel = row // channels, row % channels
        return (kernel * pixels + pixel) * channels + channel


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
