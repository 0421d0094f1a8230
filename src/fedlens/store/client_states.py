"""Client states between rounds (SCAFFOLD's c_i) on disk: there may be too many clients for memory.

A state is a file, named by its client and the first checkpoint that refers to it. A checkpoint has
a table client → file; files that no kept checkpoint refers to are removed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from fedlens import params
from fedlens.errors import FedlensError
from fedlens.files import clear_partials, replacing
from fedlens.params import Params


@dataclass(frozen=True)
class ClientStates:
    """The states at one point of training; copies of it share their files."""

    folder: Path
    device: torch.device
    table: Mapping[str, str] = field(default_factory=dict)  # client → file, as in a checkpoint
    unsaved: Mapping[int, Params] = field(default_factory=dict)

    def get(self, client: int) -> Params | None:
        """None: the client has not taken part yet."""
        if client in self.unsaved:
            return self.unsaved[client]
        if str(client) not in self.table:
            return None
        path = self.folder / self.table[str(client)]
        try:
            return load_file(path, device=str(self.device))
        except (OSError, SafetensorError) as error:
            raise FedlensError(
                f"{path} is lost or damaged ({error}), so client {client} cannot continue: start "
                "the run again under another run.name."
            ) from error

    def updated(self, states: Mapping[int, Params]) -> "ClientStates":
        """These states instead of the clients' former ones; nothing is written."""
        copies = {client: params.copy(state) for client, state in states.items()}
        return replace(self, unsaved={**self.unsaved, **copies})

    def save(self, checkpoint: str) -> dict[str, str]:
        """Writes the unsaved states for the checkpoint of that name; returns its table.

        `restored(table)` then reads them from disk, so that memory is free again.
        """
        table = dict(self.table)
        for client, state in self.unsaved.items():
            name = f"client-{client}-{checkpoint}.safetensors"
            with replacing(self.folder / name) as temporary:
                save_file(
                    {key: value.cpu().contiguous() for key, value in state.items()}, temporary
                )
            table[str(client)] = name
        return table

    def restored(self, table: Mapping[str, str]) -> "ClientStates":
        """The states of a checkpoint, by its table."""
        return replace(self, table=dict(table), unsaved={})

    def prune(self, tables: Iterable[Mapping[str, str]]) -> None:
        """Removes the files that none of these tables refers to, and half-written ones."""
        clear_partials(self.folder)
        kept = {name for table in tables for name in table.values()}
        for path in self.folder.glob("*.safetensors"):
            if path.name not in kept:
                path.unlink()
