import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch import nn

from fedlens.data.batches import FeatureExamples
from fedlens.data.partition import TABLE, Partition, partition
from fedlens.experiments.closed_form import closed_form_head, federated_statistics
from fedlens.experiments.config import HeadConfig
from fedlens.models.heads import Statistics

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
