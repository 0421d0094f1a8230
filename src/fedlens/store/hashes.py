"""The hashes of all files that a checkpoint depends on: hashes.json, written last. No torch.

They are of two kinds: files in the checkpoint's own folder, and files of the run that it refers to,
by their paths in the run's folder (states and updates of clients, and the journals up to their
length at the checkpoint).
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedlens.errors import FedlensError
from fedlens.files import sha256
from fedlens.store.records import read_record, write_record

HASHES = "hashes.json"

FileHash = dict[str, Any]  # {"sha256": …}; of a file that grows also {"bytes": its length then}
Hashes = Mapping[str, FileHash]  # path → hash


class Damaged(Exception):
    """Why a checkpoint cannot be used."""


@dataclass(frozen=True)
class CheckpointHashes:
    checkpoint: Hashes
    run: Hashes


def of_file(path: Path) -> FileHash:
    return {"sha256": sha256(path)}


def of_start(path: Path, length: int) -> FileHash:
    """Of the first `length` bytes of a file that is only appended to."""
    return {"sha256": sha256(path, length=length), "bytes": length}


def write(checkpoint: Path, names: Iterable[str], run: Hashes) -> None:
    """Hashes the files of these names in a checkpoint; those of the run are known."""
    own = {name: of_file(checkpoint / name) for name in names}
    write_record(checkpoint / HASHES, asdict(CheckpointHashes(own, dict(run))))


def read(checkpoint: Path) -> CheckpointHashes:
    if not (checkpoint / HASHES).exists():
        raise Damaged(f"{HASHES} is missing")
    try:
        return CheckpointHashes(**read_record(checkpoint / HASHES, sealed=True))
    except FedlensError as error:
        raise Damaged(str(error)) from error


def check(folder: Path, hashes: Hashes) -> None:
    """Compares files below `folder` with their hashes; names the first that differs."""
    for name, known in hashes.items():
        try:
            found = sha256(folder / name, length=known.get("bytes"))
        except (OSError, EOFError) as error:
            raise Damaged(f"{name} is lost or damaged: {_reason(error)}") from error
        if found != known["sha256"]:
            raise Damaged(f"{name} is lost or damaged: its hash differs")


def of_run(run: Path) -> Hashes | None:
    """The hashes of a run's files, by its newest checkpoint; None if there are none."""
    folders = sorted(path for path in (run / "checkpoints").glob("[!.]*") if path.is_dir())
    if not folders:
        return None
    try:
        return read(folders[-1]).run
    except Damaged as fault:
        raise FedlensError(
            f"The checkpoint {folders[-1]} is damaged ({fault}), so the files of {run.name} cannot "
            "be checked: restore it from a copy, or run it again under another run.name."
        ) from fault


def _reason(error: OSError | EOFError) -> str:
    return (isinstance(error, OSError) and error.strerror) or "it is too short"
