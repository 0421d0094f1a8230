import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedlens import params
from fedlens.rng import generator
from fedlens.sparse.packing import Packing

SHAPES = {"matrix": (4, 5), "kernel": (3, 2, 3, 3), "bias": (7,)}


def parameters(seed: int = 0) -> dict[str, torch.Tensor]:
    draw = generator(seed, "parameters")
    found = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
    found["kernel"] = found["kernel"].to(memory_format=torch.channels_last)
    return found


def masks(density: float, seed: int) -> dict[str, torch.Tensor]:
    draw = generator(seed, "masks")
    return {
        name: torch.rand(SHAPES[name], generator=draw) < density for name in ("matrix", "kernel")
    }


@given(st.floats(0, 1), st.integers(0, 99))
def test_unpacking_writes_the_trained_entries_and_nothing_else(density: float, seed: int) -> None:
    chosen, ours, theirs = masks(density, seed), parameters(1), parameters(2)
    packing = Packing(ours, chosen)
    expected = {
        name: torch.where(chosen[name], theirs[name], value) if name in chosen else theirs[name]
        for name, value in ours.items()
    }
    packing.unpack(packing.pack(theirs), ours)
    assert params.digest(ours) == params.digest(expected)


@given(st.floats(0, 1), st.integers(0, 99))
def test_packed_values_stand_in_row_major_order_and_spread_is_the_inverse(
    density: float, seed: int
) -> None:
    chosen, ours = masks(density, seed), parameters()
    packing = Packing(ours, chosen)
    packed = packing.pack(ours)
    for name, mask in chosen.items():
        assert torch.equal(packed[name], ours[name][mask])
        assert torch.equal(packing.spread(name, packed[name], ours[name]), ours[name] * mask)
    assert packed["bias"].shape == (7,)
    assert packing.spread("bias", packed["bias"], ours["bias"]) is packed["bias"]


def test_parameters_that_require_gradients_can_be_written() -> None:
    layer = nn.Linear(3, 2)
    trained = dict(layer.named_parameters())
    packing = Packing(
        trained, {"weight": torch.tensor([[True, False, False], [False, True, True]])}
    )
    packing.unpack({"weight": torch.tensor([1.0, 2.0, 3.0]), "bias": torch.zeros(2)}, trained)
    assert layer.weight[0, 0] == 1
    assert layer.weight[1].tolist()[1:] == [2, 3]
    assert layer.weight.requires_grad


def test_values_that_do_not_fit_are_refused_before_anything_is_written() -> None:
    ours = parameters()
    packing = Packing(ours, masks(0.5, 0))
    before = params.digest(ours)
    packed = params.copy(packing.pack(parameters(1)))
    with pytest.raises(ValueError, match="kernel has shape"):
        packing.unpack({**packed, "kernel": packed["kernel"][:-1]}, ours)
    with pytest.raises(ValueError, match="missing bias"):
        packing.unpack({k: v for k, v in packed.items() if k != "bias"}, ours)
    assert params.digest(ours) == before
