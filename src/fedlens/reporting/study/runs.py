"""Runs read from disk for a report, grouped into methods and settings.

A *method* is a config without its seed, a *setting* is the data and the backbone: numbers are
averaged within a method and compared within a setting. Accuracies are in percent from here on.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

from fedlens.config.schema import RUNTIME_KEYS, Config
from fedlens.errors import FedlensError
from fedlens.registry import backbone as backbones
from fedlens.registry import dataset
from fedlens.reporting.study.statistics import Estimate, estimate
from fedlens.store.records import read_record
from fedlens.store.run_folder import SHAPE_ERRORS, RunFolder, find_runs, runs

log = logging.getLogger(__name__)

Settings = dict[str, Any]
Record = dict[str, Any]

REQUIRED = {  # keys that a report reads
    "manifest": ("inputs", "sessions"),
    "result": ("seed", "unit", "units", "choice", "validation", "facts", "labels"),
}
VALIDATION = next(one.default for one in dataset.common if one.name == "validation")


@dataclass(frozen=True)
class Run:
    """A finished run and its records."""

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
    def labels(self) -> dict[str, str]:
        """What the rows of its config are called: {"partition": "Nc=5", "head": "ridge head"}."""
        return dict(self.result["labels"])

    @property
    def test(self) -> float:
        return 100 * float(self.result["test"]["top1"])

    @property
    def validation(self) -> float | None:
        metrics = self.result["validation"]
        return None if metrics is None else 100 * float(metrics["top1"])

    @property
    def chosen_unit(self) -> int:
        """The epoch or round whose parameters were tested; 0: before any training."""
        return int(self.result["choice"]["unit"])

    @cached_property
    def masks(self) -> Record | None:
        path = self.folder.path / "masks.json"
        return read_record(path) if path.exists() else None

    @cached_property
    def analyses(self) -> list[Record]:
        """Records of the analyses of the finished model, sorted by name."""
        paths = sorted((self.folder.path / "arithmetic").glob("*/record.json"))
        return [read_record(path) for path in paths]

    @cached_property
    def partition(self) -> Record | None:
        return self.folder.partition

    @property
    def megabytes(self) -> float | None:
        """Sent before and in all rounds, both ways; None for central training."""
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
    """Runs that differ only in their seed, sorted by seed."""

    runs: tuple[Run, ...]

    @property
    def config(self) -> Settings:
        return self.runs[0].config

    @property
    def labels(self) -> dict[str, str]:
        return self.runs[0].labels

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run.seed for run in self.runs)

    @cached_property
    def test(self) -> Estimate:
        return estimate([run.test for run in self.runs])

    @cached_property
    def validation(self) -> float | None:
        """Mean validation accuracy, by which methods are chosen; None if a run has none."""
        scores = [run.validation for run in self.runs]
        known = [score for score in scores if score is not None]
        return sum(known) / len(known) if known and len(known) == len(scores) else None

    def by_seed(self) -> dict[int, float]:
        return {run.seed: run.test for run in self.runs}

    def get(self, key: str) -> Any:
        """The value of a dotted key of the config; None if the config has no such key."""
        return value_of(self.config, key)


@dataclass(frozen=True)
class Study:
    """Methods by setting, and unfinished runs."""

    settings: dict[str, list[Method]]
    unfinished: dict[str, str]  # name of a run → its state

    @property
    def methods(self) -> list[Method]:
        return [method for methods in self.settings.values() for method in methods]

    @property
    def runs(self) -> list[Run]:
        return [run for method in self.methods for run in method.runs]


def read(places: Iterable[Path]) -> Study:
    """Reads every run at these paths or in these folders; runs without a test result are left out.

    A run is a run's folder, its name, or part of its name; a path may also hold many runs.
    """
    folders: dict[str, RunFolder] = {}
    for folder in (RunFolder(one.path.resolve()) for place in places for one in find_runs(place)):
        other = folders.setdefault(folder.name, folder)
        if other != folder:
            both = " and ".join(sorted((str(other.path), str(folder.path))))
            raise FedlensError(f"{both} are the same run: leave one of them out.")
    unfinished: dict[str, str] = {}
    finished: list[Run] = []
    for name, folder in sorted(folders.items()):
        result = folder.result
        if result is None:
            unfinished[name] = folder.state()
        elif result.get("test") is not None:  # else a trial of a search: it never opened the test
            finished.append(_read(folder, result))
    if not finished:
        raise FedlensError("There is no finished run to report on: see `fedlens ls`.")
    grouped: dict[tuple[str, str], list[Run]] = {}
    for run in finished:
        grouped.setdefault((setting(run), identity(run.config)), []).append(run)
    settings: dict[str, list[Method]] = {}
    for (where, _), alike in sorted(grouped.items()):
        ordered = tuple(sorted(alike, key=lambda run: (run.seed, run.name)))
        settings.setdefault(where, []).append(Method(ordered))
    return Study(settings, unfinished)


def repetitions(folder: RunFolder) -> list[Run]:
    """This run and the finished runs beside it that differ from it in the seed alone, by seed.

    A run that cannot be read is left out and logged.
    """
    one = _read(folder, folder.result or {})
    alike = {one.seed: one}
    for other in runs(folder.path.resolve().parent):
        if other.name == folder.name:
            continue
        try:
            result = other.result
            if result is None or result.get("test") is None or result["seed"] in alike:
                continue
            run = _read(other, result)
            if identity(run.config) == identity(one.config) and (
                run.manifest["inputs"] == one.manifest["inputs"]
            ):
                alike[run.seed] = run
        except (FedlensError, KeyError) as error:
            log.warning("%s is left out: %s", other.name, error)
    return [alike[seed] for seed in sorted(alike)]


def setting(run: Run) -> str:
    """The data and the backbone: they must agree before two numbers are compared."""
    data, backbone = run.config["data"], run.config["backbone"]
    train, test, validation = data["train_per_class"], data["test_per_class"], data["validation"]
    parts = [
        run.labels["data"],
        *([f"{train} images per class"] if train else []),
        *([f"{test} test images per class"] if test else []),
        *([f"validation {validation:g}"] if validation != VALIDATION else []),
        f"{_written_out(run.labels.get('backbone', backbone['name']))} at "
        f"{backbone['resolution']} px",
        *([] if backbone["pretrained"] else ["from scratch"]),
    ]
    return ", ".join(parts)


def _written_out(name: str) -> str:
    """The backbone's name in papers where the registry knows it: 'ViT-Ti/16'."""
    return backbones[name].label if name in backbones else name


def identity(config: Settings, without: Iterable[str] = ()) -> str:
    """The part of a config that decides the result, except the seed and the dotted keys left out.

    Runs with equal identities repeat the same method.
    """
    backbone = config["backbone"]
    weights = PurePath(backbone["weights"] or "").name  # the same file may lie elsewhere
    movable = {
        **config,
        "backbone": {**backbone, "weights": weights},
        "partition": portable_partition(config["partition"]),
    }
    return json.dumps(_pruned(movable, {*RUNTIME_KEYS, "seed", *without}), sort_keys=True)


def portable_partition(partition: Mapping[str, Any]) -> dict[str, Any]:
    """A partition's settings, of a file its name alone: it may lie elsewhere."""
    file = partition.get("file")
    return {**partition, **({"file": PurePath(file).name} if file else {})}


def value_of(config: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key; None if the config has no such key (its row does not read it)."""
    value: Any = config
    for step in key.split("."):
        if not isinstance(value, Mapping) or step not in value:
            return None
        value = value[step]
    return value


def megabytes(record: Record) -> float:
    """Sent in a round, both ways."""
    return float(record.get("bytes_up", 0) + record.get("bytes_down", 0)) / 1e6


def _pruned(tree: Settings, left_out: set[str], prefix: str = "") -> Settings:
    return {
        key: _pruned(value, left_out, f"{prefix}{key}.") if isinstance(value, dict) else value
        for key, value in tree.items()
        if prefix + key not in left_out
    }


def _read(folder: RunFolder, result: Record) -> Run:
    try:
        # Keys that did not exist when the run was made have their defaults.
        config = _filled(folder.read_config(), asdict(Config()))
        manifest, metrics = folder.manifest, folder.journal("metrics").read()
        _refuse_incomplete({"manifest": manifest, "result": result}, metrics)
        run = Run(folder, config, manifest or {}, result, metrics)
        _ = setting(run), identity(config), run.test, run.seed, run.manifest["sessions"][0]
        return run
    except SHAPE_ERRORS as error:
        raise FedlensError(
            f"{folder.path} is not a complete run ({str(error).rstrip('.')}): leave it out."
        ) from error


def _refuse_incomplete(files: Mapping[str, Record | None], metrics: list[Record]) -> None:
    for name, record in files.items():
        if record is None:
            raise ValueError(f"there is no {name}.json")
        if missing := [key for key in REQUIRED[name] if key not in record]:
            raise ValueError(f"{name}.json lacks {', '.join(missing)}")
    if not metrics:
        raise ValueError("metrics.jsonl has no record")


def _filled(config: Settings, defaults: Settings) -> Settings:
    groups = [key for key, value in defaults.items() if isinstance(value, dict)]
    return {**defaults, **config} | {
        key: _filled(config.get(key, {}), defaults[key]) for key in groups
    }
