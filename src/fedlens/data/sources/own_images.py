"""Images that a user has at hand, for the library: a folder, or a dataset of images and labels."""

import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from fedlens import files
from fedlens.data.examples import ImageExamples
from fedlens.data.images import Images, MappedPixels
from fedlens.data.sources import decoding
from fedlens.data.sources.decoding import Crop, Pixels
from fedlens.data.sources.folder import split_of_files
from fedlens.data.sources.folder_layout import class_folders
from fedlens.data.sources.image_cache import unreadable
from fedlens.data.sources.image_dataset import check_training_images
from fedlens.data.sources.image_files import image_files
from fedlens.data.transforms import Pipeline
from fedlens.errors import FedlensError
from fedlens.paths import expanded
from fedlens.runtime.progress import progress_bar
from fedlens.runtime.stop import current

IN_MEMORY = 1 << 30  # bytes; more are decoded into a temporary file
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet


def images(
    data: str | Path | Sequence[tuple[Any, int]],
    *,
    size: int,
    crop: Crop = "centre",
    mean: tuple[float, float, float] = MEAN,
    std: tuple[float, float, float] = STD,
) -> ImageExamples:
    """Images of any format and size as examples of one size, for `fedavg` and its like.

    Each image is decoded once: grey images become RGB, transparency is laid over white, and the
    shorter side is resized to `size` pixels before a square is cut from the centre.

    Args:
        data: A folder with a folder of images for each class, decoded into the cache; or a
            `torch.utils.data.Dataset` with a length whose items are `(image, label)`, where an
            image is a Pillow image, a uint8 array [H, W] or [H, W, 3], or a uint8 tensor [3, H, W].
        size: Pixels of a side.
        crop: `"centre"`, or `"squash"` to resize both sides whatever the shape.
        mean: Subtracted from each channel of pixels in 0 to 1.
        std: Divides each channel after that.

    Returns:
        Examples with `labels` and `batch(index)`; `fedavg` takes them as its data.

    Examples:
        >>> import torch
        >>> import fedlens as fl
        >>> from PIL import Image
        >>> photos = [(Image.new("L", (8 + n, 6), n), n % 2) for n in range(4)]
        >>> examples = fl.images(photos, size=4)
        >>> examples.labels.tolist(), examples.batch(torch.tensor([0, 3])).shape
        ([0, 1, 0, 1], torch.Size([2, 3, 4, 4]))
    """
    if size < 1:
        raise FedlensError(f"size={size} must be 1 or more.")
    if crop not in ("centre", "squash"):
        raise FedlensError(f"crop={crop} is unknown: choose centre or squash.")
    found = (
        _of_folder(expanded(data), size, crop)
        if isinstance(data, str | Path)
        else _of_dataset(data, size, crop)
    )
    return ImageExamples(found, None, Pipeline(size, mean, std))


def _of_folder(root: Path, size: int, crop: Crop) -> Images:
    found = class_folders(root)
    numbers = {name: number for number, name in enumerate(found.classes)}
    listed = image_files(root, [name for name, _ in found.train])
    split = split_of_files(listed, [numbers[label] for _, label in found.train])
    check_training_images(str(root), found.classes, split.labels)
    return split.load(size, crop, f"decoding {len(split)} images")


def _of_dataset(data: Sequence[tuple[Any, int]], size: int, crop: Crop) -> Images:
    try:
        count = len(data)
    except TypeError:
        raise FedlensError(
            f"data of type {type(data).__name__} has no length: give a folder, or a dataset whose "
            "items are (image, label)."
        ) from None
    if not count:
        raise FedlensError("data has no images: give at least one.")
    pixels = _room(count, size)
    labels = []
    with progress_bar(f"decoding {count} images", current()) as update:
        for position in range(count):
            image, label = _item(data, position)
            pixels[position] = _pixels(image, position, size, crop)
            labels.append(_label(label, position))
            update(position + 1, count)
    if not isinstance(pixels, np.memmap):
        return Images(torch.from_numpy(pixels), torch.tensor(labels))
    pixels.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return Images(MappedPixels(torch.from_numpy(pixels)), torch.tensor(labels))


def _room(count: int, size: int) -> Any:
    """An array for the pixels: in memory, or in a file that is gone when the process ends."""
    shape = (count, 3, size, size)
    if np.prod(shape) <= IN_MEMORY:
        return np.empty(shape, dtype=np.uint8)
    folder = files.cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as stream:
        return np.memmap(stream, dtype=np.uint8, mode="w+", shape=shape)


def _item(data: Sequence[tuple[Any, int]], position: int) -> tuple[Any, Any]:
    try:
        image, label = data[position]
    except (TypeError, ValueError) as error:
        raise FedlensError(
            f"Item {position} of data is not a pair ({error}): give items (image, label)."
        ) from error
    return image, label


def _pixels(image: Any, position: int, size: int, crop: Crop) -> Pixels:
    if not isinstance(image, Image.Image):
        image = _as_image(image, position)
    try:
        return decoding.square(image, size, crop)
    except Exception as error:  # damaged files make Pillow's readers fail in many ways
        raise unreadable(f"Image {position} of data", error) from error


def _as_image(image: Any, position: int) -> Image.Image:
    array = np.asarray(image)
    if isinstance(image, torch.Tensor) and array.ndim == 3 and array.shape[0] in (1, 3):
        array = array.transpose(1, 2, 0)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    right = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))
    if array.dtype != np.uint8 or not right:
        raise FedlensError(
            f"Image {position} of data has shape {array.shape} and type {array.dtype}: give "
            "Pillow images, uint8 arrays [H, W] or [H, W, 3], or uint8 tensors [3, H, W]."
        )
    return Image.fromarray(np.ascontiguousarray(array))


def _label(label: Any, position: int) -> int:
    try:
        number = int(label)
    except (TypeError, ValueError):
        number = -1
    if number < 0 or number != label:
        raise FedlensError(
            f"The label of image {position} is {label}: classes are whole numbers from 0."
        )
    return number
