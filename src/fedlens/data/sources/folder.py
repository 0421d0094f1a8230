"""A folder of images: `train/` and `test/` with a folder for each class, or one folder to split."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import torch

from fedlens.data.images import Dataset
from fedlens.data.sources.folder_layout import layout
from fedlens.data.sources.image_dataset import RESOLUTION, Split, image_dataset
from fedlens.data.sources.image_files import ImageFiles, image_files
from fedlens.errors import FedlensError
from fedlens.paths import expanded
from fedlens.registry import Range, dataset


@dataset(
    label="{root}",
    order=3,
    paths=("root",),
    root_required=True,
    resolution=True,
    sizes="fedlens.data.known_sizes:folder",
)
def folder(
    root: Path | str | None = None,
    resolution: int = RESOLUTION,
    *,
    test_fraction: Annotated[
        float, Range("(0, 1)"), "images for testing, where there is no folder test/"
    ] = 0.2,
    size: Annotated[
        int | None, Range("[1, 4096]"), "pixels of the stored images; null: the backbone's"
    ] = None,
    crop: Annotated[
        Literal["centre", "squash"], "cut a square from the centre, or squash the image into one"
    ] = "centre",
) -> Dataset:
    """Images of your own in folders named after their classes, of any format and size."""
    if root is None:
        raise FedlensError("data=folder needs data.root, the folder of your images.")
    place = expanded(root)
    found = layout(place)
    images = image_files(place, [name for name, _ in (*found.train, *(found.test or ()))])
    numbers = {name: number for number, name in enumerate(found.classes)}
    labels = torch.tensor([numbers[label] for _, label in (*found.train, *(found.test or ()))])
    everything = split_of_files(images, labels)
    count = len(found.train)
    return image_dataset(
        Path(os.path.abspath(place)).name,  # noqa: PTH100  (it follows no links)
        str(place),
        found.classes,
        everything.at(torch.arange(count)),
        None if found.test is None else everything.at(torch.arange(count, len(everything))),
        size=size,
        resolution=resolution,
        crop=crop,
        test_fraction=test_fraction,
        verify=images.verify,
    )


def split_of_files(images: ImageFiles, labels: torch.Tensor | Sequence[int]) -> Split:
    """All files as one split."""
    numbers = torch.as_tensor(labels, dtype=torch.int64)
    return Split(images.source(), numbers, images.sides, names=images.names)
