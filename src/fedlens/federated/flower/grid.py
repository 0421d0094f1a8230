"""Flower's grid with errors in one sentence; a stop request takes precedence over an error.

Flower tells a ServerApp that its run was stopped by refusing its next call, and by a signal.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

from flwr.app import Message
from flwr.serverapp import Grid
from flwr.supercore.run import RunNotRunningException

from fedlens.errors import FedlensError

T = TypeVar("T")


class GuardedGrid:
    """The methods of a grid that are used here."""

    def __init__(self, grid: Grid, check: Callable[[], None]) -> None:
        """`check` raises if a stop was requested."""
        self.grid = grid
        self.check = check

    def get_node_ids(self) -> Iterable[int]:
        return self._guarded(self.grid.get_node_ids)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self._guarded(lambda: self.grid.push_messages(messages))

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self._guarded(lambda: self.grid.pull_messages(message_ids))

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return self._guarded(lambda: self.grid.send_and_receive(messages, timeout=timeout))

    def _guarded(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except (Exception, RunNotRunningException) as error:
            self.check()
            raise FedlensError(
                f"The run lost its SuperLink ({type(error).__name__}: {error}): run the same "
                "command again to resume."
            ) from error
