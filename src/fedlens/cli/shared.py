"""The console, what programs read from it, and the arguments that all commands share."""

import csv
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
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


def print_json(value: Any) -> None:
    """One JSON document on stdout, in ASCII; infinite numbers, which JSON lacks, become text."""
    print(json.dumps(_finite(value), indent=2, allow_nan=False, default=str))


def print_csv(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """A header and the rows on stdout; what is None is empty."""
    writer = csv.DictWriter(sys.stdout, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


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
