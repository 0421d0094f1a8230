"""What a search is, and the SQLite file of its trials: made whole or not at all, used by one.

The same file may be opened with Optuna's own tools; its only study is called `search`.
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
from fedlens.config.identity import essence, run_name
from fedlens.config.schema import Config, RunConfig, rounds
from fedlens.errors import FedlensError
from fedlens.files import replacing
from fedlens.tuning.space import Dimension
from fedlens.tuning.trial_records import Record

STUDY = "search"
PATIENCE = 5  # complete trials before any is stopped
WARM_UP = 4  # no trial is stopped in the first of so many parts of its epochs or rounds

PRUNERS: dict[str, Callable[[int], optuna.pruners.BasePruner]] = {
    "median": lambda units: optuna.pruners.MedianPruner(PATIENCE, units // WARM_UP),
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
    """What is asked: the best values of the dimensions for a config that is given otherwise."""

    config: Config
    space: list[Dimension]
    seed: int = 0
    pruner: str = "median"
    name: str | None = None  # null: made from all of this

    @cached_property
    def folder(self) -> Path:
        return Path(self.config.run.root) / "tune" / (self.name or self._name())

    @cached_property
    def told(self) -> Record:
        """All that decides which trials are made; a search is taken up only by the same."""
        return {
            "config": essence(self.config),
            "space": {one.key: one.told() for one in self.space},
            "seed": self.seed,
            "pruner": self.pruner,
        }

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        return {one.key: DISTRIBUTIONS[one.kind](*one.values) for one in self.space}

    def _name(self) -> str:
        text = json.dumps(self.told, sort_keys=True)
        return f"{self.config.experiment}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def best(self, values: Record) -> Config:
        """The experiment with these values, as it is run once the search is over."""
        return compose.changed(self.config, values)

    def trial(self, values: Record) -> Config:
        """The same, but it never opens the test split, and leaves little on the disk."""
        untested = {"evaluate.test": False, "evaluate.test_curve": False}
        config = compose.changed(self.config, {**values, **untested})
        kept = replace(config.checkpoint, keep_last=1, keep_best=1)
        place = RunConfig(root=str(self.folder / "runs"), name=run_name(config))
        return replace(config, checkpoint=kept, run=place)


def settled(study: optuna.Study) -> list[FrozenTrial]:
    """Trials with an outcome, in order; one whose session was killed is not among them."""
    return [
        trial
        for trial in study.get_trials(deepcopy=False, states=tuple(STATES))
        if trial.state != TrialState.FAIL or "failure" in trial.user_attrs
    ]


def failures(trials: list[FrozenTrial]) -> int:
    return sum(trial.state == TrialState.FAIL for trial in trials)


def counted(trials: list[FrozenTrial]) -> int:
    """Those that are complete or pruned."""
    return len(trials) - failures(trials)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = FileLock(folder / "search.lock")
        held.acquire(timeout=2)
    except Timeout as error:
        raise FedlensError(f"{folder} is being searched by another process.") from error
    except OSError as error:
        raise FedlensError(f"Cannot write to {folder} ({error.strerror}).") from error
    try:
        yield
    finally:
        held.release()


@contextmanager
def opened(asked: Search) -> Iterator[optuna.Study]:
    """The study in its SQLite file, made whole or not at all."""
    path, told = asked.folder / "study.db", json.loads(json.dumps(asked.told))
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # what it says, our log says
    try:
        if not path.exists():
            with replacing(path) as temporary, _stored(temporary) as storage:
                study = optuna.create_study(storage=storage, study_name=STUDY, direction="maximize")
                study.set_user_attr("asked", told)
        with _stored(path) as storage:
            units = rounds(asked.config) if asked.config.federated.clients else None
            pruner = PRUNERS[asked.pruner](units or asked.config.train.epochs)
            study = optuna.load_study(storage=storage, study_name=STUDY, pruner=pruner)
            if study.user_attrs.get("asked") != told:
                raise FedlensError(f"{asked.folder} holds another search: choose another --name.")
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
