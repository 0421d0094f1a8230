"""Batches: index → uint8 gather → augmentation → normalise → resize, whole and on the device.

No per-sample Python and no copies of subsets: a client's or a split's examples are an index.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from fedlens.data.images import Images
from fedlens.data.resize import resize
from fedlens.data.transforms import Augmentation


@dataclass(frozen=True)
class Pipeline:
    """From stored pixels to what a backbone expects."""

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


@dataclass(frozen=True)
class ImageExamples:
    """The images at `index` (all of them if None), seen through a pipeline; pixels are shared."""

    images: Images
    index: torch.Tensor | None
    pipeline: Pipeline

    def __len__(self) -> int:
        return len(self.images) if self.index is None else len(self.index)

    def to(self, device: torch.device) -> "ImageExamples":
        return replace(self, images=self.images.to(device))

    @cached_property
    def labels(self) -> torch.Tensor:
        return self.images.labels[self._within_images(torch.arange(len(self)))]

    def batch(self, index: torch.Tensor, draw: torch.Generator | None = None) -> torch.Tensor:
        return self.pipeline(self.images.pixels[self._within_images(index)], draw)

    def _within_images(self, index: torch.Tensor) -> torch.Tensor:
        if self.index is not None:
            index = self.index[index.to(self.index.device)]
        return index.to(self.images.pixels.device)


@dataclass(frozen=True)
class FeatureExamples:
    """Features computed beforehand, of images as they are: nothing is left to augment."""

    features: torch.Tensor  # float [N, D]
    labels: torch.Tensor  # int64 [N]

    def __post_init__(self) -> None:
        if len(self.features) != len(self.labels):
            raise ValueError(f"{len(self.features)} features for {len(self.labels)} labels")

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> "FeatureExamples":
        return FeatureExamples(self.features.to(device), self.labels.to(device))

    def batch(self, index: torch.Tensor, draw: torch.Generator | None = None) -> torch.Tensor:
        del draw
        return self.features[index.to(self.features.device)]


def shuffled(count: int, batch_size: int, draw: torch.Generator) -> list[torch.Tensor]:
    """One pass over `count` examples without replacement; the last batch may be smaller."""
    return _cut(torch.randperm(count, generator=draw), batch_size)


def in_order(count: int, batch_size: int) -> list[torch.Tensor]:
    """One pass for evaluation."""
    return _cut(torch.arange(count), batch_size)


def _cut(order: torch.Tensor, batch_size: int) -> list[torch.Tensor]:
    return list(torch.split(order, batch_size)) if len(order) else []
