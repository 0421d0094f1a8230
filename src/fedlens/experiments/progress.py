"""Progress for people: a bar on a terminal; where output goes to a file, a line now and then."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from fedlens.experiments.outlook import Outlook, in_words
from fedlens.experiments.signals import StopRequest

Update = Callable[[int, int], None]

EVERY = 15.0  # seconds between two lines in a file

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
def overall(title: str, outlook: Outlook) -> Iterator[None]:
    """Shows while the context lasts how a suite stands: a line for it, and one for each run."""
    console, over = Console(stderr=True), threading.Event()

    def tick(show: Callable[[], None], seconds: float) -> None:
        while not over.wait(seconds):
            show()

    if console.is_terminal:
        with _display(console) as progress:
            show = _bars(title, outlook, progress)
            show()
            yield from _ticking(tick, show, 1.0, over)
    else:
        yield from _ticking(tick, lambda: log.info("%s", summary(title, outlook)), EVERY, over)


def summary(title: str, outlook: Outlook) -> str:
    """One line: runs done of all, which are under way and where, and the time left."""
    now = [
        f"{label}: {done} of {total}" if total else label
        for label, done, total in outlook.underway()
    ]
    said = f"{title}: {outlook.finished} of {len(outlook.weights)} done"
    return ", ".join([said, in_words(outlook.left())]) + "".join(f"; {line}" for line in now)


def _ticking(
    tick: Callable[[Callable[[], None], float], None],
    show: Callable[[], None],
    seconds: float,
    over: threading.Event,
) -> Iterator[None]:
    thread = threading.Thread(target=tick, args=(show, seconds), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _bars(title: str, outlook: Outlook, progress: Progress) -> Callable[[], None]:
    lines: dict[str, TaskID] = {}
    whole = progress.add_task(title, total=len(outlook.weights), left="")

    def show() -> None:
        progress.update(whole, completed=outlook.finished, left=in_words(outlook.left()))
        now = {label: (done, total) for label, done, total in outlook.underway()}
        for label in lines.keys() - now.keys():
            progress.remove_task(lines.pop(label))
        for label, (done, total) in now.items():
            if label not in lines:
                lines[label] = progress.add_task(f"  {label}", total=total or None, left="")
            progress.update(lines[label], completed=done if total else 0)

    return show


@contextmanager
def _shown(title: str) -> Iterator[Update]:
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(title)
        return
    with _display(console) as progress:
        task = progress.add_task(title, total=None)
        try:
            yield lambda done, total: progress.update(task, completed=done, total=total)
        finally:
            progress.remove_task(task)


_live: list[Progress] = []  # a terminal has one display: bars within bars are lines of it


@contextmanager
def _display(console: Console) -> Iterator[Progress]:
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
        if time.monotonic() - said > EVERY:
            said = time.monotonic()
            log.info("%s: %d of %d", title, done, total)

    return update
