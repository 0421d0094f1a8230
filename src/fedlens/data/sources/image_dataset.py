"""A `Dataset` of images that are decoded into the cache: checks, test split, size and digest.

Folders, torchvision's sets of files and Hugging Face datasets become one here.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from fedlens.data.images import Dataset, Images, Status
from fedlens.data.sources import decoding, image_cache
from fedlens.data.sources.decoding import Crop
from fedlens.data.sources.image_cache import Source
from fedlens.data.splits import stratified
from fedlens.errors import FedlensError

TEST_SEED = 0  # of the split of a dataset that has none of its own: the same for all runs
RESOLUTION = 224  # where no backbone says which size it needs

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Split:
    """The images of a split before they are decoded."""

    source: Source
    labels: torch.Tensor  # int64 [N]
    sides: Sequence[int]  # the shorter side of each image, in pixels
    names: tuple[str, ...] | None = None  # paths within the dataset
    clients: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def at(self, index: torch.Tensor) -> "Split":
        where = index.tolist()
        return Split(
            self.source.at(where),
            self.labels[index],
            [self.sides[one] for one in where],
            None if self.names is None else tuple(self.names[one] for one in where),
            None if self.clients is None else tuple(self.clients[one] for one in where),
        )

    def load(self, size: int, crop: Crop, title: str) -> Images:
        pixels = image_cache.mapped(self.source, size=size, crop=crop, title=title)
        return Images(pixels, self.labels, self.names, self.clients)


def image_dataset(
    name: str,
    place: str,
    classes: Sequence[str],
    train: Split,
    test: Split | None,
    *,
    size: int | None,
    resolution: int,
    crop: Crop,
    test_fraction: float,
    verify: Callable[[], dict[Path, Status]] = dict,
) -> Dataset:
    """`place` says in errors where the images are from; without `test`, `train` is split.

    Images are stored at `size` pixels; if it is None, at the resolution, but never larger than the
    largest image, since a model's inputs are enlarged from there anyway.
    """
    check_training_images(place, classes, train.labels)
    if test is None:
        train, test = _split(place, classes, train, test_fraction)
    check_test_labels(place, classes, train.labels, test.labels)
    size = size or min(resolution, max(train.sides))
    content = {
        "classes": list(classes),
        "train": [list(train.source.hashes), train.labels.tolist()],
        "test": [list(test.source.hashes), test.labels.tolist()],
        "pixels": [size, crop, decoding.VERSION],
    }
    return Dataset(
        name=name,
        digest=hashlib.sha256(json.dumps(content).encode()).hexdigest(),
        load_classes=lambda: tuple(classes),
        load_train=partial(train.load, size, crop, f"decoding {len(train)} training images"),
        load_test=partial(test.load, size, crop, f"decoding {len(test)} test images"),
        verify=verify,
    )


def check_training_images(place: str, classes: Sequence[str], labels: torch.Tensor) -> None:
    if len(labels) < 2:
        count = "one image only" if len(labels) else "no images"
        raise FedlensError(f"{place} has {count}: give at least two images of two classes.")
    if len(classes) < 2:
        raise FedlensError(
            f"{place} has only one class, '{classes[0]}': a classifier needs at least two."
        )
    if out := _out_of_range(labels, len(classes)):
        raise FedlensError(
            f"{place} has the label {out}, and its {len(classes)} classes are numbered from 0 to "
            f"{len(classes) - 1}: correct the labels."
        )
    counts = torch.bincount(labels, minlength=len(classes))
    if len(empty := (counts == 0).nonzero()):
        raise FedlensError(
            f"{place} has no training images of class '{classes[int(empty[0])]}': add some, or "
            "remove the class."
        )


def check_test_labels(
    place: str, classes: Sequence[str], train: torch.Tensor, test: torch.Tensor
) -> None:
    if not len(test):
        raise FedlensError(f"{place} has no test images: add some, or leave the empty split out.")
    if out := _out_of_range(test, len(classes)):
        raise FedlensError(
            f"{place} has the test label {out}, and its {len(classes)} classes are numbered from 0 "
            f"to {len(classes) - 1}: correct the labels, or name another test split."
        )
    missing = sorted(set(train.tolist()) - set(test.tolist()))
    if missing:
        names = ", ".join(f"'{classes[one]}'" for one in missing[:5])
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        log.warning(
            "%s has no test images of %s%s: test accuracy says nothing about them.",
            place, names, more,
        )  # fmt: skip


def _out_of_range(labels: torch.Tensor, classes: int) -> str:
    """The first label that is no class's number; '' if there is none."""
    wrong = ((labels < 0) | (labels >= classes)).nonzero()
    return str(int(labels[wrong[0]])) if len(wrong) else ""


def _split(
    place: str, classes: Sequence[str], whole: Split, fraction: float
) -> tuple[Split, Split]:
    """(train, test), stratified, by a seed that is the same for all runs."""
    counts = torch.bincount(whole.labels)
    if len(single := (counts == 1).nonzero()):
        raise FedlensError(
            f"{place} has only one image of class '{classes[int(single[0])]}', which cannot be in "
            "both the training and the test split: add images, or give train/ and test/."
        )
    try:
        train, test = stratified(whole.labels, fraction, TEST_SEED, purpose="test split")
    except FedlensError:
        raise FedlensError(
            f"{place} has too few images for data.test_fraction={fraction:g}: a class would be "
            "left without training images, so choose a smaller fraction."
        ) from None
    if not len(test):
        raise FedlensError(
            f"data.test_fraction={fraction:g} of the {len(whole)} images of {place} rounds to "
            "no image: choose a larger fraction, or give train/ and test/."
        )
    return whole.at(train), whole.at(test)
