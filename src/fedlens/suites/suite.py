"""Suites: tables of runs declared in YAML, and studies made of several such tables.

A row is an experiment with overrides, a column more; `common` are overrides of all runs, which rows
and columns may change. A section is another suite with words for all its runs, or one written out
in its place. `analyses` are words of `fedlens arithmetic`, asked of the rows they list afterwards.
Runs are found by what they are: suites share them, skip what is finished and continue the rest.
"""

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException

from fedlens.config.compose import changed, compose
from fedlens.config.options import CONFIGS, groups, header, options
from fedlens.config.schema import Config
from fedlens.errors import FedlensError, suggest

SLASH = " / "  # between the parts of a label


@dataclass(frozen=True)
class Cell:
    """One run and where it stands: in which section, row and column, under which seed."""

    section: str  # "" where the suite is one table; of sections in sections: "outer / inner"
    row: str
    column: str
    config: Config
    words: list[str]  # the experiment and overrides that give the config
    analyses: list[str]  # what is asked of the run when it is finished

    @property
    def label(self) -> str:
        return SLASH.join(filter(None, (self.section, self.row, self.column)))


@dataclass(frozen=True)
class Suite:
    name: str
    documentation: str
    rows: dict[str, str] = field(default_factory=dict)  # label → experiment and overrides
    columns: dict[str, str] = field(default_factory=lambda: {"": ""})  # label → further overrides
    analyses: dict[str, list[str]] = field(default_factory=dict)  # words → labels of rows
    seeds: int | None = None  # how many, where the command does not say
    sections: dict[str, tuple["Suite", list[str]]] = field(default_factory=dict)
    common: str = ""  # overrides of all runs, before those of rows and columns

    def cells(self, overrides: Sequence[str] = (), *, seeds: int | None = None) -> list[Cell]:
        """Every run, composed: the whole study at its first seed, then at the next.

        `overrides` come last and hold for all; a seed among them is the first one.
        """
        if any(word.partition("=")[0] == "run.name" for word in overrides):
            raise FedlensError(
                "run.name would make all runs of the suite one: leave it out, and say run.root "
                "for another folder."
            )
        found = list(self._cells("", [], list(overrides), None))
        counts = [seeds or told or 1 for _, told in found]
        return [
            _reseeded(cell, number)
            for number in range(max(counts))
            for (cell, _), count in zip(found, counts, strict=True)
            if number < count
        ]

    def _cells(
        self, section: str, first: list[str], last: list[str], told: int | None
    ) -> Iterator[tuple[Cell, int | None]]:
        """Cells at their first seed, and how many seeds were told: the nearest one told counts."""
        told, first = self.seeds or told, [*first, *shlex.split(self.common)]
        for row, words in self.rows.items():
            experiment, *own = shlex.split(words)
            asked = [analysis for analysis, labels in self.analyses.items() if row in labels]
            for column, more in self.columns.items():
                said = _last_of_each([*first, *own, *shlex.split(more), *last])
                config = _composed(experiment, tuple(said))
                yield Cell(section, row, column, config, [experiment, *said], asked), told
        for label, (suite, more_words) in self.sections.items():
            where = SLASH.join(filter(None, (section, label)))
            yield from suite._cells(where, first, [*more_words, *last], told)


def suites() -> list[Suite]:
    return [find(name) for name in options("suite")]


def find(which: str) -> Suite:
    """A suite of ours by name, or anybody's by the path of its YAML file."""
    return _find(which, Path(), ())


def only(cells: Sequence[Cell], texts: Sequence[str]) -> list[Cell]:
    """Those whose "section / row / column" contains one of the texts; all if there are none.

    A text, or the last part of one, that is the whole name of a part somewhere stands for that
    alone: Nc=1 is not Nc=10.
    """
    if not texts:
        return list(cells)
    names = {name for cell in cells for name in cell.label.casefold().split(SLASH)}
    wanted = [text.casefold() for text in texts]
    found = [
        cell for cell in cells if any(_fits(cell.label.casefold(), text, names) for text in wanted)
    ]
    if not found:
        labels = ", ".join(f"'{label}'" for label in dict.fromkeys(c.label for c in cells))
        raise FedlensError(f"--only {' '.join(texts)} fits no run: there are {labels}.")
    return found


def _fits(label: str, text: str, names: set[str]) -> bool:
    if text in names:
        return text in label.split(SLASH)
    if text.rpartition(SLASH)[2] in names:
        return text + SLASH in label + SLASH
    return text in label


def _reseeded(cell: Cell, number: int) -> Cell:
    seed = cell.config.seed + number
    words = _last_of_each([*cell.words[1:], f"seed={seed}"])
    config = replace(cell.config, seed=seed)
    return replace(cell, config=config, words=[cell.words[0], *words])


def _composed(experiment: str, words: tuple[str, ...]) -> Config:
    """As `compose` does, but what cells have in common is composed once: a study has hundreds."""
    if experiment in options("experiment"):
        return _shared(experiment, words)
    return compose(experiment, list(words))  # a file may say something else the next time


@cache
def _shared(experiment: str, words: tuple[str, ...]) -> Config:
    chosen = tuple(word for word in words if word.partition("=")[0] in groups())
    try:
        values = dict(_told(word) for word in words if word not in chosen)
        return changed(_base(experiment, chosen), values)
    except (FedlensError, HydraException):  # refused in better words, or fine only as a whole
        return compose(experiment, list(words))


@cache
def _base(experiment: str, chosen: tuple[str, ...]) -> Config:
    return compose(experiment, list(chosen))


@cache
def _told(word: str) -> tuple[str, Any]:
    found = OverridesParser.create().parse_override(word)
    if found.type != OverrideType.CHANGE or found.is_sweep_override():
        raise FedlensError(f"'{word}' does not give a key a value.")
    return found.key_or_group, found.value()


def _last_of_each(words: Sequence[str]) -> list[str]:
    """Of two words for one key the later one holds."""
    return list({word.partition("=")[0]: word for word in words}.values())


def _find(which: str, folder: Path, within: tuple[str, ...]) -> Suite:
    """`folder` is where paths begin, `within` the suites this one is a section of."""
    if which.endswith((".yaml", ".yml")):
        path = folder / which
        return _read(path, path.stem, path.parent, (*within, str(path.resolve())))
    if which not in options("suite"):
        raise FedlensError(
            f"There is no suite '{which}' (nor a .yaml file): {suggest(which, options('suite'))}"
        )
    packaged = files(CONFIGS).joinpath("suite", f"{which}.yaml")
    return _read(packaged, which, folder, (*within, which))


def _read(path: Path | Traversable, name: str, folder: Path, chain: tuple[str, ...]) -> Suite:
    if chain[-1] in chain[:-1]:
        raise FedlensError(f"The suite {name} has itself as a section: take that section out.")
    try:
        text = path.read_text(encoding="utf-8")
        told: Any = yaml.safe_load(text)
    except OSError as error:
        raise FedlensError(f"{path} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise FedlensError(f"{path} is not a suite: it is not YAML.") from error
    return _parsed(told, str(path), name, header(text), folder, chain)


def _parsed(
    told: Any, where: str, name: str, documentation: str, folder: Path, chain: tuple[str, ...]
) -> Suite:
    """What YAML says, checked; `where` it says so begins a complaint."""
    if not isinstance(told, dict) or not told.keys() & {"rows", "sections"}:
        raise FedlensError(
            f"{where} is not a suite: it needs `rows`, each an experiment with overrides, or "
            "`sections`, each another suite."
        )
    known = ("common", "sections", "seeds", "rows", "columns", "analyses")
    if unknown := [str(key) for key in told if key not in known]:
        raise FedlensError(f"{where} has keys a suite does not know: {', '.join(unknown)}.")
    rows, columns = told.get("rows", {}), told.get("columns", {"": ""})
    sections, seeds = told.get("sections", {}), told.get("seeds")
    tables = (("rows", rows, _is_words), ("columns", columns, _is_words))
    for key, table, fits in (*tables, ("sections", sections, _is_section)):
        if key in told and not _of_labels(table, fits):
            raise FedlensError(
                f"{where}: {key} map at least one label, a text (a number in quotes), to words of "
                "a command line, with quotes in pairs."
            )
    common = told.get("common", "")
    if "common" in told and not _is_words(common):
        raise FedlensError(f"{where}: common is key=value words, with quotes in pairs.")
    if seeds is not None and (type(seeds) is not int or seeds < 1):
        raise FedlensError(f"{where}: seeds is a whole number of at least 1, not {seeds}.")
    analyses = told.get("analyses", {})
    if not isinstance(analyses, dict) or not all(
        _is_words(words) and _of_rows(asked, rows) for words, asked in analyses.items()
    ):
        raise FedlensError(
            f"{where}: analyses map words of `fedlens arithmetic` to a list of labels of its rows."
        )
    found: dict[str, tuple[Suite, list[str]]] = {}
    for label, section in sections.items():
        if isinstance(section, dict):
            inner = _parsed(section, f"{where}, section {label}", label, "", folder, chain)
            found[label] = (inner, [])
        else:
            which, *rest = shlex.split(section)
            found[label] = (_find(which, folder, chain), rest)
    rows = {label: _beside(words, folder) for label, words in rows.items()}
    return Suite(name, documentation, rows, columns, analyses, seeds, found, common)


def _of_labels(table: object, fits: Callable[[object], bool]) -> bool:
    return (
        isinstance(table, dict)
        and bool(table)
        and all(isinstance(key, str) and fits(value) for key, value in table.items())
    )


def _is_section(value: object) -> bool:
    return isinstance(value, dict) or _is_words(value)


def _is_words(value: object) -> bool:
    try:
        return isinstance(value, str) and bool(shlex.split(value))
    except ValueError:  # a quote that is not closed
        return False


def _beside(words: str, folder: Path) -> str:
    """An experiment that is a file lies beside the suite, as sections do."""
    experiment, *rest = shlex.split(words)
    if experiment.endswith((".yaml", ".yml")):
        return shlex.join([str(folder / experiment), *rest])
    return words


def _of_rows(asked: object, rows: dict[str, str]) -> bool:
    return isinstance(asked, list) and all(row in rows for row in asked)
