"""Journals and checkpoints that move together: a checkpoint remembers how long each journal was.

Restoring rewinds the journals to that length, so what a killed session wrote after its last
checkpoint is written again by the next one, once.
"""

from collections.abc import Mapping
from typing import Any

import torch

from fedlens.store.checkpoints import Checkpoint, Checkpoints
from fedlens.store.run_folder import JOURNALS, RunFolder


class Ledger:
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
        lengths = {journal: self.folder.journal(journal).sync() for journal in JOURNALS}
        whole = {**state, "journals": lengths}
        self.checkpoints.save(name, tensors, whole, score=score, best=best)

    def restore(self) -> Checkpoint | None:
        """The checkpoint to go on from, if there is one; the journals are rewound to it."""
        found = self.checkpoints.latest()
        lengths = found.state["journals"] if found else {}
        for journal in JOURNALS:
            self.folder.journal(journal).rewind(lengths.get(journal, 0))
        return found
