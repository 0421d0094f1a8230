"""For notebooks: commands with live curves, and a folder that outlives the machine.

A cell runs the very command a terminal would, in the notebook's own process: what it makes is in
the run's folder, so the same cell goes on after a disconnect, a restart or another machine.
"""

import contextlib
import importlib.util
import os
import shlex
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import typer
from IPython.display import DisplayHandle, Image, display

from fedlens.cli import app
from fedlens.cli.shared import RUNS
from fedlens.errors import FedlensError
from fedlens.reporting.figures.live import live_png
from fedlens.store.run_folder import RunFolder, runs

EVERY = 2.0  # seconds between two pictures


def home(folder: str = "fedlens", *, mount: str = "/content/drive") -> Path:
    """Goes to the folder where runs are kept, and returns it.

    On Colab it is on the user's Drive, with the cache, so that runs survive the machine; elsewhere
    it is here.
    """
    base = Path.cwd()
    if _on_colab():
        drive = importlib.import_module("google.colab.drive")
        drive.mount(mount)
        base = Path(mount) / "MyDrive"
        os.environ.setdefault("FEDLENS_CACHE", str(base / folder / "cache"))
    found = base / folder
    found.mkdir(parents=True, exist_ok=True)
    os.chdir(found)
    return found


def fedlens(*words: str, live: bool = True) -> None:
    """Runs `fedlens` with these words, and draws curves of the runs it works on while it does.

    A run that was interrupted goes on; one that is finished is not repeated.
    """
    command = typer.main.get_command(app)
    with _live(RUNS) if live else contextlib.nullcontext():
        try:
            command.main(shlex.split(" ".join(words)), prog_name="fedlens", standalone_mode=False)
        except FedlensError as error:  # the way through the package helps nobody
            raise FedlensError(str(error)) from None


def curves(*which: str, root: Path = RUNS) -> Image:
    """Validation accuracy of these runs, each named by a part of its name; of all without any."""
    found = [run for run in runs(root) if not which or any(part in run.name for part in which)]
    if not found:
        raise FedlensError(f"No run in {root} is called like {', '.join(which) or 'anything'}.")
    return Image(data=live_png(found))


def _on_colab() -> bool:
    return bool(importlib.util.find_spec("google") and importlib.util.find_spec("google.colab"))


@contextlib.contextmanager
def _live(root: Path) -> Iterator[None]:
    """Draws what runs below `root` write while the context lasts, and once more at its end."""
    known = {run.name: _length(run) for run in runs(root)}
    over = threading.Event()
    shown: DisplayHandle | None = None
    drawn: dict[str, int] = {}

    def draw() -> None:
        nonlocal shown, drawn
        grown = {run.name: run for run in runs(root) if _length(run) > known.get(run.name, 0)}
        lengths = {name: _length(run) for name, run in grown.items()}
        if not grown or lengths == drawn:
            return
        drawn, image = lengths, Image(data=live_png(list(grown.values())))
        if shown is None:
            shown = display(image, display_id=True)
        else:
            shown.update(image)

    def again_and_again() -> None:
        while not over.wait(EVERY):
            _attempt(draw)

    thread = threading.Thread(target=again_and_again, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        _attempt(draw)


def _attempt(draw: Callable[[], None]) -> None:
    """A picture that fails must not end a run."""
    try:
        draw()
    except Exception as error:
        print(f"no live curves: {error}", file=sys.stderr)


def _length(run: RunFolder) -> int:
    """Of its journal in bytes: it grows while the run does."""
    with contextlib.suppress(OSError):
        return run.journal("metrics").path.stat().st_size
    return 0
