"""The console, what programs read from it, and the arguments that all commands share."""

import csv
import inspect
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, get_type_hints
from unicodedata import category

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand
from typer.models import ArgumentInfo, CommandFunctionType

from fedlens.errors import FedlensError, shown

FIELD = re.compile(r"(\w*:)\s*(.*)")  # of an experiment's or a suite's documentation
EMPTY_OPTION = re.compile(r"--[\w-]+=\s*")
PLAIN: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}

# A pipe has no width, and run names are long.
out = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 200)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Settings to change, such as `train.lr=0.01 seed=1`."
    ),
]
# Of a run that has begun: only where its data and weights lie, and how it computes, may change.
RuntimeOverrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Settings that may differ from the run's, such as `data.root=/content/data`.",
    ),
]
Root = Annotated[Path, typer.Option("--runs", help="The folder of the runs.")]
RootOrArchive = Annotated[
    Path, typer.Option("--runs", help="The folder of the runs, or an archive of records.")
]
RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="The run's id from `fedlens ls`, its name or its folder. A part of a name finds the "
        "newest run that matches.",
    ),
]
RUNS = Path("runs")


class Command(TyperCommand):
    """A command whose arguments keep their help texts: click 8.5 drops those of typer 0.20."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if self.callback is None:
            return
        hints = get_type_hints(inspect.unwrap(self.callback), include_extras=True)
        for parameter in self.params:
            for info in getattr(hints.get(parameter.name or ""), "__metadata__", ()):
                if isinstance(info, ArgumentInfo):
                    parameter.help = info.help


class Commands(typer.Typer):
    """Commands with help texts for all of their arguments."""

    def command(  # type: ignore[override]  # of typer's many options, those that are used
        self, name: str | None = None
    ) -> Callable[[CommandFunctionType], CommandFunctionType]:
        return super().command(name, cls=Command)


def check_words(words: Sequence[str]) -> None:
    """Refuses what is no name, path or value: an empty path would be the folder of the shell."""
    for number, (before, word) in enumerate(pairwise(["", *words]), start=1):
        place = f"Argument {number} of the command"
        if not word.strip() or EMPTY_OPTION.fullmatch(word):
            option = before if before.startswith("--") and not word.strip() else word.split("=")[0]
            raise FedlensError(
                f"{option.strip() or place} has no value ('{shown(word)}'): write one, or leave it "
                "out."
            )
        if any(category(char) in ("Cc", "Cs") for char in word):
            raise FedlensError(
                f"{place} has control characters or is not text ('{shown(word)}'): write it "
                "without them."
            )


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


def print_entries(entries: Iterable[tuple[str, str]]) -> None:
    """Print names and their documentation: a summary, then fields such as `cost:`."""
    for name, documentation in entries:
        summary, _, fields = documentation.partition("\n\n")
        out.print(Text(name, style="bold"))
        out.print(Text(" ".join(summary.split())), width=_entry_width())
        grid = Table.grid(padding=(0, 1))
        for field, text in _fields(fields):
            grid.add_row(field, Text(text, overflow="fold"))
        out.print(grid, width=_entry_width())
        out.print()


def _entry_width() -> int:
    return min(out.width, 100)


def _fields(text: str) -> Iterator[tuple[str, str]]:
    """("cost:", text), …; every command has a line of its own, other fields are one paragraph."""
    field, lines = "", list[str]()
    for line in [*text.splitlines(), ":"]:
        match = FIELD.fullmatch(line)
        if not match:
            lines.append(line.strip())
            continue
        if field == "command:":
            yield from zip([field, *[""] * len(lines)], lines, strict=False)
        elif field:
            yield field, " ".join(lines)
        field, lines = match[1], [match[2]]


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
        help="A Python file with methods of your own; repeatable.",
    ),
]
