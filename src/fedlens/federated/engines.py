"""Who carries out a round's tasks: engines take tasks and hand back updates in the tasks' order."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from fedlens.federated.client import Task, Trainer, Update
from fedlens.params import Params


class Engine(Protocol):
    def updates(self, parameters: Params, tasks: Sequence[Task]) -> Iterator[Update]:
        """One update for every task, in their order; each is lent until the next is asked for."""
        ...

    def close(self) -> None: ...


class Serial:
    """One client after another, in this process."""

    def __init__(self, trainer: Trainer, threads: int) -> None:
        self.trainer = trainer
        self.threads = threads

    def updates(self, parameters: Params, tasks: Sequence[Task]) -> Iterator[Update]:
        for task in tasks:
            with limited_threads(self.threads):
                update = self.trainer.train(task, parameters)
            yield update

    def close(self) -> None:
        pass


@contextmanager
def limited_threads(threads: int) -> Iterator[None]:
    """Their number decides the last bits of a result, so engines agree on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
