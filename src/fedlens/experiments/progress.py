"""Progress for people: a bar on a terminal, a line per quarter where output goes to a file."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Update = Callable[[int, int], None]

log = logging.getLogger(__name__)


@contextmanager
def bar(title: str) -> Iterator[Update]:
    """Yields `update(done, total)`."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _quarters(title)
        return
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _quarters(title: str) -> Update:
    shown = 0

    def update(done: int, total: int) -> None:
        nonlocal shown
        quarter = 4 * done // total
        if quarter > shown:
            shown = quarter
            log.info("%s: %d of %d", title, done, total)

    return update
