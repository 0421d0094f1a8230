"""Progress bars on a terminal; log lines at intervals where the output is a file."""

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
def progress_bar(title: str, stop: StopRequest) -> Iterator[Update]:
    """Yield `update(done, total)`, which shows progress and raises if a stop was requested."""
    with _display_or_log(title) as show:

        def update(done: int, total: int) -> None:
            show(done, total)
            stop.check()

        yield update


@contextmanager
def _display_or_log(title: str) -> Iterator[Update]:
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


_live: list[Progress] = []  # a terminal has one display: nested bars are further lines of it


@contextmanager
def display(console: Console) -> Iterator[Progress]:
    """The terminal's display, shared by nested bars; a task may set its time left as `left`."""
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
    """The time left that the task states in its field `left`, else an estimate from its speed."""

    def render(self, task: Task) -> Text:
        left = task.fields.get("left")
        return super().render(task) if left is None else Text(left)


def _lines(title: str) -> Update:
    last_line = time.monotonic()

    def update(done: int, total: int) -> None:
        nonlocal last_line
        if time.monotonic() - last_line > LINE_INTERVAL_S:
            last_line = time.monotonic()
            log.info("%s: %d of %d", title, done, total)

    return update
