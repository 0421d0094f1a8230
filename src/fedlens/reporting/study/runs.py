"""Runs read back for a report: what each is, and which differ in their seed alone.

A *method* is a config without its seed, a *setting* the data and the backbone: numbers are averaged
within a method and compared within a setting. Accuracies are in percent from here on.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

import yaml

from fedlens.config.schema import CIRCUMSTANCES, Config, DataConfig
from fedlens.errors import FedlensError
from fedlens.files import read_json
from fedlens.reporting.study.statistics import Estimate, estimate
from fedlens.store.run_folder import RunFolder, find_run, runs

Settings = dict[str, Any]
Record = dict[str, Any]

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same, in C where PyYAML has it
NEEDED = {  # what a report cannot do without
    "manifest": ("inputs", "sessions"),
    "result": ("seed", "unit", "units", "choice", "validation", "facts"),
}


@dataclass(frozen=True)
class Run:
    """A finished run, as its files tell it."""

    folder: RunFolder
    config: Settings
    manifest: Record
    result: Record
    metrics: list[Record]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def test(self) -> float:
        return 100 * float(self.result["test"]["top1"])

    @property
    def validation(self) -> float | None:
        found = self.result["validation"]
        return None if found is None else 100 * float(found["top1"])

    @property
    def chosen_unit(self) -> int:
        """The epoch or round whose parameters met the test split; 0 is the start, untrained."""
        return int(self.result["choice"]["unit"])

    @cached_property
    def masks(self) -> Record | None:
        path = self.folder.path / "masks.json"
        return dict(read_json(path)) if path.exists() else None

    @cached_property
    def analyses(self) -> list[Record]:
        """What was asked of the model afterwards, by the names of the analyses."""
        found = sorted((self.folder.path / "arithmetic").glob("*/record.json"))
        return [dict(read_json(path)) for path in found]

    @property
    def megabytes(self) -> float | None:
        """Sent before and in all rounds, both ways; None where there are no clients."""
        if self.config["federated"]["clients"] is None:
            return None
        return self.megabytes_before + sum(megabytes(record) for record in self.metrics)

    @property
    def megabytes_before(self) -> float:
        """What clients sent before the first round, for a head or a mask."""
        facts = self.result["facts"].items()
        return sum(float(value) for name, value in facts if name.endswith("_bytes_up")) / 1e6


@dataclass(frozen=True)
class Method:
    """Runs that differ in their seed alone, by seed."""

    runs: tuple[Run, ...]

    @property
    def config(self) -> Settings:
        return self.runs[0].config

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run.seed for run in self.runs)

    @cached_property
    def test(self) -> Estimate:
        return estimate([run.test for run in self.runs])

    @cached_property
    def validation(self) -> float | None:
        """Their mean accuracy on validation, by which methods are chosen."""
        found = [run.validation for run in self.runs]
        known = [value for value in found if value is not None]
        return sum(known) / len(known) if known and len(known) == len(found) else None

    def by_seed(self) -> dict[int, float]:
        return {run.seed: run.test for run in self.runs}

    def get(self, key: str) -> Any:
        """The value of a dotted key of the config."""
        return value_of(self.config, key)


@dataclass(frozen=True)
class Study:
    """All that was found: methods by setting, and what is not finished."""

    settings: dict[str, list[Method]]
    unfinished: dict[str, str]  # name of a run → its state

    @property
    def methods(self) -> list[Method]:
        return [method for methods in self.settings.values() for method in methods]

    @property
    def runs(self) -> list[Run]:
        return [run for method in self.methods for run in method.runs]


def read(places: Iterable[Path]) -> Study:
    """Every run that a path names or holds; those without a test result are only counted."""
    folders: dict[str, RunFolder] = {}
    for folder in (RunFolder(found.path.resolve()) for at in places for found in _folders(at)):
        other = folders.setdefault(folder.name, folder)
        if other != folder:
            both = " and ".join(sorted((str(other.path), str(folder.path))))
            raise FedlensError(f"{both} are the same run twice: leave one of them out.")
    unfinished: dict[str, str] = {}
    found: list[Run] = []
    for name, folder in sorted(folders.items()):
        result = folder.result
        if result is None:
            unfinished[name] = folder.state()
        elif result.get("test") is not None:  # else it was made to choose by, on validation alone
            found.append(_read(folder, result))
    if not found:
        raise FedlensError("There is no finished run to report on: see `fedlens ls`.")
    grouped: dict[tuple[str, str], list[Run]] = {}
    for run in found:
        grouped.setdefault((setting(run.config), identity(run.config)), []).append(run)
    settings: dict[str, list[Method]] = {}
    for (where, _), alike in sorted(grouped.items()):
        ordered = tuple(sorted(alike, key=lambda run: (run.seed, run.name)))
        settings.setdefault(where, []).append(Method(ordered))
    return Study(settings, unfinished)


def setting(config: Settings) -> str:
    """The data and the backbone: what must agree before two numbers are compared."""
    data, backbone = config["data"], config["backbone"]
    few, cut, held = data["train_per_class"], data["test_per_class"], data["validation"]
    words = [
        data["name"],
        *([f"{few} images a class"] if few else []),
        *([f"{cut} test images a class"] if cut else []),
        *([f"validation {held:g}"] if held != DataConfig.validation else []),
        f"{backbone['name']} at {backbone['resolution']} px",
        *([] if backbone["pretrained"] else ["from scratch"]),
    ]
    return ", ".join(words)


def identity(config: Settings, without: Iterable[str] = ()) -> str:
    """What decides a result, but for the seed and the dotted keys left out."""
    backbone = config["backbone"]
    named = PurePath(backbone["weights"] or "").name  # the same file may lie elsewhere
    movable = {**config, "backbone": {**backbone, "weights": named}}
    return json.dumps(_pruned(movable, {*CIRCUMSTANCES, "seed", *without}), sort_keys=True)


def value_of(config: Mapping[str, Any], key: str) -> Any:
    found: Any = config
    for step in key.split("."):
        found = found[step]
    return found


def megabytes(record: Record) -> float:
    """Sent in a round, both ways."""
    return float(record.get("bytes_up", 0) + record.get("bytes_down", 0)) / 1e6


def _pruned(tree: Settings, left_out: set[str], prefix: str = "") -> Settings:
    return {
        key: _pruned(value, left_out, f"{prefix}{key}.") if isinstance(value, dict) else value
        for key, value in tree.items()
        if prefix + key not in left_out
    }


def _folders(place: Path) -> list[RunFolder]:
    if (place / "config.yaml").exists():
        return [RunFolder(place)]
    if not place.is_dir():
        return [find_run(str(place), Path("runs"))]
    if not (found := runs(place)):
        raise FedlensError(f"There are no runs in {place}: name runs, or a folder that holds some.")
    return found


def _read(folder: RunFolder, result: Record) -> Run:
    try:
        told = yaml.load(folder.config.read_text(encoding="utf-8"), LOADER)
        config = _filled(told, asdict(Config()))  # a key that is younger than the run
        manifest, metrics = folder.manifest, folder.journal("metrics").read()
        _refuse_parts({"manifest": manifest, "result": result}, metrics)
        run = Run(folder, config, manifest or {}, result, metrics)
        _ = setting(config), run.test, run.seed, run.manifest["sessions"][0]
        return run
    except (OSError, yaml.YAMLError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise FedlensError(f"{folder.path} is not a whole run ({error}): leave it out.") from error


def _refuse_parts(files: Mapping[str, Record | None], metrics: list[Record]) -> None:
    for name, found in files.items():
        if found is None:
            raise ValueError(f"there is no {name}.json")
        if lacking := [key for key in NEEDED[name] if key not in found]:
            raise ValueError(f"{name}.json lacks {', '.join(lacking)}")
    if not metrics:
        raise ValueError("metrics.jsonl has no record")


def _filled(told: Settings, defaults: Settings) -> Settings:
    nested = {key: told.get(key, {}) for key, value in defaults.items() if isinstance(value, dict)}
    return {**defaults, **told} | {
        key: _filled(told_there, defaults[key]) for key, told_there in nested.items()
    }
