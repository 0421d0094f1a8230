"""Examples that a model is trained or evaluated on, and the batches they come in.

A batch is gathered by an index, whole and on the device: no Python code for each sample, and no
copies of subsets, since the examples of a client or of a split are an index too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, Self, runtime_checkable

import numpy.typing as npt
import torch

from fedlens.data.images import Images
from fedlens.data.transforms import Pipeline
from fedlens.errors import FedlensError

Array = torch.Tensor | npt.NDArray[Any] | list[Any]


@runtime_checkable
class Examples(Protocol):
    """Anything a model can be trained or evaluated on: images through a pipeline, or tensors."""

    @property
    def labels(self) -> torch.Tensor: ...

    def __len__(self) -> int: ...

    def to(self, device: torch.device) -> "Examples": ...

    def batch(self, index: torch.Tensor, draw: torch.Generator | None = None) -> torch.Tensor:
        """The inputs at `index`, on the device; augmented if and only if `draw` is given."""
        ...


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
class TensorExamples:
    """Inputs as they are, in a tensor: nothing is converted or augmented."""

    inputs: torch.Tensor  # [N, ...]
    labels: torch.Tensor  # int64 [N]

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.labels):
            raise ValueError(f"{len(self.inputs)} inputs for {len(self.labels)} labels")

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> Self:
        return replace(self, inputs=self.inputs.to(device), labels=self.labels.to(device))

    def batch(self, index: torch.Tensor, draw: torch.Generator | None = None) -> torch.Tensor:
        del draw
        return self.inputs[index.to(self.inputs.device)]


class FeatureExamples(TensorExamples):
    """A frozen backbone's features [N, D], computed beforehand: only a head is left to train."""

    @property
    def features(self) -> torch.Tensor:
        return self.inputs


def as_examples(
    data: Examples | tuple[Array, Array] | Sequence[tuple[torch.Tensor, int]],
) -> Examples:
    """Examples from what users have at hand.

    Args:
        data: `(inputs, labels)` as tensors or arrays, a `torch.utils.data.Dataset` with a length
            whose items are `(tensor, label)`, or an `Examples` object, returned as it is.

    Examples:
        >>> examples = as_examples((torch.rand(5, 3), [0, 1, 0, 1, 0]))
        >>> len(examples), examples.batch(torch.tensor([4, 2])).shape
        (5, torch.Size([2, 3]))
    """
    if isinstance(data, Examples):
        return data
    if isinstance(data, tuple) and len(data) == 2 and not isinstance(data[0], tuple):
        inputs, labels = (torch.as_tensor(part) for part in data)
    else:
        inputs, labels = _stacked(data)
    if labels.shape != inputs.shape[:1]:
        raise FedlensError(
            f"inputs has shape {tuple(inputs.shape)} and labels {tuple(labels.shape)}: give as "
            "many labels as inputs, one number each."
        )
    if labels.is_floating_point() and not torch.equal(labels, labels.round()):
        raise FedlensError("labels has fractions: classes are whole numbers from 0.")
    if len(labels) and int(labels.min()) < 0:
        raise FedlensError(f"labels has {int(labels.min())}: classes are whole numbers from 0.")
    return TensorExamples(inputs, labels.long())


def _stacked(data: Any) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        if hasattr(data, "dtype"):
            raise TypeError("it has no labels")
        items = [data[position] for position in range(len(data))]
        inputs = torch.stack([torch.as_tensor(one) for one, _ in items])
        return inputs, torch.as_tensor([int(label) for _, label in items])
    except (TypeError, ValueError, RuntimeError, KeyError) as error:
        raise FedlensError(
            f"data of type {type(data).__name__} cannot be used ({error}): give (inputs, labels), "
            "or a dataset whose items are (tensor, label) with tensors of one shape."
        ) from error


def shuffled(count: int, batch_size: int, draw: torch.Generator) -> list[torch.Tensor]:
    """One pass over `count` examples without replacement; the last batch may be smaller."""
    return _split(torch.randperm(count, generator=draw), batch_size)


def in_order(count: int, batch_size: int) -> list[torch.Tensor]:
    """One pass for evaluation."""
    return _split(torch.arange(count), batch_size)


def _split(order: torch.Tensor, batch_size: int) -> list[torch.Tensor]:
    return list(torch.split(order, batch_size)) if len(order) else []
