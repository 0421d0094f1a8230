import shutil
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch import nn

from fedlens import params
from fedlens.config.schema import HeadConfig
from fedlens.data.examples import FeatureExamples
from fedlens.data.partition import TABLE, Partition, partition
from fedlens.experiments.head import closed_form_head, federated_statistics
from fedlens.files import cache_dir
from fedlens.models import heads
from fedlens.models.heads import Statistics
from fedlens.runtime.threads import limited_threads

CLASSES, WIDTH = 5, 12


def made(count: int, seed: int) -> FeatureExamples:
    """Classes a little apart, features far from centred and of different scales."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=draw)
    features = torch.randn(count, WIDTH, generator=draw) + labels[:, None] * 0.3
    return FeatureExamples(features * torch.linspace(0.1, 10, WIDTH) + 3, labels)


TRAIN, VALIDATION, FRESH = made(150, 0), made(60, 1), made(500, 2)


def dealt(name: str, clients: int, seed: int) -> Partition:
    return partition(
        TRAIN.labels, clients, name=name, seed=seed,
        classes_per_client=2, alpha=0.1, sigma=1.0, min_size=1,
    )  # fmt: skip


def same(one: nn.Linear, two: nn.Linear) -> None:
    """Weights within 1e-6 of their size, and the same class for everything."""
    for a, b in ((one.weight, two.weight), (one.bias, two.bias)):
        assert (a - b).norm() <= 1e-6 * b.norm()
    with torch.no_grad():
        assert torch.equal(one(FRESH.features).argmax(1), two(FRESH.features).argmax(1))


@pytest.mark.parametrize("head", ["ridge", "class_means"])
@pytest.mark.parametrize("name", TABLE)
@settings(max_examples=10)
@given(clients=st.integers(5, 30), seed=st.integers(0, 99))
def test_the_federated_head_is_the_central_one_whoever_holds_what(
    name: str, head: str, clients: int, seed: int
) -> None:
    config = HeadConfig(name=head, ridge_lambda=2.0, temperature=3.0)
    central, _ = closed_form_head(config, TRAIN, VALIDATION, CLASSES)
    shards = dealt(name, clients, seed)
    federated, _ = closed_form_head(config, TRAIN, VALIDATION, CLASSES, shards)
    same(federated, central)


@pytest.mark.parametrize("name", TABLE)
def test_the_free_numbers_are_chosen_alike(name: str) -> None:
    config = HeadConfig(name="ridge")
    central, facts = closed_form_head(config, TRAIN, VALIDATION, CLASSES)
    shards = dealt(name, 10, 0)
    federated, others = closed_form_head(config, TRAIN, VALIDATION, CLASSES, shards)
    assert others["ridge_lambda"] == facts["ridge_lambda"]
    assert others["temperature"] == pytest.approx(facts["temperature"], rel=1e-4)
    with torch.no_grad():
        predicted = [head(FRESH.features).argmax(1) for head in (federated, central)]
    assert torch.equal(*predicted)


def test_statistics_of_shards_add_up_to_those_of_the_whole() -> None:
    whole = Statistics.of(TRAIN.features, TRAIN.labels, CLASSES)
    summed = federated_statistics(TRAIN, dealt("classes", 12, 3), CLASSES)
    assert torch.equal(summed.counts, whole.counts)
    torch.testing.assert_close(summed.xtx, whole.xtx, rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(summed.class_sums, whole.class_sums, rtol=1e-12, atol=1e-9)


def test_the_bytes_that_clients_send_are_those_of_their_statistics() -> None:
    config = HeadConfig(name="ridge", ridge_lambda=1.0, temperature=1.0)
    _, facts = closed_form_head(config, TRAIN, VALIDATION, CLASSES, dealt("iid", 7, 0))
    one = Statistics.of(TRAIN.features[:3], TRAIN.labels[:3], CLASSES)
    assert facts["statistics_bytes_up"] == 7 * len(save(vars(one)))
    _, facts = closed_form_head(config, TRAIN, VALIDATION, CLASSES)
    assert "statistics_bytes_up" not in facts


FIXED = HeadConfig(name="ridge", ridge_lambda=1.0, temperature=1.0)


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


@pytest.mark.parametrize("shards", [None, dealt("classes", 4, 0)])
def test_statistics_are_taken_once_whatever_head_is_made_of_them(
    shards: Partition | None, taken: list[int]
) -> None:
    parts = len(shards) if shards else 1
    fresh, facts = closed_form_head(HeadConfig(name="ridge"), TRAIN, VALIDATION, CLASSES, shards)
    assert len(taken) == parts
    again, same_facts = closed_form_head(
        HeadConfig(name="ridge"), TRAIN, VALIDATION, CLASSES, shards
    )
    assert params.digest(again.state_dict()) == params.digest(fresh.state_dict())
    assert same_facts == facts
    for config in (replace(FIXED, ridge_lambda=3.0), HeadConfig(name="class_means")):
        closed_form_head(config, TRAIN, VALIDATION, CLASSES, shards)
    assert len(taken) == parts


@pytest.mark.parametrize("shards", [None, dealt("classes", 4, 0)])
def test_a_cached_head_is_bit_for_bit_the_head_of_statistics_taken_directly(
    shards: Partition | None, taken: list[int]
) -> None:
    parts = len(shards) if shards else 1
    direct = (
        federated_statistics(TRAIN, shards, CLASSES)
        if shards
        else Statistics.of(TRAIN.features, TRAIN.labels, CLASSES)
    )
    expected = params.digest(heads.ridge(direct, 1.0).state_dict())
    for _ in ("taken", "found"):
        head, _ = closed_form_head(FIXED, TRAIN, VALIDATION, CLASSES, shards)
        assert params.digest(head.state_dict()) == expected
    assert len(taken) == 2 * parts  # directly, and for the cache


def nudged() -> FeatureExamples:
    features = TRAIN.features.clone()
    features[-1, -1] = torch.nextafter(features[-1, -1], torch.tensor(1e9))
    return replace(TRAIN, features=features)


def relabelled() -> FeatureExamples:
    labels = TRAIN.labels.clone()
    labels[0] = (labels[0] + 1) % CLASSES
    return replace(TRAIN, labels=labels)


SHARDS = dealt("iid", 4, 0)
MOVED = Partition(SHARDS.order, SHARDS.offsets + torch.tensor([0, 1, 0, 0, 0]))
OTHERS: dict[str, Callable[[], tuple[FeatureExamples, int, Partition | None]]] = {
    "the last bit of a feature": lambda: (nudged(), CLASSES, SHARDS),
    "one label": lambda: (relabelled(), CLASSES, SHARDS),
    "one more class": lambda: (TRAIN, CLASSES + 1, SHARDS),
    "no clients": lambda: (TRAIN, CLASSES, None),
    "other shards": lambda: (TRAIN, CLASSES, dealt("iid", 4, 1)),
    "an example that moved to its neighbour": lambda: (TRAIN, CLASSES, MOVED),
}


@pytest.mark.parametrize("change", OTHERS)
def test_what_statistics_depend_on_makes_them_anew(change: str, taken: list[int]) -> None:
    closed_form_head(FIXED, TRAIN, VALIDATION, CLASSES, SHARDS)
    before = len(taken)
    train, classes, shards = OTHERS[change]()
    closed_form_head(FIXED, train, VALIDATION, classes, shards)
    assert len(taken) == before + (len(shards) if shards else 1)


def test_another_number_of_threads_or_version_of_torch_takes_them_anew(
    taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for threads in (1, 2, 1):
        with limited_threads(threads):
            closed_form_head(FIXED, TRAIN, VALIDATION, CLASSES)
    assert taken == [1, 2]
    monkeypatch.setattr(torch, "__version__", "0.0.0")
    with limited_threads(1):
        closed_form_head(FIXED, TRAIN, VALIDATION, CLASSES)
    assert taken == [1, 2, 1]


def test_damaged_statistics_are_taken_again(
    taken: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    first, _ = closed_form_head(FIXED, TRAIN, VALIDATION, CLASSES)
    (path,) = (cache_dir() / "statistics").iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    again, _ = closed_form_head(FIXED, TRAIN, VALIDATION, CLASSES)
    assert "is damaged" in caplog.text
    assert len(taken) == 2
    assert params.digest(again.state_dict()) == params.digest(first.state_dict())
    assert path.read_bytes() == whole
