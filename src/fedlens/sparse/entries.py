"""The entries of a tensor that a mask trains, in row-major order whatever the memory format.

Of torch's kernels on a CPU, `take` and `index_copy_` use all threads and are fastest with several;
`index_select` and `scatter_` use one and are fastest with one. All of them copy bits.
"""

import torch
from torch import Tensor


class Entries:
    """Where a mask is True, with 8 bytes an entry, and 8 more for kernels in channels_last."""

    def __init__(self, mask: Tensor, device: torch.device) -> None:
        self.shape = mask.shape
        self.positions = mask.reshape(-1).nonzero()[:, 0].to(device)  # row-major
        self._places: Tensor | None = None  # the same entries' positions in channels_last memory

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def nbytes(self) -> int:
        return self.positions.nbytes + (0 if self._places is None else self._places.nbytes)

    def taken(self, tensor: Tensor) -> Tensor:
        """A copy of the entries of `tensor`, which has the mask's shape."""
        flat, index = self._in_memory(tensor)
        return flat.take(index) if torch.get_num_threads() > 1 else flat.index_select(0, index)

    def put(self, tensor: Tensor, values: Tensor) -> None:
        """Writes `values` to the entries, in place; all other entries keep their bits."""
        flat, index = self._in_memory(tensor)
        if torch.get_num_threads() > 1:
            flat.index_copy_(0, index, values)
        else:
            flat.scatter_(0, index, values)
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
