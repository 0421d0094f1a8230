"""Suites: a table of runs, declared in YAML. A row is an experiment with overrides, a column more.

`alpha` lists rows whose task vectors are scaled afterwards, as by `fedlens arithmetic alpha`. Runs
are found by what they are, so a suite skips what is finished, continues what was interrupted, and
shares runs with other suites.
"""

import logging
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

import yaml

from fedlens.errors import FedlensError, suggest
from fedlens.experiments.compose import CONFIGS, compose, header, options
from fedlens.experiments.config import Config
from fedlens.experiments.records import RunFolder

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Suite:
    name: str
    documentation: str
    rows: dict[str, str]  # label → experiment and overrides
    columns: dict[str, str]  # label → further overrides
    alpha: list[str]  # labels of rows whose task vectors are scaled afterwards

    def cells(self, overrides: list[str]) -> list["Cell"]:
        """Every run of the table, composed; `overrides` come last and hold for all."""
        found = []
        for row, words in self.rows.items():
            experiment, *own = shlex.split(words)
            for column, more in self.columns.items():
                told = [*own, *shlex.split(more), *overrides]
                found.append(Cell(row, column, compose(experiment, told)))
        return found


@dataclass(frozen=True)
class Cell:
    row: str
    column: str
    config: Config


@dataclass(frozen=True)
class Outcome:
    cell: Cell
    folder: RunFolder | None = None
    failure: str | None = None


def suites() -> list[Suite]:
    return [find(name) for name in options("suite")]


def find(which: str) -> Suite:
    """A suite of ours by name, or anybody's by the path of its YAML file."""
    if which.endswith((".yaml", ".yml")):
        return _read(Path(which), Path(which).stem)
    if which not in options("suite"):
        raise FedlensError(
            f"There is no suite '{which}' (nor a .yaml file): {suggest(which, options('suite'))}"
        )
    return _read(files(CONFIGS).joinpath("suite", f"{which}.yaml"), which)


def play(cells: list[Cell], start: Callable[[Config], RunFolder]) -> Iterator[Outcome]:
    """Starts cell after cell; one that fails is told of and does not stop the others."""
    for number, cell in enumerate(cells, 1):
        log.info("run %d of %d: %s", number, len(cells), _label(cell))
        try:
            yield Outcome(cell, start(cell.config))
        except FedlensError as error:
            log.warning("%s failed: %s", _label(cell), error)
            yield Outcome(cell, failure=str(error))


def _label(cell: Cell) -> str:
    return " ".join(word for word in (cell.row, cell.column) if word)


def _read(path: Path | Traversable, name: str) -> Suite:
    try:
        text = path.read_text(encoding="utf-8")
        told = yaml.safe_load(text)
        rows, columns = told.pop("rows"), told.pop("columns", {"": ""})
        alpha = told.pop("alpha", [])
    except OSError as error:
        raise FedlensError(f"{path} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise FedlensError(
            f"{path} is not a suite: it needs `rows`, each an experiment with overrides."
        ) from error
    if told:
        raise FedlensError(f"{path} has keys a suite does not know: {', '.join(map(str, told))}.")
    if not _of_words(rows) or not _of_words(columns):
        raise FedlensError(f"{path}: rows and columns map a label to words of a command line.")
    if not isinstance(alpha, list) or not all(row in rows for row in alpha):
        raise FedlensError(f"{path}: alpha is a list of labels of its rows.")
    return Suite(name, header(text), rows, columns, alpha)


def _of_words(table: object) -> bool:
    return isinstance(table, dict) and all(
        isinstance(key, str) and isinstance(value, str) for key, value in table.items()
    )
