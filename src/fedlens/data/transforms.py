"""Augmentation of a whole uint8 batch where it lives: crop and flip in one gather, then colour.

All draws come from the generator given, on the CPU, so every device sees the same images.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F
from torchvision.transforms import v2

from fedlens import rng

GROUPS = 8
"""torchvision's v2 draws once for a whole tensor, so a batch is cut into so many parts, each with
its own draw: variety within a batch, at the price of a few calls instead of one per image."""


@dataclass(frozen=True)
class Augmentation:
    """By default none. The order is crop, flip, colour jitter, RandAugment."""

    crop_padding: int = 0  # black pixels added on every side before a crop of the original size
    flip: bool = False  # mirror left and right with probability ½
    colour_jitter: float = 0.0  # brightness, contrast, saturation ± this; hue ± a quarter of it
    randaugment: int = 0  # number of operations (arXiv:1909.13719)
    magnitude: int = 9  # of RandAugment's operations, on its scale of 0 to 30

    @property
    def active(self) -> bool:
        return bool(self.crop_padding or self.flip or self.colour_jitter or self.randaugment)

    def __call__(self, pixels: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
        """uint8 [B, 3, H, W] → the same shape; `pixels` itself is not changed."""
        if self.crop_padding or self.flip:
            count, furthest = len(pixels), 2 * self.crop_padding + 1
            top, left = torch.randint(furthest, (2, count), generator=draw)
            flipped = torch.randint(2, (count,), generator=draw) * self.flip
            window = torch.stack([top, left, flipped]).to(pixels.device)
            pixels = crop_and_flip(pixels, self.crop_padding, *window)
        for transform in self._colour():
            with rng.scoped(draw):
                pixels = torch.cat([transform(group) for group in pixels.chunk(GROUPS)])
        return pixels

    def _colour(self) -> list[v2.Transform]:
        transforms: list[v2.Transform] = []
        if strength := self.colour_jitter:
            transforms.append(v2.ColorJitter(strength, strength, strength, hue=strength / 4))
        if self.randaugment:
            transforms.append(v2.RandAugment(self.randaugment, self.magnitude))
        return transforms


def crop_and_flip(
    pixels: torch.Tensor,
    padding: int,
    top: torch.Tensor,
    left: torch.Tensor,
    flipped: torch.Tensor,
) -> torch.Tensor:
    """Image b's window at (top[b], left[b]) of its padded self, mirrored where `flipped[b]`."""
    count, channels, height, width = pixels.shape
    padded = F.pad(pixels, (padding, padding, padding, padding))
    across = torch.arange(width, device=pixels.device)
    row = top[:, None] + torch.arange(height, device=pixels.device)
    column = left[:, None] + torch.where(flipped[:, None] > 0, across.flip(0), across)
    place = (
        row[:, :, None] * padded.shape[-1] + column[:, None, :]
    )  # in the padded image, [B, H, W]
    place = place.view(count, 1, height * width).expand(-1, channels, -1)
    return padded.flatten(2).gather(2, place).view_as(pixels)
