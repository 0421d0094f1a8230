"""How a suite stands, for people: a bar for it and one for each run, or a line now and then."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, TaskID

from fedlens.runtime.progress import LINE_INTERVAL_S, display
from fedlens.suites.eta import Outlook

log = logging.getLogger(__name__)


@contextmanager
def overall(title: str, outlook: Outlook) -> Iterator[None]:
    """Shows while the context lasts how a suite stands: a line for it, and one for each run."""
    console, over = Console(stderr=True), threading.Event()

    def tick(show: Callable[[], None], seconds: float) -> None:
        while not over.wait(seconds):
            show()

    if console.is_terminal:
        with display(console) as progress:
            show = _bars(title, outlook, progress)
            show()
            yield from _ticking(tick, show, 1.0, over)
    else:
        yield from _ticking(
            tick, lambda: log.info("%s", summary(title, outlook)), LINE_INTERVAL_S, over
        )


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


def in_words(seconds: float | None) -> str:
    if seconds is None:
        return "time left not known yet"
    if not seconds:
        return "nothing left"
    if seconds < 60:
        return "less than a minute left"
    minutes = round(seconds / 60)
    return f"about {minutes} min left" if minutes < 120 else f"about {minutes / 60:.1f} h left"
