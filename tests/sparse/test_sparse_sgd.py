"""SparseSGDM against torch.optim.SGD, and frozen weights against their own bits."""

import io
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedlens.errors import FedlensError
from fedlens.sparse.optimizers.masked_optimizer import memory
from fedlens.sparse.optimizers.sparse_sgd import SparseSGDM

Tensors = dict[str, torch.Tensor]
SHAPES = st.lists(st.lists(st.integers(1, 5), max_size=4), min_size=1, max_size=3)
OPTIONS = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([1e-3, 0.1, 1.0]),
        "momentum": st.sampled_from([0.0, 0.5, 0.9]),
        "dampening": st.sampled_from([0.0, 0.3]),
        "weight_decay": st.sampled_from([0.0, 1e-4, 0.1]),
        "nesterov": st.booleans(),
        "maximize": st.booleans(),
    }
).map(lambda o: {**o, "nesterov": o["nesterov"] and o["momentum"] > 0 and o["dampening"] == 0})


class Bag(nn.Module):
    """Parameters p0, p1, … of the shapes given, and gradients without a loss."""

    def __init__(
        self, shapes: list[list[int]], seed: int = 0, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        for i, shape in enumerate(shapes):
            value = torch.randn(shape, generator=draw, dtype=dtype)
            self.register_parameter(f"p{i}", nn.Parameter(value))

    def grads(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        for value in self.parameters():
            grad = torch.randn(value.shape, generator=draw, dtype=value.dtype)
            value.grad = torch.empty_like(value).copy_(grad) if value.requires_grad else None


def values(model: nn.Module) -> Tensors:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def drawn_masks(model: nn.Module, seed: int, density: float) -> Tensors:
    """Random masks, of which the first trains something."""
    draw = torch.Generator().manual_seed(seed)
    masks = {
        name: torch.rand(value.shape, generator=draw) < density
        for name, value in model.named_parameters()
    }
    next(iter(masks.values())).view(-1)[0] = True
    return masks


def ones(model: nn.Module) -> Tensors:
    return {n: torch.ones_like(v, dtype=torch.bool) for n, v in model.named_parameters()}


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.equal(ours.detach().view(torch.int32), theirs.detach().view(torch.int32))


def built(
    shapes: list[list[int]], masks: Mapping[str, torch.Tensor] | None = None, **options: Any
) -> tuple[Bag, SparseSGDM]:
    model = Bag(shapes)
    masks = drawn_masks(model, 1, 0.5) if masks is None else masks
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01} | options
    return model, SparseSGDM(model.named_parameters(), masks=masks, **options)


@settings(max_examples=25)
@given(OPTIONS, SHAPES, st.integers(1, 8), st.booleans())
def test_with_all_ones_or_no_masks_it_is_sgd_bit_for_bit(
    options: dict[str, Any], shapes: list[list[int]], steps: int, masked: bool
) -> None:
    ours, theirs = Bag(shapes), Bag(shapes)
    sparse = SparseSGDM(ours.named_parameters(), masks=ones(ours) if masked else {}, **options)
    dense = torch.optim.SGD(theirs.parameters(), **options)
    for step in range(steps):
        for model, optimizer in ((ours, sparse), (theirs, dense)):
            model.grads(step)
            optimizer.step()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert same_bits(p, q)
            expected = dense.state[q].get("momentum_buffer")
            found = sparse.state[p].get("momentum_buffer")
            assert (found is None) == (expected is None)
            assert found is None or same_bits(found, expected)


@pytest.mark.slow
def test_hundreds_of_steps_of_a_real_network_are_those_of_sgd_bit_for_bit() -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(7, 33), nn.GELU(), nn.LayerNorm(33), nn.Linear(33, 3))
    theirs, x = deepcopy(ours), torch.randn(11, 7)
    options = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3, "nesterov": True}
    sparse = SparseSGDM(ours.named_parameters(), masks=ones(ours), **options)
    dense = torch.optim.SGD(theirs.parameters(), **options)
    for _ in range(300):
        for model, optimizer in ((ours, sparse), (theirs, dense)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert same_bits(p, q)


@settings(max_examples=25)
@given(
    OPTIONS, SHAPES, st.integers(1, 6), st.sampled_from([0.0, 0.2, 0.7]), st.integers(0, 99),
    st.booleans(),
)  # fmt: skip
def test_trained_entries_follow_sgd_and_frozen_ones_never_move(
    options: dict[str, Any], shapes: list[list[int]], steps: int, density: float, seed: int,
    fused: bool,
) -> None:  # fmt: skip
    """The slow obvious way: dense SGD, whose frozen weights are put back after every step."""
    ours, theirs = (Bag(shapes, dtype=torch.float64) for _ in range(2))
    start, masks = values(ours), drawn_masks(ours, seed, density)
    sparse = SparseSGDM(ours.named_parameters(), masks=masks, fused=fused, **options)
    dense = torch.optim.SGD(theirs.parameters(), **options)
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
        if options["momentum"] and value.requires_grad:
            found = sparse.state[value]["momentum_buffer"]
            buffer = dense.state[dict(theirs.named_parameters())[name]]["momentum_buffer"]
            assert found.numel() == masks[name].count_nonzero()
            torch.testing.assert_close(found.view(-1), buffer[masks[name]], rtol=1e-12, atol=1e-12)


@settings(max_examples=40)
@given(
    OPTIONS,
    st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    st.integers(0, 99),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_it_is_dense_sgd_whose_frozen_weights_are_put_back_bit_for_bit(
    options: dict[str, Any], density: float, seed: int, dtype: torch.dtype
) -> None:
    """Two groups, a kernel in channels_last, and in every step a parameter without gradients."""
    shapes = [[7, 11], [5, 3, 2, 2], [40], [13]]
    ours, theirs = (Bag(shapes, seed, dtype) for _ in range(2))
    for model in (ours, theirs):
        model.p1.data = model.p1.data.to(memory_format=torch.channels_last)
    start, masks = values(ours), drawn_masks(ours, seed, density)
    del masks["p3"]  # trained whole
    groups = ([], [])
    for model, group in zip((ours, theirs), groups, strict=True):
        named = list(model.named_parameters())
        group += [{"params": named[:2]}, {"params": named[2:], "lr": 0.3}]
    sparse = SparseSGDM(groups[0], masks=masks, **options)
    dense = torch.optim.SGD(groups[1], **options)
    for step in range(4):
        for model, optimizer in ((ours, sparse), (theirs, dense)):
            model.grads(step)
            list(model.parameters())[step].grad = None
            optimizer.step()
        with torch.no_grad():
            for name, mask in masks.items():
                value = theirs.get_parameter(name)
                value.copy_(torch.where(mask, value, start[name]))
    for name, value in ours.named_parameters():
        other, mask = theirs.get_parameter(name), masks.get(name)
        assert torch.equal(value, other)
        if options["momentum"] and value.requires_grad:
            buffer = dense.state[other]["momentum_buffer"]
            expected = buffer if mask is None or mask.all() else buffer[mask]
            assert torch.equal(sparse.state[value]["momentum_buffer"], expected)


def test_one_step_by_hand() -> None:
    model = Bag([[3]])
    with torch.no_grad():
        model.p0.copy_(torch.tensor([1.0, 2.0, 4.0]))
    mask = torch.tensor([True, False, True])
    optimizer = SparseSGDM(
        model.named_parameters(), lr=0.5, momentum=0.5, weight_decay=0.25, masks={"p0": mask}
    )
    model.p0.grad = torch.tensor([1.0, 8.0, 1.0])
    optimizer.step()  # v = g + w/4 = [1.25, 2]
    assert model.p0.tolist() == [0.375, 2.0, 3.0]
    optimizer.step()  # v = [0.625, 1] + 1 + [0.375, 3] / 4 = [1.71875, 2.75]
    assert model.p0.tolist() == [0.375 - 1.71875 / 2, 2.0, 3.0 - 2.75 / 2]


def test_weight_decay_and_stale_momentum_leave_frozen_weights_alone() -> None:
    model, optimizer = built([[6, 5], [4]], weight_decay=0.5)
    model.grads(0)
    optimizer.step()
    before, masks = values(model), drawn_masks(model, 1, 0.5)
    for _ in range(50):  # momentum and decay alone
        for value in model.parameters():
            value.grad = torch.zeros_like(value)
        optimizer.step()
    for name, value in model.named_parameters():
        assert same_bits(value[~masks[name]], before[name][~masks[name]])
        assert (value != before[name])[masks[name]].all()


def test_frozen_nan_and_negative_zero_keep_their_bits() -> None:
    model = Bag([[2, 2]])
    with torch.no_grad():
        model.p0.copy_(torch.tensor([[float("nan"), -0.0], [float("inf"), 1.0]]))
    start = model.p0.detach().clone()
    mask = torch.tensor([[False, False], [False, True]])
    optimizer = SparseSGDM(model.named_parameters(), 0.1, 0.9, masks={"p0": mask})
    model.p0.grad = torch.full((2, 2), float("nan"))
    model.p0.grad[1, 1] = 1.0
    optimizer.step()
    assert same_bits(model.p0[~mask], start[~mask])
    assert model.p0[1, 1].item() == pytest.approx(0.9)


def test_channels_last_weights_and_gradients_step_like_contiguous_ones() -> None:
    shape = [4, 3, 2, 2]
    masks = drawn_masks(Bag([shape]), 3, 0.4)
    plain, optimizer = built([shape], masks)
    last = Bag([shape])
    last.p0.data = last.p0.data.to(memory_format=torch.channels_last)
    turned = {"p0": masks["p0"].to(memory_format=torch.channels_last)}
    other = SparseSGDM(
        last.named_parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, masks=turned
    )
    for step in range(3):
        for model, one in ((plain, optimizer), (last, other)):
            model.grads(step)
            one.step()
    assert last.p0.grad is not None
    assert not last.p0.grad.is_contiguous()
    assert last.p0.is_contiguous(memory_format=torch.channels_last)
    assert same_bits(plain.p0, last.p0.contiguous())
    buffers = [one.state[m.p0]["momentum_buffer"] for m, one in ((plain, optimizer), (last, other))]
    assert same_bits(*buffers)


def test_unmasked_parameters_are_trained_whole_beside_masked_ones() -> None:
    mask = torch.tensor([True, False, False])
    model, optimizer = built([[3], [3]], {"p1": mask}, weight_decay=0.0, momentum=0.0)
    start = values(model)
    model.grads(0)
    optimizer.step()
    assert (model.p0 != start["p0"]).all()
    assert ((model.p1 != start["p1"]) == mask).all()


def test_memory_counts_trained_entries_only() -> None:
    model = Bag([[10, 10], [7], [3]])
    masks = {"p0": torch.zeros(10, 10, dtype=torch.bool), "p2": torch.zeros(3, dtype=torch.bool)}
    masks["p0"][3, :5] = True
    optimizer = SparseSGDM(model.named_parameters(), 0.1, 0.9, masks=masks)
    assert memory(optimizer) == {"state": 0, "index": 5 * 8}
    model.grads(0)
    optimizer.step()
    assert memory(optimizer) == {"state": (5 + 7) * 4, "index": 5 * 8}
    dense = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    dense.step()
    assert memory(dense) == {"state": (100 + 7) * 4, "index": 0}


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_loaded_state_continues_bit_for_bit(nesterov: bool) -> None:
    shapes = [[6, 5], [4], [3, 2]]
    model, optimizer = built(shapes, nesterov=nesterov)
    other, fresh = built(shapes, nesterov=nesterov, lr=0.7)
    for step in range(3):
        model.grads(step)
        optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other.load_state_dict(saved["model"])
    fresh.load_state_dict(saved["optimizer"])
    assert fresh.param_groups[0].keys() == optimizer.param_groups[0].keys()
    for step in range(3, 6):
        for one, its in ((model, optimizer), (other, fresh)):
            one.grads(step)
            its.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert same_bits(p, q)


def test_a_state_of_other_masks_is_refused_and_nothing_changes() -> None:
    model, optimizer = built([[8], [2]])
    model.grads(0)
    optimizer.step()
    saved = optimizer.state_dict()
    rolled = {name: mask.roll(1) for name, mask in drawn_masks(Bag([[8], [2]]), 1, 0.5).items()}
    _, fresh = built([[8], [2]], rolled)
    with pytest.raises(FedlensError, match="belongs to other masks or parameters"):
        fresh.load_state_dict(saved)
    assert not fresh.state
    dense = torch.optim.SGD(Bag([[8], [2]]).parameters(), 0.1, 0.9)
    with pytest.raises(FedlensError, match="belongs to other masks or parameters"):
        fresh.load_state_dict(dense.state_dict())
    renamed = nn.ParameterDict({"a": nn.Parameter(torch.zeros(8)), "b": torch.zeros(2)})
    named = dict(zip(("a", "b"), drawn_masks(model, 1, 0.5).values(), strict=True))
    with pytest.raises(FedlensError, match="belongs to other masks or parameters"):
        SparseSGDM(renamed.named_parameters(), 0.1, masks=named).load_state_dict(saved)


def test_states_saved_by_earlier_versions_load() -> None:
    """The digest of the masks is that of int64 positions, though fewer bytes are kept now."""
    model = nn.ParameterDict({"a": torch.zeros(2, 3), "b": torch.zeros(2)})
    masks = {"a": torch.tensor([[True, False, False], [False, True, True]])}
    optimizer = SparseSGDM(model.named_parameters(), 0.1, 0.9, masks=masks)
    digest = "e2d5d5ddeaeb43271c8468c417f3f9aa563bc6aff6b165fe05aeaa01ad0b6d25"
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["masks_digest"] == digest
    saved["state"] = {0: {"momentum_buffer": torch.tensor([1.0, 2.0, 3.0])}}
    optimizer.load_state_dict(saved)
    model["a"].grad = torch.zeros(2, 3)
    optimizer.step()
    torch.testing.assert_close(model["a"], -0.09 * torch.tensor([[1.0, 0, 0], [0, 2.0, 3.0]]))


def test_momentum_of_another_length_is_refused() -> None:
    model, optimizer = built([[8]])
    model.grads(0)
    optimizer.step()
    saved = deepcopy(optimizer.state_dict())
    saved["state"][0]["momentum_buffer"] = torch.zeros(8)
    with pytest.raises(FedlensError, match=r"momentum_buffer of parameter 0 has shape \(8,\)"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize(
    ("mask", "sentence"),
    [
        ({"q": torch.ones(3, dtype=torch.bool)}, "q has no parameter"),
        ({"p0": torch.ones(2, dtype=torch.bool)}, r"p0 is \(2,\), not \(3,\)"),
        ({"p0": torch.ones(3)}, "p0 is torch.float32, not bool"),
        ({"p1": torch.ones(2, dtype=torch.bool)}, "p1 would train a parameter that does not"),
        ({f"q{i}": torch.ones(1) for i in range(5)}, "q0 .*; q1 .*; q2 .*; and 2 more"),
        ({"p0": torch.zeros(3, dtype=torch.bool)}, "Nothing is left to train"),
    ],
)
def test_masks_that_do_not_fit_are_refused(mask: Tensors, sentence: str) -> None:
    model = Bag([[3], [2]])
    model.p1.requires_grad_(False)
    with pytest.raises(FedlensError, match=sentence):
        SparseSGDM(model.named_parameters(), 0.1, masks=mask)


def test_a_refusal_comes_before_anything_is_frozen() -> None:
    model = Bag([[3], [2]])
    masks = {"p0": torch.zeros(3, dtype=torch.bool), "p1": torch.ones(9, dtype=torch.bool)}
    with pytest.raises(FedlensError):
        SparseSGDM(model.named_parameters(), 0.1, masks=masks)
    assert model.p0.requires_grad


def test_masks_need_named_parameters() -> None:
    model = Bag([[3]])
    with pytest.raises(FedlensError, match=r"pass model.named_parameters\(\)"):
        SparseSGDM(model.parameters(), 0.1, masks=ones(model))
    assert len(SparseSGDM(model.parameters(), 0.1, masks={}).param_groups[0]["params"]) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": -1.0},
        {"momentum": -0.1},
        {"weight_decay": -0.1},
        {"nesterov": True},
        {"nesterov": True, "momentum": 0.9, "dampening": 0.1},
    ],
)
def test_what_sgd_refuses_is_refused(wrong: dict[str, Any]) -> None:
    model = Bag([[3]])
    with pytest.raises(ValueError):
        torch.optim.SGD(model.parameters(), **wrong)
    with pytest.raises(ValueError):
        SparseSGDM(model.named_parameters(), masks={}, **wrong)


def test_sparse_gradients_are_refused() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = SparseSGDM(model.named_parameters(), 0.1, masks={})
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="dense gradients only"):
        optimizer.step()


def autograd_nodes(output: torch.Tensor) -> int:
    seen: set[Any] = set()
    ahead = [output.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            ahead += [parent for parent, _ in node.next_functions]
    return len(seen)


def test_the_backward_pass_stops_below_the_lowest_trained_layer() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    full = autograd_nodes(model(x).sum())
    model(x).sum().backward()
    masks = {name: torch.zeros_like(mask) for name, mask in ones(model).items()}
    masks["4.weight"][0] = True
    optimizer = SparseSGDM(model.named_parameters(), 0.1, masks=masks)
    wanted = [name for name, value in model.named_parameters() if value.requires_grad]
    assert wanted == ["4.weight"] == optimizer.param_groups[0]["param_names"]
    assert all(v.grad is None for n, v in model.named_parameters() if n != "4.weight")
    below = x
    for layer in model[:4]:
        below = layer(below)
        assert not below.requires_grad
    output = model(x).sum()
    assert autograd_nodes(output) < full / 2
    output.backward()
    optimizer.step()


def test_a_second_optimizer_takes_the_same_masks() -> None:
    masks = {"p0": torch.tensor([True, False]), "p1": torch.tensor([False, False])}
    model = Bag([[2], [2]])
    for _ in range(2):
        optimizer = SparseSGDM(model.named_parameters(), 0.1, masks=masks)
        assert optimizer.param_groups[0]["param_names"] == ["p0"]


def test_groups_have_settings_of_their_own_and_may_be_added_later() -> None:
    model = Bag([[4], [4], [4]])
    frozen = torch.zeros(4, dtype=torch.bool)
    named = list(model.named_parameters())
    groups = [{"params": [named[0]]}, {"params": [named[1]], "lr": 1.0}]
    optimizer = SparseSGDM(groups, lr=0.5, masks={"p0": frozen, "p1": ~frozen})
    assert [one["param_names"] for one in optimizer.param_groups] == [[], ["p1"]]
    assert named[0] in groups[0]["params"]  # the caller's own groups are left alone
    optimizer.add_param_group({"params": [named[2]], "lr": 0.25})
    start = values(model)
    for value in (model.p1, model.p2):
        value.grad = torch.ones(4)
    optimizer.step()
    assert torch.equal(model.p1, start["p1"] - 1)
    assert torch.equal(model.p2, start["p2"] - 0.25)
    optimizer.load_state_dict(optimizer.state_dict())


def test_a_schedule_changes_the_learning_rate_and_a_closure_gives_the_loss() -> None:
    model, optimizer = built([[4]], momentum=0.0, weight_decay=0.0, lr=1.0)
    start, mask = values(model)["p0"], drawn_masks(model, 1, 0.5)["p0"]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model.p0.sum()
        loss.backward()
        return loss

    optimizer.param_groups[0]["lr"] = 0.25
    assert torch.equal(optimizer.step(closure), start.sum())  # type: ignore[call-overload]
    assert torch.equal(model.p0, start - 0.25 * mask)


def test_parameters_without_gradients_are_passed_over() -> None:
    model, optimizer = built([[4], [4]])
    start = values(model)
    model.p0.grad = torch.ones(4)
    optimizer.step()
    assert torch.equal(model.p1, start["p1"])
    assert model.p1 not in optimizer.state
