"""Bicubic resize as two matrix products: Y = A X Bᵀ, where row i of A weighs the inputs of pixel i.

The weights are torch's own (antialiased bicubic, a = −½, as in Pillow), read off the identity.
A product with a small dense matrix beats the interpolation kernels: see benchmarks/input_pipeline.
"""

from functools import lru_cache

import torch
from torch.nn import functional as F


def resize(images: torch.Tensor, resolution: int) -> torch.Tensor:
    """float32 [B, C, H, W] → [B, C, R, R]; nothing to do when that is the size already."""
    height, width = images.shape[-2:]
    if (height, width) == (resolution, resolution):
        return images
    rows, columns = (weights(size, resolution, images.device) for size in (height, width))
    with torch.autocast(images.device.type, enabled=False):  # pixels keep their precision
        return F.linear(rows @ images, columns)


@lru_cache(maxsize=32)
def weights(size: int, resolution: int, device: torch.device) -> torch.Tensor:
    """The matrix [resolution, size] that resizes a line of pixels; its rows sum to one."""
    with torch.inference_mode(False):  # kept for later callers, whose mode is not this one's
        identity = torch.eye(size, dtype=torch.float64).view(1, 1, size, size)
        resized = F.interpolate(
            identity, (resolution, size), mode="bicubic", antialias=True, align_corners=False
        )
        return resized.view(resolution, size).to(device, torch.float32)
