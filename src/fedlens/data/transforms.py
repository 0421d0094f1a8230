"""From stored pixels to a backbone's inputs: augment, normalise and resize whole uint8 batches.

All random draws come from one generator, on the CPU, so every device sees the same images.
"""

from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch.nn import functional as F
from torchvision.transforms import v2

from fedlens import rng

# torchvision's v2 draws once for a whole tensor, so a batch is split into so many groups, each with
# its own draw: variety within a batch, at the price of a few calls instead of one per image.
GROUPS = 8


@dataclass(frozen=True)
class Augmentation:
    """Random crop, flip, colour jitter and RandAugment, in this order; by default none."""

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
    place = row[:, :, None] * padded.shape[-1] + column[:, None, :]  # in the padded image
    place = place.view(count, 1, height * width).expand(-1, channels, -1)
    return padded.flatten(2).gather(2, place).view_as(pixels)


@dataclass(frozen=True)
class Pipeline:
    """Augmentation, normalisation and resizing: from stored pixels to a backbone's inputs."""

    resolution: int
    mean: tuple[float, float, float]  # of pixel values in 0 to 1
    std: tuple[float, float, float]
    augmentation: Augmentation = field(default_factory=Augmentation)

    def __call__(self, pixels: torch.Tensor, draw: torch.Generator | None = None) -> torch.Tensor:
        """uint8 [B, 3, H, W] → float32 [B, 3, R, R]; augmented if and only if `draw` is given."""
        if draw is not None:
            pixels = self.augmentation(pixels, draw)
        # The weights of a resize sum to one, so it commutes with normalising: do it on few pixels.
        return resize(self._normalise(pixels), self.resolution)

    def _normalise(self, pixels: torch.Tensor) -> torch.Tensor:
        mean, std = torch.tensor([self.mean, self.std], device=pixels.device).view(2, 3, 1, 1) * 255
        return pixels.sub(mean).div_(std)


def resize(images: torch.Tensor, resolution: int) -> torch.Tensor:
    """float32 [B, C, H, W] → [B, C, R, R], bicubic, as two matrix products: Y = A X Bᵀ.

    Row i of A weighs the inputs of pixel i. A product with a small dense matrix is faster than the
    interpolation kernels: see benchmarks/input_pipeline.
    """
    height, width = images.shape[-2:]
    if (height, width) == (resolution, resolution):
        return images
    rows, columns = (resize_weights(size, resolution, images.device) for size in (height, width))
    with torch.autocast(images.device.type, enabled=False):  # pixels keep their precision
        return F.linear(rows @ images, columns)


@lru_cache(maxsize=32)
def resize_weights(size: int, resolution: int, device: torch.device) -> torch.Tensor:
    """The matrix [resolution, size] that resizes a line of pixels; its rows sum to one.

    The weights are torch's own (antialiased bicubic, a = −½, as in Pillow), read off the identity.
    """
    with torch.inference_mode(False):  # cached for later callers, which may be in another mode
        identity = torch.eye(size, dtype=torch.float64).view(1, 1, size, size)
        resized = F.interpolate(
            identity, (resolution, size), mode="bicubic", antialias=True, align_corners=False
        )
        return resized.view(resolution, size).float().to(device)
