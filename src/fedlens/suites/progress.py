"""The progress of a suite: a bar for it and one for each active run, or log lines at intervals."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, TaskID

from fedlens.runtime.progress import LINE_INTERVAL_S, display
from fedlens.runtime.units import duration_text
from fedlens.suites.eta import Eta

log = logging.getLogger(__name__)

REFRESH_S = 1.0  # of the bars on a terminal


@contextmanager
def suite_progress(title: str, eta: Eta) -> Iterator[None]:
    """Show the progress of a suite while the context lasts."""
    console = Console(stderr=True)
    if console.is_terminal:
        with display(console) as progress:
            update = _bars(title, eta, progress)
            update()
            with _repeating(update, REFRESH_S):
                yield
    else:
        with _repeating(lambda: log.info("%s", summary(title, eta)), LINE_INTERVAL_S):
            yield


def summary(title: str, eta: Eta) -> str:
    """One line: jobs done of all, the time left, and the position of every active one."""
    state = f"{title}: {eta.finished} of {eta.count} done"
    active = [
        f"{label}: {done} of {total}" if total else label for label, done, total in eta.active()
    ]
    return "; ".join([f"{state}, {time_left_text(eta.seconds_left())}", *active])


@contextmanager
def _repeating(update: Callable[[], None], seconds: float) -> Iterator[None]:
    """Call `update` at this interval, in another thread."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(seconds):
            update()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _bars(title: str, eta: Eta, progress: Progress) -> Callable[[], None]:
    bars: dict[str, TaskID] = {}
    suite = progress.add_task(title, total=eta.count, left="")

    def update() -> None:
        left = time_left_text(eta.seconds_left())
        progress.update(suite, completed=eta.finished, total=eta.count, left=left)
        active = {label: (done, total) for label, done, total in eta.active()}
        for label in bars.keys() - active.keys():
            progress.remove_task(bars.pop(label))
        for label, (done, total) in active.items():
            if label not in bars:
                bars[label] = progress.add_task(f"  {label}", total=total or None, left="")
            progress.update(bars[label], completed=done if total else 0)

    return update


def time_left_text(seconds: float | None) -> str:
    if seconds is None:
        return "time left not known yet"
    if not seconds:
        return "nothing left"
    return "less than a minute left" if seconds < 60 else f"about {duration_text(seconds)} left"
