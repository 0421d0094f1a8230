"""A round's clients one after another, in this process."""

from collections.abc import Iterator, Sequence

from fedlens.federated.client import Trainer
from fedlens.federated.tasks import ClientTask, ClientUpdate
from fedlens.params import Params
from fedlens.registry import RowSettings
from fedlens.runtime.threads import limited_threads


class Serial:
    """One client after another, with `threads` threads."""

    settings: RowSettings | None = None  # of the registry's row that made it

    def __init__(self, trainer: Trainer, threads: int) -> None:
        self.trainer = trainer
        self.threads = threads

    def updates(self, parameters: Params, tasks: Sequence[ClientTask]) -> Iterator[ClientUpdate]:
        for task in tasks:
            with limited_threads(self.threads):
                update = self.trainer.train(task, parameters)
            yield update

    def close(self) -> None:
        pass
