import pytest
import torch

from fedlens import params
from fedlens.federated.server.memory import Memory
from fedlens.federated.server.model_average import ExponentialAverage, LastModels, ModelAverage

MODELS = [{"w": torch.tensor([value, -value])} for value in (1.0, 2.0, 4.0, 8.0)]


def averaged(average: ModelAverage, count: int = 4) -> list[float]:
    memory: Memory = {}
    for model in MODELS[:count]:
        memory = average.updated(memory, model)
    value = average.value(memory)["w"]
    assert value.dtype == torch.float64
    return value.tolist()


def test_the_exponential_average_by_hand() -> None:
    """1 → 0.75·1 + 0.25·2 = 1.25 → 1.9375 → 3.453125."""
    average = ExponentialAverage(decay=0.75)
    assert averaged(average, 1) == [1.0, -1.0]
    assert averaged(average, 2) == [1.25, -1.25]
    assert averaged(average) == [3.453125, -3.453125]


def test_the_mean_of_the_last_models_by_hand() -> None:
    average = LastModels(rounds=3)
    assert averaged(average, 1) == [1.0, -1.0]
    assert averaged(average, 2) == [1.5, -1.5]
    assert averaged(average) == pytest.approx([14 / 3, -14 / 3])


@pytest.mark.parametrize("average", [ExponentialAverage(decay=0.0), LastModels(rounds=1)])
def test_without_earlier_rounds_it_is_the_model_bit_for_bit(average: ModelAverage) -> None:
    draw = torch.Generator().manual_seed(0)
    memory: Memory = {}
    for _ in range(3):
        model = {"w": torch.randn(50, generator=draw)}
        memory = average.updated(memory, model)
    assert torch.equal(average.value(memory)["w"].float(), model["w"])


@pytest.mark.parametrize("average", [ExponentialAverage(decay=0.5), LastModels(rounds=2)])
def test_nothing_that_is_given_is_changed_or_kept(average: ModelAverage) -> None:
    model = {"w": torch.ones(2, dtype=torch.float64)}
    memory = average.updated({}, model)
    model["w"].add_(5.0)
    assert average.value(memory)["w"].tolist() == [1.0, 1.0]
    before = {kind: params.digest(values) for kind, values in memory.items()}
    average.value(average.updated(memory, model))
    assert {kind: params.digest(values) for kind, values in memory.items()} == before
