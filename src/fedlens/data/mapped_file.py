"""Rows of one shape in a file of the cache, mapped instead of loaded: what is asked for is read.

The file is written in parts. `parts.json` has the digest of every finished part, so a killed build
continues where it was, and damaged parts are found when the file is opened and made again.
"""

import hashlib
import logging
import math
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedlens import files
from fedlens.errors import FedlensError
from fedlens.runtime.units import size_text

CHECKED_BYTES = 1 << 30  # read when a file is opened: all of a small one, a share of a large one

MakeRows = Callable[[range], torch.Tensor]  # the rows at these positions

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MappedFile:
    """One file, alone in a folder of the cache with its `parts.json`."""

    path: Path
    rows: int
    shape: tuple[int, ...]  # of a row
    dtype: torch.dtype
    part: int  # rows that are written and checked together
    content: str  # what messages call the rows

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def parts(self) -> list[range]:
        """The positions of each part's rows."""
        starts = range(0, self.rows, self.part)
        return [range(start, min(start + self.part, self.rows)) for start in starts]

    @property
    def complete(self) -> bool:
        """Whether all parts are written; they may be damaged."""
        return None not in self._digests()

    def make_once(
        self,
        making: Callable[[], AbstractContextManager[MakeRows]],
        identity: Mapping[str, object],
        *,
        remedy: str,
        check: Callable[[], None] = lambda: None,
    ) -> torch.Tensor:
        """All rows, mapped; parts that are missing or damaged are made first, by one process.

        `making` is entered only if there are such parts, and gives a function that makes them.
        `identity` is written beside the file, for the reader; `remedy` is what a user can do where
        the disk has no room.
        """

        def build() -> torch.Tensor:
            with making() as make:
                self._build(make, identity, remedy)
            return self.open()

        return files.make_once(self.path.parent, find=self.find, make=build, check=check)

    def open(self) -> torch.Tensor:
        stored = np.memmap(self.path, dtype=np.uint8, mode="r", shape=(self.bytes,))
        with warnings.catch_warnings():  # torch warns that the array is read-only, as it must be
            warnings.simplefilter("ignore", UserWarning)
            values = torch.from_numpy(stored)
        return values.view(self.dtype).view(self.rows, *self.shape)

    def find(self) -> torch.Tensor | None:
        """The rows, mapped, if the file is complete and its checked parts are undamaged."""
        digests = self._digests()
        if None in digests:
            return None
        stride = max(1, -(-self.bytes // CHECKED_BYTES))
        checked = range(os.getpid() % stride, len(digests), stride)  # others in another process
        if all(self._digest(number) == digests[number] for number in checked):
            return self.open()
        return None

    def _digests(self) -> list[str | None]:
        """Of every part, as recorded; None for those not finished."""
        nothing: list[str | None] = [None] * len(self.parts)
        try:
            recorded: Any = files.read_json(self.path.parent / "parts.json")["digests"]
        except (FedlensError, KeyError, TypeError):
            return nothing
        complete = self.path.is_file() and self.path.stat().st_size == self.bytes
        valid = isinstance(recorded, list) and len(recorded) == len(nothing)
        return recorded if complete and valid else nothing

    def _digest(self, number: int) -> str:
        """Of a part as it is in the file."""
        part = self.parts[number]
        with self.path.open("rb") as stream:
            stream.seek(part.start * self.row_bytes)
            return hashlib.sha256(stream.read(len(part) * self.row_bytes)).hexdigest()

    def _build(self, make: MakeRows, identity: Mapping[str, object], remedy: str) -> None:
        digests = self._digests()
        for number, digest in enumerate(digests):
            if digest is not None and self._digest(number) != digest:
                digests[number] = None
                log.warning(
                    "%s is damaged (part %d of %d): its %s are made again.",
                    self.path, number + 1, len(digests), self.content,
                )  # fmt: skip
        self._reserve(remedy)
        with self.path.open("r+b") as stream:
            for number, part in enumerate(self.parts):
                if digests[number] is not None:
                    continue
                content = self._bytes_of(make(part), part)
                stream.seek(part.start * self.row_bytes)
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
                digests[number] = hashlib.sha256(content).hexdigest()
                record = {**identity, "digests": digests}
                files.write_json(self.path.parent / "parts.json", record, indent=None)

    def _bytes_of(self, values: torch.Tensor, part: range) -> memoryview:
        if values.shape != (len(part), *self.shape) or values.dtype != self.dtype:
            raise ValueError(
                f"{values.dtype} {tuple(values.shape)} for {len(part)} rows of {self.dtype} "
                f"{self.shape}"
            )
        return values.contiguous().view(-1).view(torch.uint8).numpy().data

    def _reserve(self, remedy: str) -> None:
        """The file in its full length, refused if the disk has no room for it."""
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            files.clear_partials(folder)
            free = shutil.disk_usage(folder).free
            if not self.path.exists() and free < self.bytes:
                raise FedlensError(
                    f"The {self.content} take {size_text(self.bytes)} and {folder} has "
                    f"{size_text(free)} left: set FEDLENS_CACHE to a larger disk, or choose "
                    f"{remedy}."
                )
            with self.path.open("ab") as stream:
                stream.truncate(self.bytes)
        except OSError as error:
            raise FedlensError(
                f"Cannot write to {folder} ({error.strerror or error}): set FEDLENS_CACHE to a "
                "folder you may write to."
            ) from error
