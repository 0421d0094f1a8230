"""Images in one uint8 tensor, in memory or mapped from a file, and datasets that load them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch


class MappedPixels:
    """Pixels [N, 3, H, W] of a mapped file: what an index asks for is read, and nothing else.

    They stay in the file. A batch is read on the CPU, then moved to the device that `to` named.
    """

    device = torch.device("cpu")  # where an index must lie

    def __init__(
        self,
        stored: torch.Tensor,
        rows: torch.Tensor | None = None,
        target: torch.device | None = None,
    ) -> None:
        self.stored = stored
        self.rows = rows  # the images that are meant, by their place in the file; None: all
        self.target = target or self.device

    def __len__(self) -> int:
        return len(self.stored) if self.rows is None else len(self.rows)

    @property
    def shape(self) -> torch.Size:
        return torch.Size([len(self), *self.stored.shape[1:]])

    def __getitem__(self, index: Any) -> torch.Tensor:
        read = self.stored[index if self.rows is None else self.rows[index]]
        if read.untyped_storage().data_ptr() == self.stored.untyped_storage().data_ptr():
            read = read.clone()  # a view of the file may not be written to
        return read.to(self.target)

    def to(self, device: torch.device) -> "MappedPixels":
        return MappedPixels(self.stored, self.rows, device)

    def only(self, rows: torch.Tensor) -> "MappedPixels":
        """The images at `rows`; nothing is read."""
        return MappedPixels(self.stored, rows if self.rows is None else self.rows[rows])


@dataclass(frozen=True)
class Images:
    pixels: torch.Tensor | MappedPixels  # uint8 [N, 3, H, W]
    labels: torch.Tensor  # int64 [N]
    names: tuple[str, ...] | None = None  # of each image: its path within the dataset
    clients: tuple[str, ...] | None = None  # who each image is from, where the dataset knows

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> "Images":
        return replace(self, pixels=self.pixels.to(device), labels=self.labels.to(device))

    def first(self, per_class: int | None) -> torch.Tensor:
        """The positions of the first `per_class` images of each class, sorted; all if None."""
        if per_class is None:
            return torch.arange(len(self))
        by_class = self.labels.argsort(stable=True)
        counts = torch.bincount(self.labels)
        first = (counts.cumsum(0) - counts)[self.labels[by_class]]
        return by_class[torch.arange(len(self)) - first < per_class].sort().values

    def limited(self, per_class: int | None) -> "Images":
        """The first `per_class` images of each class, in their order; all of them if None."""
        if per_class is None:
            return self
        kept, pixels = self.first(per_class), self.pixels
        return Images(
            pixels.only(kept) if isinstance(pixels, MappedPixels) else pixels[kept],
            self.labels[kept],
            _at(self.names, kept),
            _at(self.clients, kept),
        )


def _at(words: tuple[str, ...] | None, index: torch.Tensor) -> tuple[str, ...] | None:
    return None if words is None else tuple(words[position] for position in index.tolist())


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
