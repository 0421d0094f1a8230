"""Ctrl-C and SIGTERM as a request: the current step is finished and saved before the process stops.

A second signal stops it at once.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(Exception):
    """Work stopped at a safe point, on request of the user or the system."""


class Abandoned(Interrupted):
    """Work stopped at a safe point, on request of the function that watches it."""


class StopRequest:
    """Set by a signal; `check` raises `Interrupted` where stopping is safe."""

    def __init__(self) -> None:
        self.name: str | None = None  # of the signal

    def handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self.name:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name

    def check(self) -> None:
        if self.name:
            raise Interrupted(self.name)


_listening: list[StopRequest] = []  # signals are the process's own, so these contexts are nested


def current() -> StopRequest:
    """The request of the innermost `listening`; one that is never set where nothing listens."""
    return _listening[-1] if _listening else StopRequest()


@contextmanager
def listening() -> Iterator[StopRequest]:
    """Turn SIGINT and SIGTERM into a stop request while the context lasts.

    A request that arrives after the last check is passed to the enclosing context, if any.
    """
    request = StopRequest()
    before = {
        number: signal.signal(number, request.handle) for number in (signal.SIGINT, signal.SIGTERM)
    }
    _listening.append(request)
    try:
        yield request
    finally:
        _listening.remove(request)
        for number, handler in before.items():
            signal.signal(number, handler)
        enclosing = getattr(before[signal.SIGINT], "__self__", None)
        if isinstance(enclosing, StopRequest):
            enclosing.name = enclosing.name or request.name
