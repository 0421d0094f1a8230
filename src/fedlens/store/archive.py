"""The records of many runs as one file: a .tar.xz archive of run folders.

The same files give the same bytes. Readers get a folder: an archive is extracted once into the
cache, in a folder named by the hash of the archive. No torch.
"""

import io
import lzma
import os
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from fedlens.errors import FedlensError
from fedlens.files import cache_dir, make_once, read_json, replacing, sha256, write_json

SUFFIX = ".tar.xz"
PRESET = 9  # its window of 64 MB finds what runs repeat of each other
MAX_FILES = 200_000
MAX_BYTES = 4 * 2**30  # of all files, extracted
CONTENT, CHECKSUMS = "runs", "checksums.json"  # of an extracted archive


class BadArchive(Exception):
    """Why an archive is not extracted."""


def pack(files: Mapping[str, Path], archive: Path) -> None:
    """Writes files into an archive under these names, without times, owners and permissions."""
    with (
        replacing(archive) as temporary,
        lzma.open(temporary, "wb", preset=PRESET) as stream,
        tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name in sorted(files):
            content = files[name].read_bytes()
            entry = tarfile.TarInfo(name)  # modified in 1970 by user 0: the same on all machines
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def extracted(archive: Path) -> Path:
    """The folder with the files of an archive; they are extracted when it is read first."""
    try:
        digest = sha256(archive)
    except OSError as error:
        raise FedlensError(f"{archive} cannot be read ({error.strerror or error}).") from error
    folder = cache_dir() / "archives" / digest[:32]
    return make_once(
        folder,
        find=lambda: folder / CONTENT if _is_complete(folder) else None,
        make=lambda: _extract(archive, folder),
    )


def _is_complete(folder: Path) -> bool:
    """Whether every file is there and intact; a cache may be cleaned or changed in part."""
    if not (folder / CHECKSUMS).exists():
        return False
    try:
        checksums: dict[str, int] = read_json(folder / CHECKSUMS)
        return all(
            zlib.crc32((folder / CONTENT / name).read_bytes()) == checksum
            for name, checksum in checksums.items()
        )
    except (OSError, FedlensError):
        return False


def _extract(archive: Path, folder: Path) -> Path:
    try:
        with replacing(folder, sync=False) as temporary:  # `_is_complete` checks the content
            (temporary / CONTENT).mkdir(parents=True)
            checksums = _extract_files(archive, temporary / CONTENT)
            write_json(temporary / CHECKSUMS, checksums, indent=None)
    except (BadArchive, tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise FedlensError(
            f"{archive} is not an intact archive of runs ({error}): copy or download it again."
        ) from error
    return folder / CONTENT


def _extract_files(archive: Path, folder: Path) -> dict[str, int]:
    """Writes every file of the archive below `folder`; returns their checksums."""
    checksums: dict[str, int] = {}
    total = 0
    with lzma.open(archive) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
        for entry in tar:
            if entry.isdir():
                continue
            name, total = _safe_name(entry), total + entry.size
            if name in checksums:
                raise BadArchive(f"it has {name} twice")
            if len(checksums) >= MAX_FILES or total > MAX_BYTES:
                raise BadArchive(f"it has more than {MAX_FILES:,} files or {MAX_BYTES:,} bytes")
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            stored = tar.extractfile(entry)
            assert stored is not None
            content = stored.read()
            with target.open("xb") as file:
                file.write(content)
            checksums[name] = zlib.crc32(content)
            os.utime(target, (0, 0))  # runs are listed by time, then by name
        while total <= MAX_BYTES and (rest := stream.read(2**20)):  # the checksum is at the end
            total += len(rest)
    if not checksums:
        raise BadArchive("it has no files")
    return checksums


def _safe_name(entry: tarfile.TarInfo) -> str:
    """The entry's name, if it is a plain file in a run's folder."""
    path = PurePosixPath(entry.name)
    if not entry.isreg() or entry.issparse():
        raise BadArchive(f"{entry.name} is a link or a device")
    local = Path(entry.name)  # on Windows, backslashes and drives have a meaning too
    outside = path.is_absolute() or local.anchor or ".." in {*path.parts, *local.parts}
    if outside or len(path.parts) < 2:
        raise BadArchive(f"{entry.name} is not a file in a run's folder")
    return str(path)
