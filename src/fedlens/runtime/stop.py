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

    def hear(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self.name:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name

    def check(self) -> None:
        if self.name:
            raise Interrupted(self.name)


@contextmanager
def listening() -> Iterator[StopRequest]:
    """Turns SIGINT and SIGTERM into a stop request while the context lasts.

    A request that came after the last check is handed to the context around, if there is one.
    """
    request = StopRequest()
    before = {
        number: signal.signal(number, request.hear) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        around = getattr(before[signal.SIGINT], "__self__", None)
        if isinstance(around, StopRequest):
            around.name = around.name or request.name
