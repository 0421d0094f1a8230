import pytest
import torch
from safetensors.torch import save

from fedlens import params
from fedlens.federated import wire
from tests.federated.worlds import linear, network


@pytest.mark.parametrize(
    "parameters",
    [
        params.copy(dict(network().named_parameters())),
        params.copy(dict(linear().named_parameters())),
        {"x": torch.randn(3, dtype=torch.float64), "counts": torch.arange(5), "s": torch.ones(())},
        {"half": torch.randn(7, 3).half()},
        {},
    ],
)
def test_the_size_is_that_of_the_safetensors_bytes(parameters: dict[str, torch.Tensor]) -> None:
    assert wire.size(parameters) == len(save(parameters))
    assert wire.size(parameters) == len(save(parameters))  # the second time from memory


def test_the_size_does_not_depend_on_values_and_knows_layouts_apart() -> None:
    assert wire.size({"w": torch.randn(5)}) == wire.size({"w": torch.full((5,), torch.nan)})
    assert wire.size({"w": torch.zeros(5)}) == wire.size({"w": torch.zeros(10)[::2]})
    five, fifty = wire.size({"w": torch.zeros(5)}), wire.size({"w": torch.zeros(50)})
    assert fifty - five >= 45 * 4
