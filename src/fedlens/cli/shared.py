"""The console and the arguments that all commands share."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

PLAIN: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}

# A pipe has no width, and run names are long.
out = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 200)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Config overrides, such as `train.lr=0.01 seed=1`."
    ),
]
Root = Annotated[
    Path, typer.Option("--runs", help="The folder of the runs, or an archive.", show_default="runs")
]
RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="The run's folder, name, or part of its name.")
]
RUNS = Path("runs")


def _load(paths: list[Path] | None) -> list[Path] | None:
    from fedlens.registry import load_plugin

    for path in paths or []:
        load_plugin(path)
    return paths


# Loaded while the command line is parsed, before the command begins.
Plugins = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin",
        metavar="FILE",
        callback=_load,
        help="A Python file with rows of your own; repeatable.",
    ),
]
