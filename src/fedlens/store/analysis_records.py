"""What was asked of a finished run: the name of an analysis, its folder, its record. No torch.

An analysis lies in arithmetic/<name>/ below its run, and its name says all that was asked, so that
asking again finds the record and computes nothing.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from fedlens.errors import FedlensError
from fedlens.files import read_json
from fedlens.store.run_folder import RunFolder

Record = dict[str, Any]

READABLE = 80  # letters of a name before its hash


def analysis_name(*words: object, **arguments: object) -> str:
    """Words to read, and a short hash of all arguments: `alpha-ridge-0to1.5-1f0c88ab`."""
    text = json.dumps(arguments, sort_keys=True, default=str)
    said = re.sub(r"[^\w.+=-]+", "_", "-".join(map(str, words)))[:READABLE]
    return f"{said}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def place(folder: RunFolder, name: str) -> Path:
    return folder.path / "arithmetic" / name


def finished(folder: RunFolder, name: str) -> Record | None:
    """The record of an analysis, if it was made before."""
    path = place(folder, name) / "record.json"
    return dict(read_json(path)) if path.exists() else None


def kept_rounds(updates: Path) -> list[int]:
    """The rounds whose client updates are in that folder."""
    return sorted(int(path.name.rpartition("-")[2]) for path in updates.glob("round-*"))


def rounds_kept(folder: RunFolder) -> list[int]:
    """The same of a run; one without any has nothing to recombine."""
    found = kept_rounds(folder.updates)
    if not found:
        raise FedlensError(
            f"{folder.name} kept no client updates: run it with federated.keep_updates=1 or more."
        )
    return found


def result_of(folder: RunFolder) -> Record:
    """What a run came to; one that is not finished, or not tested, is not edited."""
    if folder.result is None:
        raise FedlensError(
            f"{folder.name} is not finished: go on with `fedlens resume {folder.path}` first."
        )
    if "test" not in folder.result:
        raise FedlensError(
            f"{folder.name} never opened its test split: run it with evaluate.test=true first."
        )
    return folder.result
