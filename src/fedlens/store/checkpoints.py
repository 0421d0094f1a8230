"""Checkpoints of a run, and its journals as they were at each checkpoint.

A checkpoint is a folder: tensors in safetensors, the rest in JSON, and the hashes of these and of
all other files that it refers to. It is written whole or not at all; if it or one of these files is
damaged, that is noticed, and the checkpoint before it is used.
"""

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from fedlens.errors import FedlensError
from fedlens.files import clear_partials, discard, read_json, replacing, write_json
from fedlens.store import hashes
from fedlens.store.hashes import HASHES, Damaged, Hashes
from fedlens.store.run_folder import CLOCK, JOURNALS, RunFolder

SCHEMA = 2
TENSORS, STATE = "tensors.safetensors", "state.json"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    name: str
    state: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    files: Hashes = field(default_factory=dict)  # of the run, that it refers to


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
        files: Hashes | None = None,
    ) -> None:
        """Writes a checkpoint, then removes older ones.

        `score` is the validation metric of these parameters (higher is better; None if they were
        not evaluated). `best` is the name of the best checkpoint so far, which may be this one.
        `files` are the other files of the run that it depends on.
        """
        with replacing(self.folder / name) as temporary:
            temporary.mkdir()
            flat = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
            save_file(flat, temporary / TENSORS)
            content = {
                "schema": SCHEMA,
                "score": score,
                "best": best,
                "state": dict(state),
            }
            write_json(temporary / STATE, content)
            hashes.write(temporary, (TENSORS, STATE), files or {})
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
        """The newest intact checkpoint whose best is intact too; damaged ones are removed.

        The files of the run that it refers to are intact as well.
        """
        if self.folder.exists():
            clear_partials(self.folder)
        fell_back = False
        for name in reversed(self.names()):
            try:
                checkpoint = self._read(name)
                hashes.check(self.folder.parent, self._present(checkpoint.files))
                best = self._header(name)["best"]
                if best is not None and best != name:
                    self._read(best)
                return checkpoint
            except Damaged as fault:
                log.warning("checkpoint %s is damaged (%s): using an earlier one", name, fault)
                fell_back = True
                discard(self.folder / name)
        if fell_back:
            log.warning("no checkpoint is intact: the run starts again from its beginning")
        return None

    def ranks(self, score: float) -> bool:
        """Whether parameters of this score would be among the `keep_best` best."""
        scores = sorted(h["score"] for h in self._headers().values() if h["score"] is not None)
        return len(scores) < self.keep_best or score > scores[-self.keep_best]

    def states(self) -> list[dict[str, Any]]:
        """The state of every kept checkpoint, without tensors."""
        return [header["state"] for header in self._headers().values()]

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("[!.]*") if path.is_dir())

    def _read(self, name: str) -> Checkpoint:
        """Its own files, compared with their hashes."""
        folder = self.folder / name
        if not (folder / HASHES).exists():
            self._header(name)  # refuses one of a schema without hashes: it is not damaged
        known = hashes.read(folder)
        hashes.check(folder, known.checkpoint)
        header = self._header(name)
        try:
            return Checkpoint(name, header["state"], load_file(folder / TENSORS), known.run)
        except (OSError, SafetensorError) as error:
            raise Damaged(f"{TENSORS} is unreadable") from error

    def _present(self, files: Hashes) -> Hashes:
        """Without rounds of client updates that were removed since: a later round replaced them."""
        updates, run = RunFolder(self.folder.parent).updates, self.folder.parent
        return {
            name: known
            for name, known in files.items()
            if updates not in (run / name).parents or (run / name).parent.exists()
        }

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
        if not header.keys() >= {"score", "best", "state"}:
            raise Damaged(f"{STATE} is incomplete")
        return header

    def _headers(self) -> dict[str, dict[str, Any]]:
        """Of all checkpoints whose state is as it was written, sorted by time."""
        headers = {}
        for name in self.names():
            with suppress(Damaged):
                known = hashes.read(self.folder / name).checkpoint
                hashes.check(self.folder / name, {STATE: known[STATE]})
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

    A checkpoint stores how long each journal was, and the hash of what it held. Restoring cuts the
    journals to that length, so what a killed session recorded after its last checkpoint is recorded
    once. The journal of the clock is not hashed: no result depends on it.
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
        files: Hashes | None = None,
    ) -> None:
        """Writes a checkpoint; see `Checkpoints.save`."""
        lengths = {journal: self.folder.journal(journal).sync() for journal in JOURNALS}
        content = {**state, "journals": lengths}
        recorded = {
            path.name: hashes.of_start(path, lengths[journal])
            for journal in JOURNALS
            for path in [self.folder.journal(journal).path]
            if journal != CLOCK
        }
        all_files = {**(files or {}), **recorded}
        self.checkpoints.save(name, tensors, content, score=score, best=best, files=all_files)

    def restore(self) -> Checkpoint | None:
        """The checkpoint to resume from, if there is one; the journals are cut to its lengths."""
        checkpoint = self.checkpoints.latest()
        lengths = checkpoint.state["journals"] if checkpoint else {}
        for journal in JOURNALS:
            length = lengths.get(journal, 0)
            if journal == CLOCK or checkpoint is None:
                self.folder.journal(journal).rewind_or_clear(length)
            else:
                self.folder.journal(journal).rewind(length)
        return checkpoint
