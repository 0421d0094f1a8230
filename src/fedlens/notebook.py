"""For notebooks: commands with live learning curves, and a folder of runs on Google Drive.

A cell runs the same command as a terminal, in the notebook's process. Results are in the run's
folder, so the same cell resumes after a disconnect, a restart or on another machine.
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
from fedlens.runtime.shared_machine import choose_waiting
from fedlens.store.run_folder import RunFolder, runs

UPDATE_S = 2.0  # between two pictures


def home(folder: str = "fedlens", *, mount: str = "/content/drive") -> Path:
    """Changes to the folder that holds the runs, and returns it.

    On Colab it is on the user's Drive, with the cache, so that runs outlive the machine; elsewhere
    it is in the current folder.
    """
    base = Path.cwd()
    if _on_colab():
        drive = importlib.import_module("google.colab.drive")
        drive.mount(mount)
        base = Path(mount) / "MyDrive"
        os.environ.setdefault("FEDLENS_CACHE", str(base / folder / "cache"))
    path = base / folder
    path.mkdir(parents=True, exist_ok=True)
    os.chdir(path)
    return path


def fedlens(*arguments: str, live: bool = True) -> None:
    """Runs the command `fedlens` with these arguments and draws learning curves meanwhile.

    An interrupted run is resumed; a finished one is not repeated.
    """
    choose_waiting()  # has an effect unless a cell has loaded torch
    command = typer.main.get_command(app)
    with _live(RUNS) if live else contextlib.nullcontext():
        try:
            command.main(
                shlex.split(" ".join(arguments)), prog_name="fedlens", standalone_mode=False
            )
        except FedlensError as error:  # without the traceback through the package
            raise FedlensError(str(error)) from None


def curves(*which: str, root: Path = RUNS) -> Image:
    """Validation accuracy of the runs whose names contain one of these parts; of all by default."""
    chosen = [run for run in runs(root) if not which or any(part in run.name for part in which)]
    if not chosen:
        names = f" with {' or '.join(which)} in its name" if which else ""
        raise FedlensError(f"There is no run{names} in {root}: see `fedlens ls`.")
    return Image(data=live_png(chosen))


def _on_colab() -> bool:
    return bool(importlib.util.find_spec("google") and importlib.util.find_spec("google.colab"))


@contextlib.contextmanager
def _live(root: Path) -> Iterator[None]:
    """Draws the progress of the runs in `root` until the context ends, and once more then."""
    known = {run.name: _length(run) for run in runs(root)}
    finished = threading.Event()
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

    def draw_repeatedly() -> None:
        while not finished.wait(UPDATE_S):
            _attempt(draw)

    thread = threading.Thread(target=draw_repeatedly, daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()
        _attempt(draw)


def _attempt(draw: Callable[[], None]) -> None:
    """Draws; an error must not end a run."""
    try:
        draw()
    except Exception as error:
        print(f"no live curves: {error}", file=sys.stderr)


def _length(run: RunFolder) -> int:
    """Bytes of its journal, which grows with the run."""
    with contextlib.suppress(OSError):
        return run.journal("metrics").path.stat().st_size
    return 0
