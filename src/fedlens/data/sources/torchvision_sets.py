"""The classification datasets that torchvision downloads: `data=torchvision:CIFAR10`.

Sets of small images of one size are read into memory as they are. Sets of image files are decoded
into the cache. A set without a test split of its own is split by a seed that never changes.
"""

import hashlib
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import numpy as np
import torch
from PIL import Image
from torchvision import datasets

from fedlens import files
from fedlens.data.images import Dataset, Images, Status
from fedlens.data.sources.cifar100 import locate
from fedlens.data.sources.downloads import TIMEOUT_S, unreachable
from fedlens.data.sources.folder import split_of_files
from fedlens.data.sources.image_cache import Source
from fedlens.data.sources.image_dataset import RESOLUTION, Split, image_dataset
from fedlens.data.sources.image_files import image_files
from fedlens.errors import FedlensError, suggest
from fedlens.registry import Range, dataset

Options = dict[str, Any]


@dataclass(frozen=True)
class _Set:
    """How a class of torchvision is called, and where it keeps what it has read."""

    url: str  # asked for first, to notice a missing network
    train: tuple[Options, ...]  # arguments of the splits that are trained on
    test: tuple[Options, ...] | None  # None: it has no test split
    labels: str
    images: str  # an array of images, or the paths of files
    from_files: bool = True
    classes: Callable[[Any], list[str]] = lambda found: list(found.classes)


def _numbers(count: int) -> Callable[[Any], list[str]]:
    return lambda found: [str(number) for number in range(count)]


_BY_FLAG: dict[str, Any] = {"train": ({"train": True},), "test": ({"train": False},)}
_BY_NAME: dict[str, Any] = {"train": ({"split": "train"},), "test": ({"split": "test"},)}
_WITH_VALIDATION: dict[str, Any] = {
    "train": ({"split": "train"}, {"split": "val"}),
    "test": ({"split": "test"},),
}
_ARRAY: dict[str, Any] = {"images": "data", "from_files": False}

SETS: dict[str, _Set] = {
    "CIFAR10": _Set(datasets.CIFAR10.url, **_BY_FLAG, labels="targets", **_ARRAY),
    "CIFAR100": _Set(datasets.CIFAR100.url, **_BY_FLAG, labels="targets", **_ARRAY),
    "MNIST": _Set(datasets.MNIST.mirrors[0], **_BY_FLAG, labels="targets", **_ARRAY),
    "FashionMNIST": _Set(datasets.FashionMNIST.mirrors[0], **_BY_FLAG, labels="targets", **_ARRAY),
    "SVHN": _Set(
        datasets.SVHN.split_list["train"][0],
        **_BY_NAME, labels="labels", **_ARRAY, classes=_numbers(10),
    ),
    "STL10": _Set(datasets.STL10.url, **_BY_NAME, labels="labels", **_ARRAY),
    "Food101": _Set(datasets.Food101._URL, **_BY_NAME, labels="_labels", images="_image_files"),
    "Flowers102": _Set(
        datasets.Flowers102._download_url_prefix,
        **_WITH_VALIDATION, labels="_labels", images="_image_files",
        classes=lambda found: list(getattr(found, "classes", map(str, range(102)))),
    ),
    "OxfordIIITPet": _Set(
        datasets.OxfordIIITPet._RESOURCES[0][0],
        train=({"split": "trainval"},), test=({"split": "test"},),
        labels="_labels", images="_images",
    ),
    "DTD": _Set(datasets.DTD._URL, **_WITH_VALIDATION, labels="_labels", images="_image_files"),
    "EuroSAT": _Set(
        "https://huggingface.co/datasets/torchgeo/eurosat",
        train=({},), test=None, labels="targets", images="samples",
    ),
    "GTSRB": _Set(
        "https://sid.erda.dk/public/archives/daaeac0d7ce1152aea9b61d9f1e19370",
        **_BY_NAME, labels="_samples", images="_samples", classes=_numbers(43),
    ),
}  # fmt: skip


@dataset(
    label="{dataset}",
    order=4,
    argument="dataset",
    resolution=True,
    sizes="fedlens.data.known_sizes:torchvision",
)
def torchvision(
    root: Path | str | None = None,
    resolution: int = RESOLUTION,
    *,
    dataset: Annotated[str, "its name, such as CIFAR10"],
    test_fraction: Annotated[
        float, Range("(0, 1)"), "images for testing, of a set without a test split (EuroSAT)"
    ] = 0.2,
    size: Annotated[
        int | None, Range("[1, 4096]"), "pixels of the stored images; null: the backbone's"
    ] = None,
    crop: Annotated[
        Literal["centre", "squash"], "cut a square from the centre, or squash the image into one"
    ] = "centre",
) -> Dataset:
    """A classification dataset of torchvision; missing files are downloaded on first use."""
    if dataset not in SETS:
        raise FedlensError(f"data=torchvision:{dataset} is unknown: {suggest(dataset, list(SETS))}")
    chosen, folder = SETS[dataset], locate(root)
    verify: Callable[[], dict[Path, Status]]
    train, test = _fetched(dataset, chosen, folder)
    classes = chosen.classes(train[0])
    if not chosen.from_files:
        arrays = [_arrays(chosen, parts) for parts in (train, test or [])]
        if size is None or arrays[0][0].shape[-2:] == (size, size):
            return _in_memory(dataset, classes, *arrays)
        splits, verify = [_split_of_arrays(*one) for one in arrays], dict
    else:
        splits, verify = _splits_of_files(chosen, folder, train, test)
    return image_dataset(
        dataset,
        f"torchvision's {dataset} in {folder}",
        classes,
        splits[0],
        splits[1] if test is not None else None,
        size=size,
        resolution=resolution,
        crop=crop,
        test_fraction=test_fraction,
        verify=verify,
    )


# --- files ---------------------------------------------------------------------------------------


def _fetched(name: str, chosen: _Set, folder: Path) -> tuple[list[Any], list[Any] | None]:
    """torchvision's objects of the training and the test splits; downloads what is missing."""

    def found() -> tuple[list[Any], list[Any] | None] | None:
        try:
            train = [_opened(name, folder, one) for one in chosen.train]
            test = None if chosen.test is None else [
                _opened(name, folder, one) for one in chosen.test
            ]  # fmt: skip
        except (RuntimeError, FileNotFoundError):  # as torchvision says that it is not there
            return None
        return train, test

    def fetch() -> tuple[list[Any], list[Any] | None]:
        _download(name, chosen, folder)
        if (result := found()) is None:
            raise FedlensError(
                f"torchvision's {name} in {folder} is incomplete or damaged: move its files away "
                f"and run 'fedlens data fetch torchvision:{name}'."
            )
        return result

    return files.make_once(files.cache_dir() / "downloads" / name, find=found, make=fetch)


def _opened(name: str, folder: Path, options: Options) -> Any:
    return getattr(datasets, name)(folder, **options)


def _download(name: str, chosen: _Set, folder: Path) -> None:
    """Into a folder of its own first, so that no half of a dataset is ever taken for the whole."""

    def failure(reason: str) -> FedlensError:
        return FedlensError(
            f"torchvision's {name} is not complete in {folder} and could not be downloaded "
            f"({reason}): run 'fedlens data fetch torchvision:{name}' with a network, or copy its "
            "files there."
        )

    if (reason := unreachable(chosen.url)) is not None:
        raise failure(reason)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder, prefix=files.TEMPORARY) as scratch, _short_timeout():
            for options in (*chosen.train, *(chosen.test or ())):
                getattr(datasets, name)(scratch, download=True, **options)
            for entry in sorted(Path(scratch).iterdir()):
                _move(entry, folder / entry.name)
    except (OSError, RuntimeError) as error:
        raise failure(" ".join(str(error).split())) from error


def _move(entry: Path, target: Path) -> None:
    """A folder that exists is completed; its files stay as they are."""
    if not target.exists():
        shutil.move(entry, target)
    elif entry.is_dir():
        for inner in sorted(entry.iterdir()):
            _move(inner, target / inner.name)


@contextmanager
def _short_timeout() -> Iterator[None]:
    """A server that falls silent while it sends is given up."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT_S)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _splits_of_files(
    chosen: _Set, folder: Path, train: list[Any], test: list[Any] | None
) -> tuple[list[Split], Callable[[], dict[Path, Status]]]:
    """The training and the test images, and a function that decodes all files to their end."""
    pairs = [_files(chosen, parts) for parts in (train, test or [])]
    names = [
        path.resolve().relative_to(folder.resolve()).as_posix() for paths, _ in pairs
        for path in paths
    ]  # fmt: skip
    found = image_files(folder, names)
    everything = split_of_files(found, [label for _, labels in pairs for label in labels])
    parts = torch.arange(len(names)).tensor_split([len(pairs[0][0])])
    return [everything.at(part) for part in parts], found.verify


def _files(chosen: _Set, parts: list[Any]) -> tuple[list[Path], list[int]]:
    paths, labels = [], []
    for part in parts:
        images, numbers = getattr(part, chosen.images), getattr(part, chosen.labels)
        if chosen.images in ("samples", "_samples"):  # pairs of a path and a label
            images, numbers = [path for path, _ in images], [label for _, label in images]
        paths += [Path(one) for one in images]
        labels += [int(one) for one in numbers]
    return paths, labels


# --- arrays --------------------------------------------------------------------------------------


def _arrays(chosen: _Set, parts: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [N, 3, H, W] and labels; grey images get three equal channels."""
    pixels = np.concatenate([np.asarray(getattr(part, chosen.images)) for part in parts])
    labels = np.concatenate([np.asarray(getattr(part, chosen.labels)) for part in parts])
    if pixels.ndim == 3:
        pixels = np.repeat(pixels[:, None], 3, axis=1)
    elif pixels.shape[-1] == 3:
        pixels = pixels.transpose(0, 3, 1, 2)
    tensor = torch.from_numpy(np.ascontiguousarray(pixels))
    return tensor, torch.from_numpy(labels.astype(np.int64))


def _in_memory(
    name: str,
    classes: list[str],
    train: tuple[torch.Tensor, torch.Tensor],
    test: tuple[torch.Tensor, torch.Tensor],
) -> Dataset:
    content = hashlib.sha256(repr(classes).encode())
    for part in (*train, *test):
        content.update(f"{tuple(part.shape)}".encode())
        content.update(part.numpy().data)
    return Dataset(
        name=name,
        digest=content.hexdigest(),
        load_classes=lambda: tuple(classes),
        load_train=partial(Images, *train),
        load_test=partial(Images, *test),
    )


def _split_of_arrays(pixels: torch.Tensor, labels: torch.Tensor) -> Split:
    return Split(
        Source(
            [f"image {position}" for position in range(len(pixels))],
            lambda position: Image.fromarray(pixels[position].permute(1, 2, 0).numpy()),
            [hashlib.sha256(one.numpy().tobytes()).hexdigest() for one in pixels],
        ),
        labels,
        [min(pixels.shape[-2:])] * len(pixels),
    )
