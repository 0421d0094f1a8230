import pytest
import torch
from safetensors.torch import save

from fedlens import params
from fedlens.federated import wire
from tests.federated.small import linear, network


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


def test_values_at_masks_positions_travel_as_one_vector_and_come_back() -> None:
    packed = {"a": torch.tensor([1.0, 2.0]), "head": torch.randn(2, 3), "b": torch.tensor([3.0])}
    sent = wire.encoded(packed, {"a", "b"})
    assert sent.keys() == {"head", wire.SPARSE}
    assert sent[wire.SPARSE].tolist() == [1, 2, 3]
    back = wire.decoded(sent, packed, {"a", "b"})
    assert list(back) == list(packed)
    assert params.digest(back) == params.digest(packed)
    assert wire.size(packed, {"a", "b"}) == len(save(sent))
    assert wire.decoded(wire.encoded(packed), packed).keys() == packed.keys()


@pytest.mark.parametrize("density", [0.01, 0.1, 0.5])
def test_a_sparse_update_weighs_at_most_density_times_the_dense_one_and_a_hundredth(
    density: float,
) -> None:
    """On layers of the smallest backbone there is, where names weigh most."""
    shapes = [(288, 96), (96, 96), (384, 96), (96, 384)] * 4
    dense = {f"backbone.blocks.{k}.weight": torch.zeros(shape) for k, shape in enumerate(shapes)}
    sparse = {name: torch.zeros(round(density * value.numel())) for name, value in dense.items()}
    assert wire.size(sparse, sparse) <= density * wire.size(dense) * 1.01
