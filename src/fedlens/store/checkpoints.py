"""Checkpoints: tensors in safetensors, the rest in JSON, one folder each, never half-written.

A checkpoint is complete when its folder has its final name; state.json holds the hash of the
tensors, so a damaged one is noticed and the one before it is used.
"""

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from fedlens.errors import FedlensError
from fedlens.files import clear_partials, discard, read_json, replacing, sha256, write_json

SCHEMA = 1
TENSORS, STATE = "tensors.safetensors", "state.json"

log = logging.getLogger(__name__)


class Damaged(Exception):
    """This checkpoint cannot be used, and why."""


@dataclass(frozen=True)
class Checkpoint:
    name: str
    state: dict[str, Any]
    tensors: dict[str, torch.Tensor]


class Checkpoints:
    """Those of one run. Names sort in the order of time."""

    def __init__(self, folder: Path, *, keep_best: int = 1, keep_last: int = 2) -> None:
        self.folder = folder
        self.keep_best = keep_best
        self.keep_last = keep_last

    def save(
        self,
        name: str,
        tensors: Mapping[str, torch.Tensor],
        state: Mapping[str, Any],
        *,
        score: float | None,
        best: str | None,
    ) -> None:
        """Writes a checkpoint, then prunes older ones.

        `score` is the validation metric of these very parameters (higher is better; None if they
        were not evaluated), `best` the name of the best checkpoint so far, which may be this one.
        """
        with replacing(self.folder / name) as temporary:
            temporary.mkdir()
            flat = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
            save_file(flat, temporary / TENSORS)
            whole = {
                "schema": SCHEMA,
                "score": score,
                "best": best,
                "tensors_sha256": sha256(temporary / TENSORS),
                "state": dict(state),
            }
            write_json(temporary / STATE, whole)
        self._prune()

    def load(self, name: str) -> Checkpoint:
        """A checkpoint that must be there; a damaged one is refused in one sentence."""
        try:
            return self._read(name)
        except Damaged as fault:
            raise FedlensError(
                f"Checkpoint {self.folder / name} is damaged ({fault}): delete that folder and "
                "resume the run, which goes back to the one before."
            ) from fault

    def latest(self) -> Checkpoint | None:
        """The newest intact checkpoint whose best is intact too; others on the way are removed."""
        if self.folder.exists():
            clear_partials(self.folder)
        for name in reversed(self.names()):
            try:
                found = self._read(name)
                best = self._header(name)["best"]
                if best is not None and best != name:
                    self._read(best)
                return found
            except Damaged as fault:
                log.warning("checkpoint %s is damaged (%s): falling back", name, fault)
                discard(self.folder / name)
        return None

    def ranks(self, score: float) -> bool:
        """Whether parameters of this score would be among the best-K kept."""
        scores = sorted(h["score"] for h in self._headers().values() if h["score"] is not None)
        return len(scores) < self.keep_best or score > scores[-self.keep_best]

    def states(self) -> list[dict[str, Any]]:
        """What the checkpoints at hand remember besides tensors."""
        return [header["state"] for header in self._headers().values()]

    def names(self) -> list[str]:
        return sorted(path.parent.name for path in self.folder.glob(f"[!.]*/{STATE}"))

    def _read(self, name: str) -> Checkpoint:
        header = self._header(name)
        tensors = self.folder / name / TENSORS
        try:
            intact = sha256(tensors) == header["tensors_sha256"]
        except OSError as error:
            raise Damaged(str(error)) from error
        if not intact:
            raise Damaged(f"the hash of {TENSORS} differs")
        return Checkpoint(name, header["state"], load_file(tensors))

    def _header(self, name: str) -> dict[str, Any]:
        try:
            header: dict[str, Any] = read_json(self.folder / name / STATE)
            schema = header["schema"]
        except (FedlensError, KeyError, TypeError) as error:
            raise Damaged(f"{STATE} is unreadable") from error
        if schema != SCHEMA:
            raise FedlensError(
                f"Checkpoint {self.folder / name} has schema {schema}, not {SCHEMA}: "
                "resume it with the version in its manifest.json."
            )
        if not header.keys() >= {"score", "best", "tensors_sha256", "state"}:
            raise Damaged(f"{STATE} is incomplete")
        return header

    def _headers(self) -> dict[str, dict[str, Any]]:
        """Of all that are not damaged, in the order of time."""
        headers = {}
        for name in self.names():
            with suppress(Damaged):
                headers[name] = self._header(name)
        return headers

    def _prune(self) -> None:
        """Keeps the last ones, the bests those refer to, and the best-K by score."""
        headers = self._headers()
        last = list(headers)[-self.keep_last :]
        scored = [name for name in headers if headers[name]["score"] is not None]
        ranked = sorted(scored, key=lambda name: -headers[name]["score"])  # stable: earlier first
        kept = {*last, *(headers[name]["best"] for name in last), *ranked[: self.keep_best]}
        for name in headers.keys() - kept:
            discard(self.folder / name)
