"""Images decoded once into a file of uint8 pixels [N, 3, S, S], which is mapped, not loaded.

The file is written in parts. `parts.json` has the digest of every finished part, so a killed build
continues where it was, and damaged parts are found when the file is opened and decoded again.
"""

import hashlib
import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from fedlens import files
from fedlens.data import decoding
from fedlens.data.decoding import Crop, Pixels
from fedlens.data.images import MappedPixels
from fedlens.errors import FedlensError
from fedlens.runtime.progress import progress_bar
from fedlens.runtime.stop import current
from fedlens.runtime.threads import available

PART = 256  # images
CHECKED_BYTES = (
    1 << 30
)  # read whenever a file is opened: all of a small one, a share of a large one

log = logging.getLogger(__name__)


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
    entry = _Entry(files.cache_dir() / "images" / name, len(source), size)
    stop = current()

    def build() -> torch.Tensor:
        with progress_bar(title, stop) as update:
            entry.build(source, crop, identity, update)
        return entry.open()

    return MappedPixels(
        files.make_once(entry.folder, find=entry.find, make=build, check=stop.check)
    )


@dataclass(frozen=True)
class _Entry:
    """One folder of the cache: pixels.bin and parts.json."""

    folder: Path
    images: int
    size: int

    @property
    def pixels(self) -> Path:
        return self.folder / "pixels.bin"

    @property
    def parts(self) -> list[range]:
        """The positions of each part's images."""
        starts = range(0, self.images, PART)
        return [range(start, min(start + PART, self.images)) for start in starts]

    @property
    def image_bytes(self) -> int:
        return 3 * self.size**2

    def open(self) -> torch.Tensor:
        shape = (self.images, 3, self.size, self.size)
        stored = np.memmap(self.pixels, dtype=np.uint8, mode="r", shape=shape)
        with warnings.catch_warnings():  # torch warns that the array is read-only, as it must be
            warnings.simplefilter("ignore", UserWarning)
            return torch.from_numpy(stored)

    def find(self) -> torch.Tensor | None:
        """The file, mapped, if it is whole and the parts that are checked are undamaged."""
        digests = self.digests()
        if None in digests:
            return None
        stride = max(1, -(-self.images * self.image_bytes // CHECKED_BYTES))
        checked = range(os.getpid() % stride, len(digests), stride)  # others in another process
        if all(self.digest(number) == digests[number] for number in checked):
            return self.open()
        return None

    def digests(self) -> list[str | None]:
        """Of every part, as recorded; None for those not finished."""
        nothing: list[str | None] = [None] * len(self.parts)
        try:
            recorded: Any = files.read_json(self.folder / "parts.json")["digests"]
        except (FedlensError, KeyError, TypeError):
            return nothing
        complete = self.pixels.is_file() and self.pixels.stat().st_size == (
            self.images * self.image_bytes
        )
        valid = isinstance(recorded, list) and len(recorded) == len(nothing)
        return recorded if complete and valid else nothing

    def digest(self, number: int) -> str:
        """Of a part as it is in the file."""
        part = self.parts[number]
        with self.pixels.open("rb") as stream:
            stream.seek(part.start * self.image_bytes)
            return hashlib.sha256(stream.read(len(part) * self.image_bytes)).hexdigest()

    def build(
        self,
        source: Source,
        crop: Crop,
        identity: dict[str, Any],
        update: Callable[[int, int], None],
    ) -> None:
        """Decodes the parts that are missing or damaged."""
        digests = self.digests()
        for number, digest in enumerate(digests):
            if digest is not None and self.digest(number) != digest:
                digests[number] = None
                log.warning(
                    "%s is damaged (part %d of %d): its images are decoded again.",
                    self.pixels, number + 1, len(digests),
                )  # fmt: skip
        self._reserve()
        with ThreadPoolExecutor(available()) as pool, self.pixels.open("r+b") as stream:
            for number, part in enumerate(self.parts):
                if digests[number] is not None:
                    continue
                decoded = self._decoded(pool, source, part, crop, update)
                content = np.stack(list(decoded)).tobytes()
                stream.seek(part.start * self.image_bytes)
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
                digests[number] = hashlib.sha256(content).hexdigest()
                record = {**identity, "digests": digests}
                files.write_json(self.folder / "parts.json", record, indent=None)

    def _decoded(
        self,
        pool: ThreadPoolExecutor,
        source: Source,
        part: range,
        crop: Crop,
        update: Callable[[int, int], None],
    ) -> Iterator[Pixels]:
        waiting = [pool.submit(source.decoded, one, self.size, crop) for one in part]
        try:
            for position, one in zip(part, waiting, strict=True):
                yield one.result()
                update(position + 1, self.images)
        finally:
            for one in waiting:
                one.cancel()

    def _reserve(self) -> None:
        """The file in its full length, refused if the disk has no room for it."""
        needed = self.images * self.image_bytes
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            files.clear_partials(self.folder)
            free = shutil.disk_usage(self.folder).free
            if not self.pixels.exists() and free < needed:
                raise FedlensError(
                    f"The decoded images take {needed / 1e9:.1f} GB and {self.folder} has "
                    f"{free / 1e9:.1f} GB left: set FEDLENS_CACHE to a larger disk, or a smaller "
                    "data.size."
                )
            with self.pixels.open("ab") as stream:
                stream.truncate(needed)
        except OSError as error:
            raise FedlensError(
                f"Cannot write to {self.folder} ({error.strerror or error}): set FEDLENS_CACHE to "
                "a folder you may write to."
            ) from error
