"""Pieces of a suite, carried out one after another in this process; one that fails is isolated.

A piece is a run or an analysis: something to call, that may be called again. How it ended is an
`Outcome`; a stop request ends them all.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedlens.config.identity import run_name
from fedlens.config.schema import Config
from fedlens.errors import FedlensError
from fedlens.runtime.stop import Interrupted, StopRequest
from fedlens.store.run_folder import RunFolder
from fedlens.suites.eta import Outlook


@dataclass(frozen=True)
class Piece:
    label: str
    words: list[str]  # after `fedlens`: the command that repeats it
    call: Callable[[], object] = field(compare=False)  # other processes must be able to unpickle it
    folder: RunFolder


@dataclass(frozen=True)
class Outcome:
    piece: Piece
    failure: str | None = None


def folder_of(config: Config) -> RunFolder:
    """Where the run is, or will be."""
    if config.backbone.resolution is None:  # timm is to be asked for the backbone's own
        from fedlens.experiments.build import resolved

        config = resolved(config)
    return RunFolder(Path(config.run.root) / run_name(config))


def in_turn(pieces: Sequence[Piece], outlook: Outlook, stop: StopRequest) -> Iterator[Outcome]:
    """One after another, each with as many threads as torch has now."""
    import torch

    from fedlens.runtime.threads import limited_threads

    for piece in pieces:
        stop.check()
        outlook.begins(piece.label, piece.folder)
        with limited_threads(torch.get_num_threads()):
            failure = attempt(piece.call)
        outlook.ends(piece.label, failed=failure is not None)
        yield Outcome(piece, failure)


def attempt(call: Callable[[], object]) -> str | None:
    """Why it failed, in a sentence; None if it did not."""
    try:
        call()
    except Interrupted:
        raise
    except Exception as error:
        return in_a_sentence(error)
    return None


def in_a_sentence(error: Exception) -> str:
    """Ours as they are; of others the name and the first line."""
    if isinstance(error, FedlensError):
        return str(error)
    return f"{type(error).__name__}: {error}".rstrip(": ").splitlines()[0]
