"""Images decoded once into a file of uint8 pixels [N, 3, S, S], which is mapped, not loaded.

`mapped_file` has how it is written in parts, continued after a kill, and checked.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from fedlens import files
from fedlens.data.images import MappedPixels
from fedlens.data.mapped_file import MakeRows, MappedFile
from fedlens.data.sources import decoding
from fedlens.data.sources.decoding import Crop, Pixels
from fedlens.errors import FedlensError
from fedlens.runtime.progress import progress_bar
from fedlens.runtime.stop import current
from fedlens.runtime.threads import available

PART = 256  # images


@dataclass(frozen=True)
class Source:
    """Images before they are decoded."""

    names: Sequence[str]  # what an error calls each of them
    open: Callable[[int], Image.Image]
    hashes: Sequence[str]  # of each image's content

    def __len__(self) -> int:
        return len(self.hashes)

    def decoded(self, position: int, size: int, crop: Crop) -> Pixels:
        try:
            with self.open(position) as image:
                return decoding.square(image, size, crop)
        except Exception as error:  # damaged files make Pillow's readers fail in many ways
            raise unreadable(self.names[position], error) from error

    def at(self, positions: Sequence[int]) -> "Source":
        return Source(
            [self.names[one] for one in positions],
            lambda position: self.open(positions[position]),
            [self.hashes[one] for one in positions],
        )


def unreadable(name: str, error: Exception) -> FedlensError:
    reason = "it is not an image that Pillow knows"
    if not isinstance(error, UnidentifiedImageError):
        reason = str(error).strip().rstrip(".").splitlines()[0] if str(error).strip() else "damaged"
    return FedlensError(f"{name} cannot be read as an image ({reason}): replace or remove it.")


def mapped(source: Source, *, size: int, crop: Crop = "centre", title: str) -> MappedPixels:
    """The pixels of all images, from the cache; decoded first where that was not done yet."""
    identity = {
        "version": decoding.VERSION,
        "size": size,
        "crop": crop,
        "images": len(source),
        "content": hashlib.sha256("\n".join(source.hashes).encode()).hexdigest(),
        "part": PART,
    }
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
    file = MappedFile(
        files.cache_dir() / "images" / name / "pixels.bin",
        rows=len(source),
        shape=(3, size, size),
        dtype=torch.uint8,
        part=PART,
        content="decoded images",
    )
    stop = current()

    @contextmanager
    def decoding_parts() -> Iterator[MakeRows]:
        with progress_bar(title, stop) as update, ThreadPoolExecutor(available()) as pool:
            yield lambda part: torch.from_numpy(
                np.stack(list(_decoded(pool, source, part, size, crop, update)))
            )

    return MappedPixels(
        file.make_once(decoding_parts, identity, remedy="a smaller data.size", check=stop.check)
    )


def _decoded(
    pool: ThreadPoolExecutor,
    source: Source,
    part: range,
    size: int,
    crop: Crop,
    update: Callable[[int, int], None],
) -> Iterator[Pixels]:
    waiting = [pool.submit(source.decoded, one, size, crop) for one in part]
    try:
        for position, one in zip(part, waiting, strict=True):
            yield one.result()
            update(position + 1, len(source))
    finally:
        for one in waiting:
            one.cancel()
