"""Client updates of the last rounds on disk, for task arithmetic after training.

updates/round-000012/ has start.safetensors, the global parameters before the round, and one file
for each client with its parameters after it. Where masks are used, only trained entries are stored.
Of a client in a chain they are the global ones plus its own change since the client before it.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fedlens.errors import FedlensError
from fedlens.files import clear_partials, discard, replacing
from fedlens.params import Params
from fedlens.store import hashes
from fedlens.store.hashes import Damaged
from fedlens.store.run_folder import kept_rounds

START = "start.safetensors"


class KeptUpdates:
    """Writes every update as it comes, and keeps those of the last `rounds` rounds."""

    def __init__(self, folder: Path, *, rounds: int) -> None:
        self.folder = folder
        self.rounds = rounds
        self.current: int | None = None  # the round under way
        self.removed = 0  # rounds up to this one
        for path in (folder, *folder.glob("round-*")):
            clear_partials(path)

    def add(
        self,
        round_: int,
        client: int,
        parameters: Params,
        *,
        examples: int,
        start: Params,
        chain: int | None = None,
    ) -> None:
        """The parameters of one client after a round that began with `start`.

        `chain` is the number of its chain, where clients train one after another.
        """
        if not self.rounds:
            return
        folder = _round_folder(self.folder, round_)
        if round_ != self.current:
            discard(folder)  # left by a session that was killed in this round
            _write(folder / START, start)
            self.current = round_
            self.removed = round_ - self.rounds
            for old in kept_rounds(self.folder):
                if old <= round_ - self.rounds:
                    discard(_round_folder(self.folder, old))
        metadata = {"examples": str(examples)}
        if chain is not None:
            metadata["chain"] = str(chain)
        _write(folder / f"client-{client:06d}.safetensors", parameters, metadata)

    def forget(self, round_: int) -> None:
        """Removes what was added for a round."""
        discard(_round_folder(self.folder, round_))
        self.current = None

    def files(self, done: int, known: Iterable[str] = ()) -> set[str]:
        """The files of the rounds kept up to round `done`, by their paths in the run's folder.

        `known` are those of an earlier checkpoint: one that is lost since is not forgotten.
        """
        run = self.folder.parent
        listed = {path for path in (run / name for name in known) if self.folder in path.parents}
        folders = [_round_folder(self.folder, number) for number in kept_rounds(self.folder)]
        present = {path for folder in folders for path in folder.glob("[!.]*.safetensors")}
        rounds = {path: _number(path.parent) for path in listed | present}
        newest = max((number for number in rounds.values() if number <= done), default=0)
        kept = range(max(newest - self.rounds, self.removed) + 1, newest + 1)
        return {path.relative_to(run).as_posix() for path in rounds if rounds[path] in kept}


@dataclass(frozen=True)
class KeptRound:
    """One round: the global parameters before it, and every client's parameters after it."""

    number: int
    start: dict[str, torch.Tensor]
    clients: dict[int, dict[str, torch.Tensor]]
    examples: dict[int, int]  # that a client trained on
    chain: dict[int, int] = field(default_factory=dict)  # its number, of clients in chains

    def shares(self) -> dict[int, float]:
        """p_k, with which client k's change is part of the round's mean: w + Σ p_k (w_k − w).

        Its share of the examples; the changes of a chain's clients add up, so each has the share
        of the whole chain.
        """
        total, together = sum(self.examples.values()), Counter[int]()
        for client, count in self.examples.items():
            if client in self.chain:
                together[self.chain[client]] += count
        return {
            client: (together[self.chain[client]] if client in self.chain else count) / total
            for client, count in self.examples.items()
        }


def read_round(folder: Path, number: int) -> KeptRound:
    """A round below the run's folder of updates, compared with the hashes in its checkpoint."""
    path = _round_folder(folder, number)
    _check(path, folder.parent)
    clients, examples, chain = {}, {}, {}
    start, _ = _read(path / START)
    for file in sorted(path.glob("client-*.safetensors")):
        client = int(file.stem.rpartition("-")[2])
        clients[client], metadata = _read(file)
        try:
            examples[client] = int(metadata["examples"])
            if "chain" in metadata:
                chain[client] = int(metadata["chain"])
        except (KeyError, ValueError) as error:
            raise FedlensError(
                f"{file} is damaged (no number of examples): this round's updates cannot be used."
            ) from error
    return KeptRound(number, start, clients, examples, chain)


def _check(path: Path, run: Path) -> None:
    """Refuses a round whose files are not those that the newest checkpoint of its run lists."""
    if (known := hashes.of_run(run)) is None:  # an older run, or updates without a run
        return
    listed = {name: one for name, one in known.items() if (run / name).parent == path}
    try:
        hashes.check(run, listed)
        for file in path.glob("*.safetensors"):
            if file.relative_to(run).as_posix() not in listed:
                raise Damaged(f"{file} is not in its checkpoint")
    except Damaged as fault:
        raise FedlensError(
            f"The updates of round {_number(path)} of {run.name} cannot be used ({fault}): restore "
            "the file from a copy, or run it again under another run.name."
        ) from fault


def _round_folder(folder: Path, number: int) -> Path:
    return folder / f"round-{number:06d}"


def _number(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def _write(path: Path, values: Params, metadata: dict[str, str] | None = None) -> None:
    tensors = {name: value.detach().cpu().contiguous() for name, value in values.items()}
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata=metadata)


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
            return tensors, stored.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise FedlensError(
            f"{path} is lost or damaged ({error}): this round's updates cannot be used."
        ) from error
