"""Ctrl-C and SIGTERM as a request: the work in hand is finished, saved, and then left.

A second signal does not wait.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(Exception):
    """Work stopped at a safe point because the user or the system asked."""


class Abandoned(Interrupted):
    """Work stopped at a safe point because its watcher has seen enough."""


class StopRequest:
    """Set by a signal; `check` raises at points where stopping is safe."""

    def __init__(self) -> None:
        self.name: str | None = None

    def check(self) -> None:
        if self.name:
            raise Interrupted(self.name)


@contextmanager
def listening() -> Iterator[StopRequest]:
    """Turns SIGINT and SIGTERM into a stop request while the context lasts."""
    request = StopRequest()

    def ask(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        if request.name:
            raise KeyboardInterrupt
        request.name = signal.Signals(number).name

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
