"""Heads fitted before the rounds: in closed form from clients' statistics, or by FedAvg."""

import shutil
from collections.abc import Callable
from functools import partial, reduce
from operator import add
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch import nn

from fedlens import params, rng
from fedlens.config.compose import compose
from fedlens.config.schema import Config
from fedlens.data.examples import FeatureExamples
from fedlens.data.partitions.partition import Partition, partition
from fedlens.errors import FedlensError
from fedlens.experiments import settings as settings_of
from fedlens.experiments.clients import experiment_host
from fedlens.experiments.preparation.head import (
    HeadSettings,
    cached_statistics,
    fit_head,
    train_head,
)
from fedlens.experiments.preparation.local_data import partition_of
from fedlens.federated import sampling
from fedlens.federated.client import Trainer
from fedlens.federated.host import ClientHost, LocalClients
from fedlens.federated.tasks import ClientTask
from fedlens.files import cache_dir
from fedlens.models import heads
from fedlens.models.classifier import Classifier
from fedlens.models.heads import Statistics
from fedlens.registry import head as registry
from fedlens.runtime.stop import StopRequest
from fedlens.runtime.threads import limited_threads
from tests.federated.small import FP32, local_training

CLASSES, WIDTH = 5, 12


def made(count: int, seed: int) -> FeatureExamples:
    """Classes a little apart, features far from centred and of different scales."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=draw)
    features = torch.randn(count, WIDTH, generator=draw) + labels[:, None] * 0.3
    return FeatureExamples(features * torch.linspace(0.1, 10, WIDTH) + 3, labels)


TRAIN, VALIDATION, FRESH = made(150, 0), made(60, 1), made(500, 2)


SKEW: dict[str, dict[str, float]] = {
    "iid": {},
    "classes": {"classes_per_client": 2},
    "dirichlet": {"alpha": 0.1, "min_size": 1},
    "quantity": {"sigma": 1.0, "min_size": 1},
}


def split(name: str, clients: int, seed: int) -> Partition:
    return partition(TRAIN.labels, clients=clients, by=name, seed=seed, **SKEW[name])


def everything(train: FeatureExamples) -> Partition:
    """One client that holds all examples."""
    return Partition(torch.arange(len(train)), torch.tensor([0, len(train)]))


def fit(
    name: str,
    shards: Partition | None = None,
    *,
    train: FeatureExamples | None = None,
    classes: int = CLASSES,
    **parameters: Any,
) -> tuple[nn.Linear, dict[str, Any]]:
    """The head of an experiment with these features, all clients in this process."""
    train = train or TRAIN
    known = SimpleNamespace(
        features=SimpleNamespace(train=train), partition=shards, classes=classes
    )
    held = shards or everything(train)
    host = ClientHost(
        examples=train,
        shard=held.shard,
        classes=classes,
        make_engine=lambda stage, masks: pytest.fail("nothing is trained"),
        features=lambda: train,
        make_calibrator=lambda: pytest.fail("nothing is calibrated"),
    )
    cache = partial(cached_statistics, known, lambda: None)
    clients = LocalClients(host, held.sizes.tolist(), cache)
    row, federated = registry[name], shards is not None
    width = VALIDATION.features.shape[1]
    return fit_head(
        HeadSettings(row, parameters), clients, VALIDATION, classes, width, federated=federated
    )


FIXED = {"l2": 1.0, "temperature": 1.0}


def same(one: nn.Linear, two: nn.Linear) -> None:
    """Weights within 1e-6 of their size, and the same class for everything."""
    for a, b in ((one.weight, two.weight), (one.bias, two.bias)):
        assert (a - b).norm() <= 1e-6 * b.norm()
    with torch.no_grad():
        assert torch.equal(one(FRESH.features).argmax(1), two(FRESH.features).argmax(1))


@pytest.mark.parametrize("head", ["ridge", "class_means"])
@pytest.mark.parametrize("name", SKEW)
@settings(max_examples=10)
@given(clients=st.integers(5, 30), seed=st.integers(0, 99))
def test_the_federated_head_is_the_central_one_whoever_holds_what(
    name: str, head: str, clients: int, seed: int
) -> None:
    numbers = {"l2": 2.0, "temperature": 3.0} if head == "ridge" else {"temperature": 3.0}
    central, _ = fit(head, **numbers)
    federated, _ = fit(head, split(name, clients, seed), **numbers)
    same(federated, central)


@pytest.mark.parametrize("name", SKEW)
def test_the_free_numbers_are_chosen_alike(name: str) -> None:
    central, facts = fit("ridge")
    federated, others = fit("ridge", split(name, 10, 0))
    assert others["l2"] == facts["l2"]
    assert others["temperature"] == pytest.approx(facts["temperature"], rel=1e-4)
    with torch.no_grad():
        predicted = [head(FRESH.features).argmax(1) for head in (federated, central)]
    assert torch.equal(*predicted)


def summed_statistics(shards: Partition) -> Statistics:
    """Taken directly, without clients or cache, in the clients' order."""
    of_clients = [
        Statistics.of(TRAIN.features[shards.shard(k)], TRAIN.labels[shards.shard(k)], CLASSES)
        for k in range(len(shards))
    ]
    return reduce(add, of_clients)


def test_statistics_of_shards_add_up_to_those_of_the_whole() -> None:
    whole = Statistics.of(TRAIN.features, TRAIN.labels, CLASSES)
    summed = summed_statistics(split("classes", 12, 3))
    assert torch.equal(summed.counts, whole.counts)
    torch.testing.assert_close(summed.xtx, whole.xtx, rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(summed.class_sums, whole.class_sums, rtol=1e-12, atol=1e-9)


def test_the_bytes_that_clients_send_are_those_of_their_statistics() -> None:
    _, facts = fit("ridge", split("iid", 7, 0), **FIXED)
    one = Statistics.of(TRAIN.features[:3], TRAIN.labels[:3], CLASSES)
    assert facts["statistics_bytes_up"] == 7 * len(save(one.sent()))
    _, facts = fit("ridge", **FIXED)
    assert "statistics_bytes_up" not in facts


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """With how many threads statistics are taken, each time, from an empty cache on."""
    shutil.rmtree(cache_dir() / "statistics", ignore_errors=True)
    threads: list[int] = []
    take = Statistics.of

    def listening(*args: torch.Tensor) -> Statistics:
        threads.append(torch.get_num_threads())
        return take(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(Statistics, "of", listening)
    return threads


@pytest.mark.parametrize("shards", [None, split("classes", 4, 0)])
def test_statistics_are_taken_once_whatever_head_is_made_of_them(
    shards: Partition | None, taken: list[int]
) -> None:
    parts = len(shards) if shards else 1
    fresh, facts = fit("ridge", shards)
    assert len(taken) == parts
    again, same_facts = fit("ridge", shards)
    assert params.digest(again.state_dict()) == params.digest(fresh.state_dict())
    assert same_facts == facts
    fit("ridge", shards, l2=3.0, temperature=1.0)
    fit("class_means", shards)
    assert len(taken) == parts


@pytest.mark.parametrize("shards", [None, split("classes", 4, 0)])
def test_a_cached_head_is_bit_for_bit_the_head_of_statistics_taken_directly(
    shards: Partition | None, taken: list[int]
) -> None:
    parts = len(shards) if shards else 1
    direct = summed_statistics(shards or everything(TRAIN))
    fitted, _ = heads.ridge(direct, None, **FIXED)
    expected = params.digest(fitted.state_dict())
    for _ in ("computed", "from the cache"):
        head, _ = fit("ridge", shards, **FIXED)
        assert params.digest(head.state_dict()) == expected
    assert len(taken) == 2 * parts  # directly, and for the cache


def nudged() -> FeatureExamples:
    features = TRAIN.features.clone()
    features[-1, -1] = torch.nextafter(features[-1, -1], torch.tensor(1e9))
    return FeatureExamples(features, TRAIN.labels)


def relabelled() -> FeatureExamples:
    labels = TRAIN.labels.clone()
    labels[0] = (labels[0] + 1) % CLASSES
    return FeatureExamples(TRAIN.features, labels)


SHARDS = split("iid", 4, 0)
MOVED = Partition(SHARDS.order, SHARDS.offsets + torch.tensor([0, 1, 0, 0, 0]))
OTHERS: dict[str, Callable[[], tuple[FeatureExamples, int, Partition | None]]] = {
    "the last bit of a feature": lambda: (nudged(), CLASSES, SHARDS),
    "one label": lambda: (relabelled(), CLASSES, SHARDS),
    "one more class": lambda: (TRAIN, CLASSES + 1, SHARDS),
    "no clients": lambda: (TRAIN, CLASSES, None),
    "other shards": lambda: (TRAIN, CLASSES, split("iid", 4, 1)),
    "an example that moved to its neighbour": lambda: (TRAIN, CLASSES, MOVED),
}


@pytest.mark.parametrize("change", OTHERS)
def test_what_statistics_depend_on_makes_them_anew(change: str, taken: list[int]) -> None:
    fit("ridge", SHARDS, **FIXED)
    before = len(taken)
    train, classes, shards = OTHERS[change]()
    fit("ridge", shards, train=train, classes=classes, **FIXED)
    assert len(taken) == before + (len(shards) if shards else 1)


def test_another_number_of_threads_or_version_of_torch_takes_them_anew(
    taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for threads in (1, 2, 1):
        with limited_threads(threads):
            fit("ridge", **FIXED)
    assert taken == [1, 2]
    monkeypatch.setattr(torch, "__version__", "0.0.0")
    with limited_threads(1):
        fit("ridge", **FIXED)
    assert taken == [1, 2, 1]


def test_damaged_statistics_are_taken_again(
    taken: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    first, _ = fit("ridge", **FIXED)
    (path,) = (cache_dir() / "statistics").iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    again, _ = fit("ridge", **FIXED)
    assert "is damaged" in caplog.text
    assert len(taken) == 2
    assert params.digest(again.state_dict()) == params.digest(first.state_dict())
    assert path.read_bytes() == whole


# --- heads trained by FedAvg ---------------------------------------------------------------------


TRAINED = ["head=trained", "head.steps=12", "head.lr=0.1", "train.batch_size=8"]
SPREAD = [
    *("federated.clients=5", "federated.participation=0.4"),
    *("partition=classes", "partition.classes_per_client=2"),
]


def sixty() -> FeatureExamples:
    draw = rng.generator(0, "world")
    labels = torch.arange(60) % 3
    return FeatureExamples(torch.randn(60, 6, generator=draw) + labels[:, None], labels)


def initial() -> nn.Linear:
    return heads.linear(6, 3, 0)


def trained(
    config: Config, shards: Partition | None, stop: StopRequest | None = None
) -> tuple[nn.Linear, dict[str, Any]]:
    stop, examples = stop or StopRequest(), sixty()
    known: Any = SimpleNamespace(
        train=examples,
        features=SimpleNamespace(train=examples),
        partition=shards,
        classes=3,
        precision=FP32,
    )
    sizes = (shards or everything(examples)).sizes.tolist()
    clients = LocalClients(experiment_host(config, known, stop, None), sizes)
    training = settings_of.head_training(config, FP32)
    head, facts, left_out = train_head(
        initial(), clients, training, stop, federated=shards is not None
    )
    assert not left_out
    return head, facts


def trainer(config: Config, shards: Partition) -> Trainer:
    """One client after another, with nothing of the experiment's own."""
    optimizer = config.train.optimizer
    rules = local_training(8, momentum=optimizer.momentum, weight_decay=optimizer.weight_decay)
    model = Classifier(nn.Identity(), initial())
    return Trainer(model, sixty(), shards.shard, rules, rng.address(0, "trained head"))


def test_a_central_head_is_one_stretch_of_sgdm_on_all_features() -> None:
    config = compose("sparse_centralized", TRAINED)
    found, facts = trained(config, None)
    alone = trainer(config, everything(sixty()))
    update = alone.train(ClientTask(1, 0, 12, 0.1, 60), dict(alone.packed()))
    torch.testing.assert_close(found.weight.detach(), update.parameters["head.weight"])
    torch.testing.assert_close(found.bias.detach(), update.parameters["head.bias"])
    assert facts == {}


def test_a_federated_head_is_fedavg_on_the_clients_features() -> None:
    config = compose("sparse_fedavg", [*TRAINED, *SPREAD])
    shards = partition_of(config, sixty().labels)
    assert shards is not None
    found, facts = trained(config, shards)

    alone, seed = trainer(config, shards), rng.address(0, "trained head")
    current = {name: value.clone() for name, value in alone.packed().items()}
    for number in (1, 2, 3):  # 12 steps, 4 a round
        total, running = 0, {name: torch.zeros_like(value) for name, value in current.items()}
        for client in sampling.uniform(seed, number, 5, 2):
            size = len(shards.shard(client))
            update = alone.train(ClientTask(number, client, 4, 0.1, size), current)
            total += size
            for name, value in update.parameters.items():
                running[name] += size * value
        current = {name: value / total for name, value in running.items()}
    torch.testing.assert_close(found.weight.detach(), current["head.weight"])
    torch.testing.assert_close(found.bias.detach(), current["head.bias"])
    assert facts["head_rounds"] == 3
    assert facts["head_bytes_up"] > 3 * 2 * 4 * (6 + 1) * 3


def test_the_same_seed_gives_the_same_head_and_another_seed_another() -> None:
    sums = []
    for seed in (0, 0, 1):
        found, _ = trained(compose("sparse_centralized", [*TRAINED, f"seed={seed}"]), None)
        sums.append(found.weight.sum().item())
    assert sums[0] == sums[1] != pytest.approx(sums[2], abs=1e-9)


def test_a_head_that_diverges_says_what_to_lower() -> None:
    config = compose("sparse_centralized", ["head=trained", "head.steps=40", "head.lr=1e30"])
    with pytest.raises(FedlensError, match=r"diverged in round 1 .*: lower head\.lr\."):
        trained(config, None)
