"""What image files contain: a hash and the shorter side of each, found once and remembered.

A file is read again when its size or time of change differs. Content is all that counts: the
hashes do not depend on where the files lie.
"""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from fedlens import files
from fedlens.data.images import Status
from fedlens.data.sources.image_cache import Source, unreadable
from fedlens.errors import FedlensError
from fedlens.runtime.progress import progress_bar
from fedlens.runtime.stop import current
from fedlens.runtime.threads import available

Facts = tuple[int, int, str, int]  # bytes, time of change in ns, sha256, shorter side in pixels


@dataclass(frozen=True)
class ImageFiles:
    """Files below `root`, by their names there, with what is known of each."""

    root: Path
    names: tuple[str, ...]  # with forward slashes, on every system
    hashes: tuple[str, ...]
    sides: tuple[int, ...]

    def source(self) -> Source:
        return Source(
            [str(self.root / name) for name in self.names],
            lambda position: Image.open(self.root / self.names[position]),
            self.hashes,
        )

    def verify(self) -> dict[Path, Status]:
        """Whether each file can be decoded to its end."""
        paths = [self.root / name for name in self.names]
        with ThreadPoolExecutor(available()) as pool:
            return dict(zip(paths, pool.map(_status, paths), strict=True))


def image_files(root: Path, names: Sequence[str]) -> ImageFiles:
    """The facts of these files; those of unchanged files are remembered in the cache."""
    memory = _memory(root)
    known = _remembered(memory)
    facts: dict[str, Facts] = {}
    with (
        progress_bar(f"reading the files of {root.name}", current()) as update,
        ThreadPoolExecutor(available()) as pool,
    ):
        found = pool.map(partial(_facts, root, known), names)
        for number, (name, one) in enumerate(zip(names, found, strict=True)):
            facts[name] = one
            update(number + 1, len(names))
    if any(known.get(name) != one for name, one in facts.items()):
        with suppress(FedlensError):  # a read-only cache: they are found again next time
            files.write_json(memory, {**known, **facts}, indent=None)
    return ImageFiles(
        root,
        tuple(names),
        tuple(facts[name][2] for name in names),
        tuple(facts[name][3] for name in names),
    )


def describe(content: bytes, name: str) -> tuple[str, int]:
    """The hash of an encoded image and its shorter side; refuses what is not an image."""
    try:
        with Image.open(BytesIO(content)) as image:
            side = min(image.size)
    except Exception as error:
        raise unreadable(name, error) from error
    return hashlib.sha256(content).hexdigest(), side


def _facts(root: Path, known: dict[str, Facts], name: str) -> Facts:
    path = root / name
    try:
        state = path.stat()
        before = known.get(name)
        if before and before[:2] == (state.st_size, state.st_mtime_ns):
            return before
        content = path.read_bytes()
    except OSError as error:
        raise FedlensError(
            f"{path} cannot be read ({error.strerror or error}): check its permissions, or remove "
            "it."
        ) from error
    return (state.st_size, state.st_mtime_ns, *describe(content, str(path)))


def _memory(root: Path) -> Path:
    name = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:32]
    return files.cache_dir() / "image_files" / f"{name}.json"


def _remembered(memory: Path) -> dict[str, Facts]:
    try:
        stored: Any = files.read_json(memory)
        return {name: tuple(facts) for name, facts in stored.items()}
    except (FedlensError, AttributeError, TypeError):
        return {}


def _status(path: Path) -> Status:
    try:
        with Image.open(path) as image:
            image.load()
    except FileNotFoundError:
        return "missing"
    except Exception:
        return "corrupt"
    return "ok"
