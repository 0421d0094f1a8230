"""Suites: tables of runs declared in YAML, and studies made of several tables.

A row is an experiment with overrides, a column adds overrides; `common` overrides hold for all runs
unless a row or column changes them. A section is another suite, named or written in place, with
overrides for all its runs. `analyses` are `fedlens arithmetic` commands for finished runs of rows.
`plugins` are Python files with rows of one's own, relative to the suite's file. `budget` says how
the study is planned into a given time, `contrasts` which pairs of cells the study compares; those
of a section are not used.
"""

import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException

from fedlens import plugins, yaml_reader
from fedlens.config.compose import changed, compose, load_plugins
from fedlens.config.options import PRESETS, groups, header, options
from fedlens.config.schema import ROW_KEYS, Config
from fedlens.errors import FedlensError, shown, suggest
from fedlens.registry import REGISTRIES
from fedlens.suites.budget_rules import BudgetRules
from fedlens.suites.budget_rules import parse as parse_budget

SLASH = " / "  # between the parts of a label
MAX_SEEDS = 10_000
KEYS = (
    "common",
    "sections",
    "seeds",
    "rows",
    "columns",
    "analyses",
    "plugins",
    "budget",
    "contrasts",
)


@dataclass(frozen=True)
class Cell:
    """One run of a suite, at one seed."""

    section: str  # "" where the suite is one table; "outer / inner" for nested sections
    row: str
    column: str
    config: Config
    arguments: list[str]  # of `fedlens run`: the experiment and its overrides
    analyses: list[str]  # `fedlens arithmetic` commands for the finished run

    @property
    def label(self) -> str:
        return _label(self.section, self.row, self.column)


@dataclass(frozen=True)
class Suite:
    name: str
    documentation: str
    rows: dict[str, str] = field(default_factory=dict)  # label → experiment and overrides
    columns: dict[str, str] = field(default_factory=lambda: {"": ""})  # label → more overrides
    analyses: dict[str, list[str]] = field(default_factory=dict)  # command → labels of rows
    seeds: int | None = None  # how many, unless the command line says it
    sections: dict[str, tuple["Suite", list[str]]] = field(default_factory=dict)
    common: str = ""  # overrides of all runs, before those of rows and columns
    budget: BudgetRules = field(default_factory=BudgetRules)  # how it is planned into a given time
    contrasts: dict[str, tuple[str, str]] = field(default_factory=dict)  # question → two cells

    def cells(self, overrides: Sequence[str] = (), *, seeds: int | None = None) -> list[Cell]:
        """All runs, composed: the whole study at its first seed, then at the next.

        `overrides` come last and hold for all runs; `seed=N` among them is the first seed.
        """
        if any(override.partition("=")[0] == "run.name" for override in overrides):
            raise FedlensError(
                "run.name would give all runs of the suite the same name: leave it out, or set "
                "run.root to choose another folder."
            )
        cells = list(self._cells("", [], list(overrides), None))
        counts = [seeds or own_seeds or 1 for _, own_seeds in cells]
        return [
            _with_seed(cell, number)
            for number in range(max(counts))
            for (cell, _), count in zip(cells, counts, strict=True)
            if number < count
        ]

    def labels(self, section: str = "") -> Iterator[str]:
        """The labels of all cells, without composing them."""
        for row in self.rows:
            for column in self.columns:
                yield _label(section, row, column)
        for label, (suite, _) in self.sections.items():
            yield from suite.labels(_label(section, label))

    def _cells(
        self, section: str, first: list[str], last: list[str], seeds: int | None
    ) -> Iterator[tuple[Cell, int | None]]:
        """Cells at their first seed, and how many seeds the innermost suite that sets it has."""
        seeds, first = self.seeds or seeds, [*first, *shlex.split(self.common)]
        for row, words in self.rows.items():
            experiment, *own = shlex.split(words)
            analyses = [command for command, labels in self.analyses.items() if row in labels]
            for column, more in self.columns.items():
                overrides = _merged([*first, *own, *shlex.split(more), *last])
                config = _composed(experiment, tuple(overrides))
                yield Cell(section, row, column, config, [experiment, *overrides], analyses), seeds
        for label, (suite, own_overrides) in self.sections.items():
            inner = _label(section, label)
            yield from suite._cells(inner, first, [*own_overrides, *last], seeds)


def _label(*parts: str) -> str:
    return SLASH.join(filter(None, parts))


def suites() -> list[Suite]:
    return [find(name) for name in options("suite")]


def find(name: str) -> Suite:
    """The suite of that name, or of that YAML file."""
    return _find(name, Path(), ())


def only(cells: Sequence[Cell], texts: Sequence[str]) -> list[Cell]:
    """The cells whose "section / row / column" contains one of the texts; all if there are none.

    A text, or its last part, that is the full name of a section, row or column matches that name
    alone: Nc=1 does not match Nc=10.
    """
    if not texts:
        return list(cells)
    if not (matches := [cell for cell, text in first_match(cells, texts) if text is not None]):
        given = " ".join(texts)
        near = get_close_matches(given, [cell.label for cell in cells], n=1)
        sections = dict.fromkeys(cell.label.split(SLASH)[0] for cell in cells)
        parts = ", ".join(f"'{section}'" for section in sections)
        hint = f"did you mean '{near[0]}'?" if near else f"choose a part of a label, as {parts}."
        raise FedlensError(
            f"--only '{shown(given)}' matches no run: {hint} --dry-run lists all labels."
        )
    return matches


def first_match(cells: Sequence[Cell], texts: Sequence[str]) -> list[tuple[Cell, int | None]]:
    """Each cell with the position of the first text that matches its label, as in `only`."""
    names = {name for cell in cells for name in cell.label.casefold().split(SLASH)}
    wanted = [text.casefold() for text in texts]
    return [
        (cell, next((k for k, text in enumerate(wanted) if _matches(label, text, names)), None))
        for cell in cells
        for label in (cell.label.casefold(),)
    ]


def _matches(label: str, text: str, names: set[str]) -> bool:
    if text in names:
        return text in label.split(SLASH)
    if text.rpartition(SLASH)[2] in names:
        return text + SLASH in label + SLASH
    return text in label


def with_overrides(cell: Cell, config: Config, overrides: Sequence[str]) -> Cell:
    """The cell with another config, which these overrides on top of its own give."""
    experiment, *own = cell.arguments
    return replace(cell, config=config, arguments=[experiment, *_merged([*own, *overrides])])


def _with_seed(cell: Cell, number: int) -> Cell:
    """The cell at its seed plus `number`."""
    seed = cell.config.seed + number
    return with_overrides(cell, replace(cell.config, seed=seed), [f"seed={seed}"])


def _composed(experiment: str, overrides: tuple[str, ...]) -> Config:
    """As `compose`, but presets that many cells share are composed once: a study has hundreds."""
    if experiment in options("experiment"):
        return _cached(experiment, overrides, plugins.state())
    return compose(experiment, list(overrides))  # the file may change between two calls


@cache
def _cached(experiment: str, overrides: tuple[str, ...], loaded: tuple[str, ...]) -> Config:
    # A head that is chosen decides anew whether it is frozen, so it is composed with the presets.
    choices = {*groups(), "head"}
    chosen = tuple(word for word in overrides if word.partition("=")[0] in choices)
    try:
        values = dict(_parse_override(word) for word in overrides if word not in chosen)
        return changed(_base(experiment, chosen, loaded), values)
    except (FedlensError, HydraException):  # `compose` says why, or accepts it as a whole
        return compose(experiment, list(overrides))


@cache
def _base(experiment: str, chosen: tuple[str, ...], loaded: tuple[str, ...]) -> Config:
    del loaded  # a plugin that has changed makes another config
    return compose(experiment, list(chosen))


@cache
def _parse_override(word: str) -> tuple[str, Any]:
    override = OverridesParser.create().parse_override(word)
    if override.type != OverrideType.CHANGE or override.is_sweep_override():
        raise FedlensError(f"'{word}' does not set a key to one value.")
    return override.key_or_group, override.value()


def _merged(overrides: Sequence[str]) -> list[str]:
    """The last override of each key; a row chosen later drops parameters it does not read."""
    merged: dict[str, str] = {}
    for override in overrides:
        key, _, value = override.partition("=")
        if key in ROW_KEYS:
            for other in _parameters_unread(key, value, merged):
                del merged[other]
        merged[key] = override
    return list(merged.values())


def _parameters_unread(key: str, row: str, earlier: dict[str, str]) -> list[str]:
    """Of the keys set earlier, the parameters below `key` that this row does not have."""
    registry = REGISTRIES[ROW_KEYS[key]]
    if (chosen := registry.get(registry.chosen(row)["name"])) is None:
        return []
    read = {f"{key}.{one.name}" for one in chosen.parameters}
    return [other for other in earlier if other.startswith(f"{key}.") and other not in read]


def _find(name: str, folder: Path, parents: tuple[str, ...]) -> Suite:
    """Paths are relative to `folder`; `parents` are the suites that contain this one."""
    if name.endswith((".yaml", ".yml")):
        path = folder / name
        place = os.path.realpath(path)  # as `resolve`, which fails on links in a circle
        return _read(path, path.stem, path.parent, (*parents, place))
    if name not in options("suite"):
        raise FedlensError(
            f"'{name}' is not a known suite, nor a .yaml file: {suggest(name, options('suite'))}"
        )
    preset = files(PRESETS).joinpath("suite", f"{name}.yaml")
    return _read(preset, name, folder, (*parents, name))


def _read(path: Path | Traversable, name: str, folder: Path, chain: tuple[str, ...]) -> Suite:
    if chain[-1] in chain[:-1]:
        raise FedlensError(f"The suite {name} contains itself as a section: remove that section.")
    text = yaml_reader.read_text(path)
    content = yaml_reader.parse(text, str(path))
    return _parse(content, str(path), name, header(text), folder, chain)


def _parse(
    content: Any, where: str, name: str, documentation: str, folder: Path, chain: tuple[str, ...]
) -> Suite:
    """The suite of a YAML file's content; `where` begins the error messages."""
    if not isinstance(content, dict) or not content.keys() & {"rows", "sections"}:
        raise FedlensError(
            f"{where} is not a suite: it needs `rows`, each an experiment with overrides, or "
            "`sections`, each another suite."
        )
    if unknown := [str(key) for key in content if key not in KEYS]:
        raise FedlensError(
            f"{where}: unknown keys {', '.join(unknown)}: a suite has {', '.join(KEYS)}."
        )
    load_plugins(content.get("plugins", []), folder, where)
    rows, columns = content.get("rows", {}), content.get("columns", {"": ""})
    sections, seeds = content.get("sections", {}), content.get("seeds")
    tables = (("rows", rows, _is_command), ("columns", columns, _is_command))
    for key, table, is_value in (*tables, ("sections", sections, _is_section)):
        if key in content and not _is_table(table, is_value):
            raise FedlensError(
                f"{where}: {key} must map labels (text; numbers in quotes) to command-line words "
                "with closed quotes, and have at least one label."
            )
    common = content.get("common", "")
    if "common" in content and not _is_command(common):
        raise FedlensError(f"{where}: common must be key=value overrides with closed quotes.")
    if seeds is not None and (type(seeds) is not int or not 1 <= seeds <= MAX_SEEDS):
        raise FedlensError(
            f"{where}: seeds must be an integer of at most {MAX_SEEDS} and at least 1, not "
            f"{shown(seeds)}."
        )
    analyses = content.get("analyses", {})
    if not isinstance(analyses, dict) or not all(
        _is_command(command) and _are_rows(labels, rows) for command, labels in analyses.items()
    ):
        raise FedlensError(
            f"{where}: analyses must map `fedlens arithmetic` commands to lists of row labels."
        )
    try:
        budget = parse_budget(content["budget"]) if "budget" in content else BudgetRules()
    except FedlensError as error:
        raise FedlensError(f"{where}: the budget is not valid: {error}") from error
    inner_suites: dict[str, tuple[Suite, list[str]]] = {}
    for label, section in sections.items():
        if isinstance(section, dict):
            inner = _parse(section, f"{where}, section {label}", label, "", folder, chain)
            inner_suites[label] = (inner, [])
        else:
            inner_name, *overrides = shlex.split(section)
            inner_suites[label] = (_find(inner_name, folder, chain), overrides)
    rows = {label: _relative_to(folder, words) for label, words in rows.items()}
    made = Suite(name, documentation, rows, columns, analyses, seeds, inner_suites, common, budget)
    return replace(made, contrasts=_contrasts(content.get("contrasts", {}), made, where))


def _contrasts(content: object, suite: Suite, where: str) -> dict[str, tuple[str, str]]:
    """Questions with the labels of two cells of the suite, "section / row / column"."""
    if not content:
        return {}
    if not isinstance(content, dict) or not all(
        isinstance(question, str) and isinstance(pair, list) and len(pair) == 2
        and all(isinstance(label, str) for label in pair)
        for question, pair in content.items()
    ):  # fmt: skip
        raise FedlensError(
            f"{where}: contrasts must map questions to two labels of cells, the first of which is "
            "compared with the second: [section / row / column, section / row / column]."
        )
    known = set(suite.labels())
    for label in (label for pair in content.values() for label in pair):
        if label not in known:
            raise FedlensError(
                f"{where}: contrasts name the cell '{label}', which the suite does not have: "
                f"{suggest(label, known)}"
            )
    return {question: (pair[0], pair[1]) for question, pair in content.items()}


def _is_table(table: object, is_value: Callable[[object], bool]) -> bool:
    return (
        isinstance(table, dict)
        and bool(table)
        and all(isinstance(key, str) and is_value(value) for key, value in table.items())
    )


def _is_section(value: object) -> bool:
    return isinstance(value, dict) or _is_command(value)


def _is_command(value: object) -> bool:
    try:
        return isinstance(value, str) and bool(shlex.split(value))
    except ValueError:  # an unclosed quote
        return False


def _relative_to(folder: Path, words: str) -> str:
    """The path of an experiment file is relative to the suite's folder, as those of sections."""
    experiment, *overrides = shlex.split(words)
    if experiment.endswith((".yaml", ".yml")):
        return shlex.join([str(folder / experiment), *overrides])
    return words


def _are_rows(labels: object, rows: dict[str, str]) -> bool:
    return isinstance(labels, list) and all(
        isinstance(label, str) and label in rows for label in labels
    )
