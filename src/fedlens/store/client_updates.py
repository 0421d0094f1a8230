"""Client updates of the last rounds, kept on disk for algebra after training.

updates/round-000012/ holds start.safetensors, the global parameters the round began with, and one
file for each client with its own parameters at the end; packed, where there are masks.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fedlens.errors import FedlensError
from fedlens.federated.client import Update
from fedlens.files import clear_partials, discard, replacing
from fedlens.params import Params
from fedlens.store.analysis_records import kept_rounds

START = "start.safetensors"


class KeptUpdates:
    """Rounds are written as they come, and let go when `rounds` newer ones are there."""

    def __init__(self, folder: Path, *, rounds: int) -> None:
        self.folder = folder
        self.rounds = rounds
        self.begun: int | None = None  # the round under way
        for place in (folder, *folder.glob("round-*")):
            clear_partials(place)

    def add(self, update: Update, start: Params) -> None:
        if not self.rounds:
            return
        number = update.task.round
        place = _place(self.folder, number)
        if number != self.begun:
            discard(place)  # of a session that was killed
            _write(place / START, start)
            self.begun = number
            for old in kept_rounds(self.folder):
                if old <= number - self.rounds:
                    discard(_place(self.folder, old))
        examples = {"examples": str(len(update.task.shard))}
        _write(place / f"client-{update.task.client:06d}.safetensors", update.parameters, examples)


@dataclass(frozen=True)
class KeptRound:
    """One round as it was: θ before it, and every client's θ_k with its number of examples."""

    number: int
    start: dict[str, torch.Tensor]
    clients: dict[int, dict[str, torch.Tensor]]
    examples: dict[int, int]


def read_round(folder: Path, number: int) -> KeptRound:
    place = _place(folder, number)
    clients, examples = {}, {}
    start, _ = _read(place / START)
    for path in sorted(place.glob("client-*.safetensors")):
        client = int(path.stem.rpartition("-")[2])
        clients[client], told = _read(path)
        examples[client] = int(told["examples"])
    return KeptRound(number, start, clients, examples)


def _place(folder: Path, number: int) -> Path:
    return folder / f"round-{number:06d}"


def _write(path: Path, values: Params, told: dict[str, str] | None = None) -> None:
    tensors = {name: value.detach().cpu().contiguous() for name, value in values.items()}
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata=told)


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
            return tensors, stored.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise FedlensError(
            f"{path} is lost or damaged ({error}): this round's updates cannot be used."
        ) from error
