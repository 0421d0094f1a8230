"""Progress for people: a bar on a terminal; where output goes to a file, a line now and then."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from fedlens.runtime.stop import StopRequest

Update = Callable[[int, int], None]

LINE_INTERVAL_S = 15.0  # seconds between two lines in a file

log = logging.getLogger(__name__)


@contextmanager
def bar(title: str, stop: StopRequest) -> Iterator[Update]:
    """Yields `update(done, total)`: it shows progress, and lets a stop request come through."""
    with _shown(title) as show:

        def update(done: int, total: int) -> None:
            show(done, total)
            stop.check()

        yield update


@contextmanager
def _shown(title: str) -> Iterator[Update]:
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(title)
        return
    with display(console) as progress:
        task = progress.add_task(title, total=None)
        try:
            yield lambda done, total: progress.update(task, completed=done, total=total)
        finally:
            progress.remove_task(task)


_live: list[Progress] = []  # a terminal has one display: bars within bars are lines of it


@contextmanager
def display(console: Console) -> Iterator[Progress]:
    """The terminal's one display; a task may say its time left in a field `left`."""
    if _live:
        yield _live[0]
        return
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _TimeLeft()]
    with Progress(*columns, console=console, transient=True) as progress:
        _live.append(progress)
        try:
            yield progress
        finally:
            _live.clear()


class _TimeLeft(TimeRemainingColumn):
    """What a line was told of its time left, else what its bar's speed says."""

    def render(self, task: Task) -> Text:
        told = task.fields.get("left")
        return super().render(task) if told is None else Text(told)


def _lines(title: str) -> Update:
    said = time.monotonic()

    def update(done: int, total: int) -> None:
        nonlocal said
        if time.monotonic() - said > LINE_INTERVAL_S:
            said = time.monotonic()
            log.info("%s: %d of %d", title, done, total)

    return update
