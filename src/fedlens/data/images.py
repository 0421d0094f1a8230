"""Images held whole as one uint8 tensor, and a dataset as something that can be loaded."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Images:
    pixels: torch.Tensor  # uint8 [N, 3, H, W]
    labels: torch.Tensor  # int64 [N]

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> "Images":
        return Images(self.pixels.to(device), self.labels.to(device))

    def limited(self, per_class: int | None) -> "Images":
        """The first `per_class` images of each class, in their order; all of them if None."""
        if per_class is None:
            return self
        by_class = self.labels.argsort(stable=True)
        counts = torch.bincount(self.labels)
        first = (counts.cumsum(0) - counts)[self.labels[by_class]]
        kept = by_class[torch.arange(len(self)) - first < per_class].sort().values
        return Images(self.pixels[kept], self.labels[kept])


@dataclass(frozen=True)
class Dataset:
    """What is known of a dataset before a byte of it is loaded."""

    name: str
    classes: tuple[str, ...]
    digest: str  # identifies the content: official checksums, or the recipe it is generated from
    load_train: Callable[[], Images]
    load_test: Callable[[], Images]


class Examples(Protocol):
    """Anything a model can be trained or evaluated on: images through a pipeline, or features."""

    @property
    def labels(self) -> torch.Tensor: ...

    def __len__(self) -> int: ...

    def to(self, device: torch.device) -> "Examples": ...

    def batch(self, index: torch.Tensor, draw: torch.Generator | None = None) -> torch.Tensor:
        """The inputs at `index`, on the device; augmented if and only if `draw` is given."""
        ...
