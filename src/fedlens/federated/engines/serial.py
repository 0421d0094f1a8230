"""Who carries out a round's tasks: engines take tasks and hand back updates in the tasks' order."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from fedlens.federated.client import Task, Trainer, Update
from fedlens.params import Params
from fedlens.runtime.threads import limited_threads


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
