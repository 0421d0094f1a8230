"""SparseAdamW against torch.optim.AdamW, and frozen weights against their own bits."""

import io
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedlens.errors import FedlensError
from fedlens.sparse.optimizers.masked_optimizer import memory
from fedlens.sparse.optimizers.sparse_adamw import SparseAdamW
from tests.sparse.test_sparse_sgd import SHAPES, Bag, drawn_masks, ones, same_bits, values

OPTIONS = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([1e-3, 0.1, 1.0]),
        "betas": st.sampled_from([(0.9, 0.999), (0.0, 0.5), (0.5, 0.0)]),
        "eps": st.sampled_from([1e-8, 1e-3]),
        "weight_decay": st.sampled_from([0.0, 0.01, 0.5]),
        "maximize": st.booleans(),
    }
)


def built(shapes: list[list[int]], density: float = 0.5) -> tuple[Bag, SparseAdamW]:
    model = Bag(shapes)
    masks = drawn_masks(model, 1, density)
    return model, SparseAdamW(model.named_parameters(), lr=0.1, masks=masks)


@settings(max_examples=25)
@given(OPTIONS, SHAPES, st.integers(1, 8), st.booleans())
def test_with_all_ones_or_no_masks_it_is_adamw_bit_for_bit(
    options: dict[str, Any], shapes: list[list[int]], steps: int, masked: bool
) -> None:
    ours, theirs = Bag(shapes), Bag(shapes)
    sparse = SparseAdamW(ours.named_parameters(), masks=ones(ours) if masked else {}, **options)
    dense = torch.optim.AdamW(theirs.parameters(), foreach=False, **options)
    for step in range(steps):
        for model, optimizer in ((ours, sparse), (theirs, dense)):
            model.grads(step)
            optimizer.step()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert same_bits(p, q)
            assert sparse.state[p].keys() == dense.state[q].keys()
            for key, value in dense.state[q].items():
                assert same_bits(sparse.state[p][key], value)


@pytest.mark.slow
def test_hundreds_of_steps_of_a_real_network_are_those_of_adamw_bit_for_bit() -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(7, 33), nn.GELU(), nn.LayerNorm(33), nn.Linear(33, 3))
    theirs, x = deepcopy(ours), torch.randn(11, 7)
    sparse = SparseAdamW(ours.named_parameters(), lr=0.01, masks=ones(ours))
    dense = torch.optim.AdamW(theirs.parameters(), lr=0.01, foreach=False)
    for _ in range(300):
        for model, optimizer in ((ours, sparse), (theirs, dense)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert same_bits(p, q)


@settings(max_examples=25)
@given(OPTIONS, SHAPES, st.integers(1, 6), st.sampled_from([0.0, 0.2, 0.7]), st.integers(0, 99))
def test_trained_entries_follow_adamw_and_frozen_ones_never_move(
    options: dict[str, Any], shapes: list[list[int]], steps: int, density: float, seed: int
) -> None:
    """The slow obvious way: dense AdamW, whose frozen weights are put back after every step."""
    ours, theirs = (Bag(shapes, dtype=torch.float64) for _ in range(2))
    start, masks = values(ours), drawn_masks(ours, seed, density)
    sparse = SparseAdamW(ours.named_parameters(), masks=masks, **options)
    dense = torch.optim.AdamW(theirs.parameters(), **options)
    for step in range(steps):
        ours.grads(step)
        sparse.step()
        theirs.grads(step)
        dense.step()
        with torch.no_grad():
            for name, value in theirs.named_parameters():
                value.copy_(torch.where(masks[name], value, start[name]))
    expected = values(theirs)
    for name, value in ours.named_parameters():
        assert torch.equal(value[~masks[name]], start[name][~masks[name]])
        torch.testing.assert_close(value.detach(), expected[name], rtol=1e-12, atol=1e-12)


def test_two_steps_by_hand() -> None:
    """β = ½ and gradients 1, 3: m̂ = 1 then 7/3, v̂ = 1 then 19/3."""
    model = Bag([[2]])
    with torch.no_grad():
        model.p0.fill_(4.0)
    mask = {"p0": torch.tensor([True, False])}
    optimizer = SparseAdamW(
        model.named_parameters(), lr=0.5, betas=(0.5, 0.5), eps=0, weight_decay=0.25, masks=mask
    )
    model.p0.grad = torch.tensor([1.0, 8.0])
    optimizer.step()
    assert model.p0.tolist() == [3.0, 4.0]  # 4·(1 − ⅛) − ½
    model.p0.grad = torch.tensor([3.0, 8.0])
    optimizer.step()
    moved = 0.5 * (7 / 3) / (19 / 3) ** 0.5
    assert model.p0.tolist() == [pytest.approx(3.0 * 0.875 - moved), 4.0]


def test_memory_counts_two_moments_of_trained_entries_and_a_step_for_each_parameter() -> None:
    model = Bag([[10, 10], [7]])
    masks = {"p0": torch.zeros(10, 10, dtype=torch.bool)}
    masks["p0"][3, :5] = True
    optimizer = SparseAdamW(model.named_parameters(), masks=masks)
    model.grads(0)
    optimizer.step()
    assert memory(optimizer) == {"state": (2 * (5 + 7) + 2) * 4, "index": 5 * 8}


def test_a_loaded_state_continues_bit_for_bit() -> None:
    shapes = [[6, 5], [4], [3, 2]]
    model, optimizer = built(shapes)
    other, fresh = built(shapes)
    for step in range(3):
        model.grads(step)
        optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other.load_state_dict(saved["model"])
    fresh.load_state_dict(saved["optimizer"])
    for step in range(3, 6):
        for one, its in ((model, optimizer), (other, fresh)):
            one.grads(step)
            its.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert same_bits(p, q)


def test_a_state_of_other_masks_or_lengths_is_refused() -> None:
    model, optimizer = built([[8], [2]])
    model.grads(0)
    optimizer.step()
    _, fresh = built([[8], [2]], density=0.9)
    with pytest.raises(FedlensError, match="belongs to other masks or parameters"):
        fresh.load_state_dict(optimizer.state_dict())
    saved = deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg_sq"] = torch.zeros(8)
    with pytest.raises(FedlensError, match=r"exp_avg_sq of parameter 0 has shape \(8,\)"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize(
    "wrong", [{"lr": -1.0}, {"eps": -1.0}, {"weight_decay": -0.1}, {"betas": (0.9, 1.0)}]
)
def test_what_adamw_refuses_is_refused(wrong: dict[str, Any]) -> None:
    model = Bag([[3]])
    with pytest.raises(ValueError):
        torch.optim.AdamW(model.parameters(), **wrong)
    with pytest.raises(ValueError):
        SparseAdamW(model.named_parameters(), masks={}, **wrong)
