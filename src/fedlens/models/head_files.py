"""A head on disk, with what is known of how it was made and a digest of both.

For heads made from the answers of clients that cannot be asked again with certainty: a resumed run
and an analysis read the head that the run began with.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fedlens import files, params
from fedlens.errors import FedlensError
from fedlens.params import Params

HEADER = "fedlens_head"


def save(path: Path, head: Params, facts: Mapping[str, Any]) -> None:
    """`facts` is any JSON object."""
    header = json.dumps({"facts": dict(facts), "seal": _seal(head, facts)}, allow_nan=False)
    values = {name: value.detach().cpu().contiguous() for name, value in head.items()}
    with files.replacing(path) as temporary:
        save_file(values, temporary, metadata={HEADER: header})


def load(path: Path, like: Params) -> tuple[Params, dict[str, Any]]:
    """The head, with the names and shapes of `like`, and its facts; refuses a damaged one."""
    try:
        with safe_open(path, framework="pt") as stored:
            header = files.parse_json((stored.metadata() or {})[HEADER])
            head = {name: stored.get_tensor(name) for name in like}
        facts: dict[str, Any] = header["facts"]
        intact = _seal(head, facts) == header["seal"]
    except (SafetensorError, OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise _damaged(path, str(error)) from error
    if not intact:
        raise _damaged(path, "it does not match its digest")
    if fault := params.mismatch(like, head):
        raise FedlensError(f"{path} does not fit this run: {fault}.")
    return head, facts


def _damaged(path: Path, why: str) -> FedlensError:
    reason = " ".join(why.split())
    return FedlensError(
        f"{path} is damaged ({reason}): restore it from a copy, or start another run under another "
        "run.name."
    )


def _seal(head: Params, facts: Mapping[str, Any]) -> str:
    text = json.dumps(dict(facts), sort_keys=True, allow_nan=False)
    return hashlib.sha256(f"{params.digest(head)} {text}".encode()).hexdigest()
