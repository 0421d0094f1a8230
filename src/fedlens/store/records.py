"""Records: JSON objects with a seal, so that a record that was changed is noticed. No torch.

The seal is the last key: the SHA-256 of everything else as compact JSON. A record without a seal
was written before there were seals and is read as it is.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedlens.errors import FedlensError
from fedlens.files import read_object, write_json

SEAL = "seal"


def write_record(path: Path, record: Mapping[str, Any], *, indent: int | None = 2) -> None:
    write_json(path, {**record, SEAL: _digest(record)}, indent=indent)


def read_record(path: Path, *, sealed: bool = False) -> dict[str, Any]:
    """A record without its seal; refuses one that is damaged or was changed.

    With `sealed`, also one without a seal: of a kind that always had one.
    """
    record = read_object(path)
    seal = record.pop(SEAL, None)
    if (sealed or seal is not None) and seal != _digest(record):
        raise FedlensError(
            f"{path} is damaged (it does not match its seal): restore it from a copy, or make it "
            "again."
        )
    return record


def _digest(record: Mapping[str, Any]) -> str:
    text = json.dumps(dict(record), separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
