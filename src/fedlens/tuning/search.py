"""A hyper-parameter search and the SQLite file of its trials, used by one process at a time.

Optuna's own tools can read the file; its only study is called `search`.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import optuna
from filelock import FileLock, Timeout
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from fedlens.config import compose
from fedlens.config.identity import identity, run_name
from fedlens.config.schema import ROW_KEYS, Config, RunConfig, rounds
from fedlens.errors import FedlensError
from fedlens.files import replacing
from fedlens.registry import REGISTRIES
from fedlens.tuning.space import Dimension
from fedlens.tuning.trial_records import Record

STUDY = "search"
STARTUP_TRIALS = 5  # that are complete before any trial is stopped early
WARM_UP = 4  # no trial is stopped in the first 1/4 of its epochs or rounds

PRUNERS: dict[str, Callable[[int], optuna.pruners.BasePruner]] = {
    "median": lambda units: optuna.pruners.MedianPruner(STARTUP_TRIALS, units // WARM_UP),
    "none": lambda units: optuna.pruners.NopPruner(),
}
DISTRIBUTIONS: dict[str, Callable[..., BaseDistribution]] = {
    "log": lambda low, high: FloatDistribution(low, high, log=True),
    "float": FloatDistribution,
    "int": IntDistribution,
    "choices": lambda *values: CategoricalDistribution(values),
}
STATES = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}


@dataclass(frozen=True)
class Search:
    """Find the best values of the dimensions of `space`; all other keys are as in `config`."""

    config: Config
    space: list[Dimension]
    seed: int = 0
    pruner: str = "median"
    name: str | None = None  # null: a hash of all the above

    @cached_property
    def folder(self) -> Path:
        return Path(self.config.run.root) / "tune" / (self.name or self._name())

    @cached_property
    def identity(self) -> Record:
        """Everything that determines the trials; only an identical search resumes this one."""
        return {
            "config": identity(self.config),
            "space": {one.key: one.record() for one in self.space},
            "seed": self.seed,
            "pruner": self.pruner,
            **({"plugins": words} if (words := self._searched_plugins()) else {}),
        }

    def _searched_plugins(self) -> list[str]:
        """The plugins of rows among the choices; those of other rows are in the config."""
        rows = [REGISTRIES[ROW_KEYS[one.key]][str(value)]
                for one in self.space if one.key in ROW_KEYS for value in one.values]  # fmt: skip
        return sorted({row.plugin.word for row in rows if row.plugin is not None})

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        return {one.key: DISTRIBUTIONS[one.kind](*one.values) for one in self.space}

    def _name(self) -> str:
        text = json.dumps(self.identity, sort_keys=True)
        return f"{self.config.experiment}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def best(self, values: Record) -> Config:
        """The experiment with these values, to be run after the search."""
        return compose.changed(self.config, values)

    def trial(self, values: Record) -> Config:
        """The same, but the test split stays closed and only one checkpoint is kept."""
        untested = {"evaluate.test": False, "evaluate.test_curve": False}
        config = compose.changed(self.config, {**values, **untested})
        kept = replace(config.checkpoint, keep_last=1, keep_best=1)
        place = RunConfig(root=str(self.folder / "runs"), name=run_name(config))
        return replace(config, checkpoint=kept, run=place)


def finished_trials(study: optuna.Study) -> list[FrozenTrial]:
    """Trials with an outcome, in order; without those whose session was killed."""
    return [
        trial
        for trial in study.get_trials(deepcopy=False, states=tuple(STATES))
        if trial.state != TrialState.FAIL or "failure" in trial.user_attrs
    ]


def count_failed(trials: list[FrozenTrial]) -> int:
    return sum(trial.state == TrialState.FAIL for trial in trials)


def count_scored(trials: list[FrozenTrial]) -> int:
    """Trials that are complete or pruned."""
    return len(trials) - count_failed(trials)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Refuse a folder that another process searches in."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / "search.lock")
        lock.acquire(timeout=2)
    except Timeout as error:
        raise FedlensError(
            f"Another process runs the search in {folder}: wait until it ends."
        ) from error
    except OSError as error:
        raise FedlensError(f"Cannot write to {folder} ({error.strerror}).") from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def open_study(search: Search) -> Iterator[optuna.Study]:
    """The study in its SQLite file, which is created atomically."""
    path, identity = search.folder / "study.db", json.loads(json.dumps(search.identity))
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # fedlens logs the same
    try:
        if not path.exists():
            with replacing(path) as temporary, _stored(temporary) as storage:
                study = optuna.create_study(storage=storage, study_name=STUDY, direction="maximize")
                study.set_user_attr("identity", identity)
        with _stored(path) as storage:
            units = rounds(search.config) if search.config.federated.clients else None
            pruner = PRUNERS[search.pruner](units or search.config.train.epochs)
            study = optuna.load_study(storage=storage, study_name=STUDY, pruner=pruner)
            if study.user_attrs.get("identity") != identity:
                raise FedlensError(
                    f"{search.folder} holds a different search: choose another --name."
                )
            yield study
    except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        reason = str(error).splitlines()[0]
        raise FedlensError(f"{path} cannot be used ({reason}).") from error
    finally:
        optuna.logging.set_verbosity(verbosity)


@contextmanager
def _stored(path: Path) -> Iterator[optuna.storages.RDBStorage]:
    storage = optuna.storages.RDBStorage(f"sqlite:///{path}")
    try:
        yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()
