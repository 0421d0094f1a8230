"""Two processes that need the same things at the same time: each thing is made once."""

import multiprocessing
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from fedlens import files, params
from fedlens.config.compose import compose
from fedlens.config.schema import Config
from fedlens.data.sources import synthetic
from fedlens.experiments import build, settings
from fedlens.experiments.build import Experiment
from fedlens.experiments.clients import local_session
from fedlens.experiments.preparation.head import prepare_head
from fedlens.experiments.preparation.masks import find_masks
from fedlens.federated import host
from fedlens.models.heads import Statistics
from fedlens.runtime.stop import Interrupted, StopRequest
from fedlens.runtime.threads import limited_threads
from fedlens.store.run_folder import RunFolder
from fedlens.training import pretrain
from fedlens.training.pretrain import Recipe, pico_weights
from tests.integration.conftest import TINY

SETTING = [
    *("data=synthetic", "augment=none", "backbone=vit_pico", *TINY, "federated.clients=3"),
    *("sparse.rounds=2", "sparse.examples=8", "data.train_per_class=2", "data.validation=0.5"),
]
MAKERS: dict[str, tuple[Any, str, int]] = {  # whose function, and how often it is called in all
    "pretraining": (pretrain, "pretrain", 1),
    "datasets": (synthetic, "_draw", 2),  # to pretrain on, and to train on
    "batches of features": (build.Extractor, "_forward", 1),
    "statistics": (Statistics, "of", 3),  # one for each client
    "sensitivities": (host, "sensitivity", 2),  # one for each round
}


class Gate:
    """Set in every worker as it starts: nobody begins before all are there."""

    barrier: Barrier


def arrive(barrier: Barrier) -> None:
    Gate.barrier = barrier


def counting(function: Callable[..., Any], calls: Counter[str], name: str) -> Callable[..., Any]:
    def wrapped(*args: Any, **options: Any) -> Any:
        calls[name] += 1
        return function(*args, **options)

    return wrapped


def prepared_experiment(config: Config, folder: Path, stop: StopRequest) -> Experiment:
    """With its head and masks, as a run prepares them."""
    session = local_session(config, stop)
    experiment = build.build(config, torch.device("cpu"), stop, session.data)
    clients = session.clients(experiment)
    head = settings.head(config, experiment.precision)
    experiment = prepare_head(experiment, clients, head, stop)
    masks = settings.masks(config, experiment)
    return find_masks(experiment, clients, masks, RunFolder(folder), stop)


def prepared(folder: Path) -> tuple[Counter[str], dict[str, str]]:
    """All that runs share, in the order of a run: how often each was computed, and digests."""
    calls: Counter[str] = Counter()
    config = build.with_resolution(compose("sparse_fedavg", SETTING))
    with pytest.MonkeyPatch.context() as patch, limited_threads(1):
        for name, (owner, function, _) in MAKERS.items():
            patch.setattr(owner, function, counting(getattr(owner, function), calls, name))
        Gate.barrier.wait(timeout=120)
        weights = pico_weights(recipe=Recipe(per_class=1))
        experiment = prepared_experiment(config, folder, StopRequest())
    return calls, {
        "weights": files.sha256(weights),
        "head": params.digest(experiment.model.head.state_dict()),
        "masks": params.digest(experiment.masks),
    }


@pytest.mark.slow
def test_two_processes_at_once_make_everything_once_and_get_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDLENS_CACHE", str(tmp_path / "cache"))
    fork = multiprocessing.get_context("fork")  # spawned ones would import torch first
    with ProcessPoolExecutor(2, fork, arrive, (fork.Barrier(2),)) as pool:
        (first, bits), (second, same) = pool.map(prepared, [tmp_path / "a", tmp_path / "b"])
    assert bits == same
    assert first + second == {name: calls for name, (_, _, calls) in MAKERS.items()}


@pytest.mark.parametrize("kind", ["weights", "features", "statistics", "masks"])
def test_a_stop_request_comes_through_while_another_process_works(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = files.cache_dir() / "synthetic"
    images.mkdir(exist_ok=True)
    (tmp_path / "synthetic").symlink_to(images)  # drawn once for all these tests
    monkeypatch.setenv("FEDLENS_CACHE", str(tmp_path))
    stop, acquired, waits = StopRequest(), files._acquired, Counter[str]()

    def busy(lock: FileLock, patience: float) -> bool:
        name = Path(lock.lock_file).name
        if not name.startswith(f"{kind}-"):
            return acquired(lock, patience)
        waits[name] += 1
        assert waits.total() < 5, "the stop request was never checked"
        stop.name = "SIGTERM"  # it comes while waiting
        return False

    monkeypatch.setattr(files, "_acquired", busy)
    config = build.with_resolution(compose("sparse_fedavg", SETTING))
    with pytest.raises(Interrupted):
        if kind == "weights":
            monkeypatch.setattr(pretrain, "VERSION", 0)  # other weights than those shipped
            build.weights_file(config.backbone, stop)
        prepared_experiment(config, tmp_path / "run", stop)
    assert waits.total() == 2
    assert not list(tmp_path.glob(f"{kind}/*"))
