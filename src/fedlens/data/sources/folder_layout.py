"""How a folder of images is laid out, by its names alone: no image is opened, and no torch.

Either `train/` and `test/` with a folder for each class, or one folder with a folder for each
class. The names of classes and images are sorted, so their numbers do not depend on the system.
"""

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from PIL import Image

from fedlens.errors import FedlensError

VALIDATION = ("val", "valid", "validation")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Layout:
    """The images' names below the root, and the class of each."""

    classes: tuple[str, ...]
    train: tuple[tuple[str, str], ...]  # (name, class)
    test: tuple[tuple[str, str], ...] | None  # None: to be split from the training images


def layout(root: Path) -> Layout:
    """Finds the classes and images; refuses what is not laid out like this."""
    if not root.is_dir():
        raise FedlensError(f"{root} is not a folder: set data.root to the folder of your images.")
    inside = {one.name for one in _folders(root)}
    held_out = [name for name in VALIDATION if name in inside]
    if "train" not in inside:
        if "test" in inside:
            raise FedlensError(
                f"{root} has test/ but no train/: add it, each with a folder for every class."
            )
        return class_folders(root)
    if "test" in inside:
        train_folders, test_folder = ["train", *held_out], "test"
    elif held_out:
        train_folders, test_folder = ["train"], held_out[0]
        log.info("%s has no test/: %s/ is the test split.", root, test_folder)
    else:
        raise FedlensError(
            f"{root} has train/ but no test/: add test/, or set data.root={root / 'train'}, which "
            "is then split into training and test images."
        )
    train = tuple(one for folder in train_folders for one in _images(root, folder))
    classes = _classes(root, "train", train)
    test = tuple(_images(root, test_folder))
    for name, label in (*train, *test):
        if label not in classes:
            raise FedlensError(
                f"{root / PurePosixPath(name).parent} is of class '{label}', which {root / 'train'}"
                " does not have: add training images of it, or remove it."
            )
    return Layout(classes, train, test)


def class_folders(root: Path) -> Layout:
    """One folder with a folder for each class, not split."""
    if not root.is_dir():
        raise FedlensError(f"{root} is not a folder: give the folder of your images.")
    found = tuple(_images(root, ""))
    return Layout(_classes(root, "", found), found, None)


def _classes(root: Path, folder: str, images: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """The names of all class folders; refuses none, and empty ones."""
    place = root / folder
    names = [one.name for one in _folders(place)]
    if not names:
        raise FedlensError(
            f"{place} has no folders of classes: put the images of each class into a folder of "
            "its own, such as cats/ and dogs/."
        )
    filled = {label for _, label in images}
    if empty := [name for name in names if name not in filled]:
        raise FedlensError(
            f"{place / empty[0]} has no images: add some, or remove the empty folder."
        )
    return tuple(names)


def _folders(place: Path) -> list[Path]:
    try:
        inside = [one for one in place.iterdir() if not one.name.startswith((".", "__"))]
    except OSError as error:
        raise FedlensError(f"{place} cannot be read ({error.strerror}).") from error
    return sorted((one for one in inside if one.is_dir()), key=lambda one: one.name)


def _images(root: Path, folder: str) -> Iterator[tuple[str, str]]:
    """(name below the root, class) of every image, sorted; other files are left out and counted."""
    known = Image.registered_extensions()
    others: list[str] = []
    for place in _folders(root / folder):
        found = []
        for path, folders, names in os.walk(place):
            folders[:] = [one for one in folders if not one.startswith(".")]
            for name in names:
                if name.startswith("."):
                    continue
                file = Path(path, name)
                if file.suffix.lower() in known:
                    found.append(file.relative_to(root).as_posix())
                else:
                    others.append(str(file))
        yield from ((name, place.name) for name in sorted(found))
    if others:
        log.warning(
            "%d files below %s are not images by their names, such as %s: they are left out.",
            len(others), root / folder, others[0],
        )  # fmt: skip
