"""Parameters as the values at their masks' positions, which are sent, averaged and compared.

A parameter without a mask is sent whole. Server and clients know the masks, so no index is sent.
"""

from collections.abc import Mapping

import torch

from fedlens import params
from fedlens.params import Params
from fedlens.sparse.entries import Entries


class Packing:
    def __init__(self, parameters: Params, masks: Mapping[str, torch.Tensor]) -> None:
        self.index = {name: Entries(mask, parameters[name].device) for name, mask in masks.items()}
        shapes = {
            name: (len(self.index[name]),) if name in self.index else value.shape
            for name, value in parameters.items()
        }
        self.layout = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}

    def pack(self, parameters: Params) -> dict[str, torch.Tensor]:
        """The trained entries of `parameters`: copies of masked ones, whole ones themselves."""
        return {name: self.taken(name, value.detach()) for name, value in parameters.items()}

    @torch.no_grad()
    def unpack(self, packed: Params, into: Params) -> None:
        """Writes packed values to the trained entries of `into`; its other entries stay."""
        if fault := params.mismatch(self.layout, packed):
            raise ValueError(fault)
        for name, value in into.items():
            if name in self.index:
                self.index[name].put(value, packed[name].to(value.device))
            else:
                value.copy_(packed[name])

    def taken(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """The trained entries of one parameter, or of a tensor of its shape."""
        return self.index[name].taken(value) if name in self.index else value

    def spread(self, name: str, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The inverse of `taken`, with zeros everywhere else."""
        if name not in self.index:
            return value
        whole = torch.zeros_like(like, requires_grad=False)
        self.index[name].put(whole, value)
        return whole
