"""What clients remember between rounds (SCAFFOLD's controls), on disk: K clients may be many.

A state is a file named by client and by the checkpoint it was written for, which holds the table
of those in force; files that no kept checkpoint refers to are removed.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from fedlens import params
from fedlens.errors import FedlensError
from fedlens.files import clear_partials, replacing
from fedlens.params import Params


class ClientStates:
    def __init__(self, folder: Path, device: torch.device) -> None:
        self.folder = folder
        self.device = device
        self.table: dict[int, str] = {}  # client → file
        self.unsaved: dict[int, dict[str, torch.Tensor]] = {}

    def get(self, client: int) -> Params | None:
        if client in self.unsaved:
            return self.unsaved[client]
        if client not in self.table:
            return None
        path = self.folder / self.table[client]
        try:
            return load_file(path, device=str(self.device))
        except (OSError, SafetensorError) as error:
            raise FedlensError(
                f"{path} is lost or damaged ({error}): client {client} cannot go on; start the run "
                "anew under another run.name."
            ) from error

    def put(self, client: int, state: Params) -> None:
        self.unsaved[client] = params.copy(state)

    def save(self, checkpoint: str) -> dict[str, str]:
        """Writes what is new; returns the table, for the checkpoint of that name."""
        for client, state in self.unsaved.items():
            name = f"client-{client}-{checkpoint}.safetensors"
            with replacing(self.folder / name) as temporary:
                save_file(
                    {key: value.cpu().contiguous() for key, value in state.items()}, temporary
                )
            self.table[client] = name
        self.unsaved.clear()
        return {str(client): name for client, name in self.table.items()}

    def put_back(self, table: Mapping[str, str]) -> None:
        self.table = {int(client): name for client, name in table.items()}
        self.unsaved.clear()

    def prune(self, tables: Iterable[Mapping[str, str]]) -> None:
        """Removes files that none of the checkpoints' tables refers to, and half-written ones."""
        clear_partials(self.folder)
        kept = {name for table in tables for name in table.values()}
        for path in self.folder.glob("*.safetensors"):
            if path.name not in kept:
                path.unlink()
