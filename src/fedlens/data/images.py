"""Images in one uint8 tensor, and datasets that load them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

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


Status = Literal["ok", "missing", "corrupt"]


@dataclass(frozen=True)
class Dataset:
    """A dataset that is downloaded, drawn or read only when one of its parts is loaded."""

    name: str
    digest: str  # identifies the content: official checksums, or the recipe it is drawn from
    load_classes: Callable[[], tuple[str, ...]]
    load_train: Callable[[], Images]
    load_test: Callable[[], Images]
    verify: Callable[[], dict[Path, Status]] = dict  # of its files; empty: it has none to check

    @cached_property
    def classes(self) -> tuple[str, ...]:
        return self.load_classes()
