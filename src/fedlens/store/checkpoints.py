"""Checkpoints of a run, and its journals as they were at each checkpoint.

A checkpoint is a folder: tensors in safetensors, the rest in JSON, with the hash of the tensors. It
is written whole or not at all; a damaged one is noticed, and the one before it is used.
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
from fedlens.store.run_folder import JOURNALS, RunFolder

SCHEMA = 1
TENSORS, STATE = "tensors.safetensors", "state.json"

log = logging.getLogger(__name__)


class Damaged(Exception):
    """Why a checkpoint cannot be used."""


@dataclass(frozen=True)
class Checkpoint:
    name: str
    state: dict[str, Any]
    tensors: dict[str, torch.Tensor]


class Checkpoints:
    """All checkpoints of one run; their names sort by time."""

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
        """Writes a checkpoint, then removes older ones.

        `score` is the validation metric of these parameters (higher is better; None if they were
        not evaluated). `best` is the name of the best checkpoint so far, which may be this one.
        """
        with replacing(self.folder / name) as temporary:
            temporary.mkdir()
            flat = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
            save_file(flat, temporary / TENSORS)
            content = {
                "schema": SCHEMA,
                "score": score,
                "best": best,
                "tensors_sha256": sha256(temporary / TENSORS),
                "state": dict(state),
            }
            write_json(temporary / STATE, content)
        self._prune()

    def load(self, name: str) -> Checkpoint:
        """Reads one checkpoint; refuses a missing or damaged one."""
        if not (self.folder / name).exists():
            raise FedlensError(
                f"There is no checkpoint {self.folder / name}: an archive of records has none, so "
                "name the run's own folder, or run it again."
            )
        try:
            return self._read(name)
        except Damaged as fault:
            raise FedlensError(
                f"Checkpoint {self.folder / name} is damaged ({fault}): delete that folder and "
                "resume the run, which continues from the checkpoint before."
            ) from fault

    def latest(self) -> Checkpoint | None:
        """The newest intact checkpoint whose best is intact too; damaged ones are removed."""
        if self.folder.exists():
            clear_partials(self.folder)
        for name in reversed(self.names()):
            try:
                checkpoint = self._read(name)
                best = self._header(name)["best"]
                if best is not None and best != name:
                    self._read(best)
                return checkpoint
            except Damaged as fault:
                log.warning("checkpoint %s is damaged (%s): falling back", name, fault)
                discard(self.folder / name)
        return None

    def ranks(self, score: float) -> bool:
        """Whether parameters of this score would be among the `keep_best` best."""
        scores = sorted(h["score"] for h in self._headers().values() if h["score"] is not None)
        return len(scores) < self.keep_best or score > scores[-self.keep_best]

    def states(self) -> list[dict[str, Any]]:
        """The state of every kept checkpoint, without tensors."""
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
                "resume it with the fedlens version in its manifest.json."
            )
        if not header.keys() >= {"score", "best", "tensors_sha256", "state"}:
            raise Damaged(f"{STATE} is incomplete")
        return header

    def _headers(self) -> dict[str, dict[str, Any]]:
        """Of all checkpoints that are not damaged, sorted by time."""
        headers = {}
        for name in self.names():
            with suppress(Damaged):
                headers[name] = self._header(name)
        return headers

    def _prune(self) -> None:
        """Keeps the last ones, the best ones they refer to, and the `keep_best` best by score."""
        headers = self._headers()
        last = list(headers)[-self.keep_last :]
        scored = [name for name in headers if headers[name]["score"] is not None]
        ranked = sorted(scored, key=lambda name: -headers[name]["score"])  # stable: earlier first
        kept = {*last, *(headers[name]["best"] for name in last), *ranked[: self.keep_best]}
        for name in headers.keys() - kept:
            discard(self.folder / name)


class Journals:
    """Journals and checkpoints of one run, kept in step.

    A checkpoint stores how long each journal was. Restoring cuts the journals to that length, so
    what a killed session recorded after its last checkpoint is recorded once.
    """

    def __init__(self, folder: RunFolder, checkpoints: Checkpoints) -> None:
        self.folder = folder
        self.checkpoints = checkpoints

    def record(self, journal: str, record: Mapping[str, Any]) -> None:
        self.folder.journal(journal).append(record)

    def save(
        self,
        name: str,
        tensors: Mapping[str, torch.Tensor],
        state: Mapping[str, Any],
        *,
        score: float | None = None,
        best: str | None = None,
    ) -> None:
        """Writes a checkpoint; see `Checkpoints.save`."""
        lengths = {journal: self.folder.journal(journal).sync() for journal in JOURNALS}
        content = {**state, "journals": lengths}
        self.checkpoints.save(name, tensors, content, score=score, best=best)

    def restore(self) -> Checkpoint | None:
        """The checkpoint to resume from, if there is one; the journals are cut to its lengths."""
        checkpoint = self.checkpoints.latest()
        lengths = checkpoint.state["journals"] if checkpoint else {}
        for journal in JOURNALS:
            self.folder.journal(journal).rewind(lengths.get(journal, 0))
        return checkpoint
