"""Analyses of finished runs on disk: arithmetic/<name>/record.json below the run. No torch.

The name is made from all arguments of an analysis: the same analysis finds its record and is not
computed again.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from fedlens.errors import FedlensError
from fedlens.store import hashes, records
from fedlens.store.run_folder import RunFolder

Record = dict[str, Any]

MAX_LENGTH = 80  # characters of a name before its hash


def analysis_name(*words: object, **arguments: object) -> str:
    """Readable words and a short hash of all arguments: `alpha-ridge-0to1.5-1f0c88ab`."""
    text = json.dumps(arguments, sort_keys=True, default=str)
    readable = re.sub(r"[^\w.+=-]+", "_", "-".join(map(str, words)))[:MAX_LENGTH]
    return f"{readable}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def analysis_folder(folder: RunFolder, name: str) -> Path:
    return folder.path / "arithmetic" / name


def read_record(folder: RunFolder, name: str) -> Record | None:
    """The record of an analysis; None if it was not made yet."""
    path = analysis_folder(folder, name) / "record.json"
    return records.read_record(path) if path.exists() else None


def require_kept_rounds(folder: RunFolder) -> list[int]:
    """The rounds whose client updates a run kept; refuses a run that kept none, or lost some."""
    rounds = folder.kept_rounds()
    listed = {
        (folder.path / name).parent.name
        for name in hashes.of_run(folder.path) or {}
        if (folder.path / name).parent.parent == folder.updates
    }
    if lost := sorted(name for name in listed if not (folder.updates / name).is_dir()):
        raise FedlensError(
            f"{folder.updates / lost[0]} is lost, so the updates that {folder.name} kept are not "
            "complete: restore it from a copy, or run it again under another run.name."
        )
    if not rounds:
        raise FedlensError(
            f"{folder.name} kept no client updates: run it with federated.keep_updates=1 or more."
        )
    return rounds


def require_result(folder: RunFolder) -> Record:
    """The result of a run; refuses a run that is not finished or was not tested."""
    result = folder.result
    if result is None:
        raise FedlensError(
            f"{folder.name} is not finished: finish it with `fedlens resume {folder.path}` first."
        )
    if not isinstance(result.get("choice"), dict) or "parameters" not in result["choice"]:
        raise FedlensError(f"{folder.path / 'result.json'} is damaged: it names no choice.")
    if "test" not in result:
        raise FedlensError(
            f"{folder.name} was not evaluated on the test split: run it with evaluate.test=true "
            "first."
        )
    return result
