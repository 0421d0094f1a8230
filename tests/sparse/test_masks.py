from collections.abc import Iterator, Sequence
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedlens.errors import FedlensError
from fedlens.params import Params
from fedlens.registry import mask_rule
from fedlens.rng import Stream
from fedlens.sparse.masks import SCOPES, Masks, apportion, needs_scores, rank_weights, select

STREAM = Stream(0, ())
RULES = mask_rule.names
densities = st.one_of(st.sampled_from([0.0, 1.0, 1e-9, 0.1, 0.5, 1 / 3]), st.floats(0, 1))
sizes = st.lists(st.integers(1, 40), min_size=1, max_size=6)
SHAPE = {"a": (7, 5), "b": (30,), "c": (2, 3, 2)}


def tensors(levels: int | None = None, seed: int = 0) -> Masks:
    """Values without ties, or whole numbers below `levels` of either sign, most of them tied."""
    draw = torch.Generator().manual_seed(seed)
    total = sum(torch.Size(shape).numel() for shape in SHAPE.values())
    flat = (torch.randperm(total, generator=draw) - total // 2).float() + 0.25
    if levels:
        flat = torch.randint(-levels, levels, (total,), generator=draw).float()
    parts = flat.split([torch.Size(shape).numel() for shape in SHAPE.values()])
    return {n: part.view(s) for (n, s), part in zip(SHAPE.items(), parts, strict=True)}


def flat(values: Params) -> torch.Tensor:
    return torch.cat([values[name].reshape(-1) for name in sorted(values)])


def count(masks: Masks) -> int:
    return sum(int(mask.sum()) for mask in masks.values())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("scope", SCOPES)
@given(
    density=densities,
    levels=st.sampled_from([None, 1, 2]),
    seed=st.integers(0, 99),
)
def test_every_rule_trains_exactly_the_density_ties_or_not(
    rule: str, scope: str, density: float, levels: int | None, seed: int
) -> None:
    weights, scores = tensors(levels, seed), tensors(levels, seed + 1)
    stream = Stream(seed, ())
    masks = select(weights, rule, density, scores=scores, scope=scope, stream=stream)
    assert count(masks) == round(density * 77)
    assert {name: mask.shape for name, mask in masks.items()} == {
        name: value.shape for name, value in weights.items()
    }
    assert all(mask.dtype == torch.bool for mask in masks.values())


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "random"])
@pytest.mark.parametrize("scope", SCOPES)
@given(density=densities, levels=st.sampled_from([None, 3]), seed=st.integers(0, 99))
def test_nothing_left_out_outranks_what_is_trained(
    rule: str, scope: str, density: float, levels: int | None, seed: int
) -> None:
    weights, scores = tensors(levels, seed), tensors(levels, seed + 1)
    masks = select(weights, rule, density, scores=scores, scope=scope, stream=STREAM)
    values = scores if needs_scores(rule) else {n: w.abs() for n, w in weights.items()}
    pools: Sequence[Sequence[str]] = [sorted(masks)] if scope == "global" else [[n] for n in masks]
    for pool in pools:
        chosen = flat({name: masks[name] for name in pool})
        ranked = flat({name: values[name] for name in pool})
        if chosen.any() and not chosen.all():
            inside, outside = ranked[chosen], ranked[~chosen]
            if mask_rule[rule].traits["largest"]:
                assert inside.min() >= outside.max()
            else:
                assert inside.max() <= outside.min()


def test_every_rule_by_hand() -> None:
    weights = {"w": torch.tensor([[-4.0, 0.5, 2.0], [1.0, -0.1, 3.0]])}
    scores = {"w": torch.tensor([[0.3, 0.6, 0.1], [0.2, 0.5, 0.4]])}
    expected = {
        "least_sensitive": [[0, 0, 1], [1, 0, 0]],
        "most_sensitive": [[0, 1, 0], [0, 1, 0]],
        "lowest_magnitude": [[0, 1, 0], [0, 1, 0]],
        "highest_magnitude": [[1, 0, 0], [0, 0, 1]],
    }
    for rule, mask in expected.items():
        found = select(weights, rule, 1 / 3, scores=scores, stream=STREAM)["w"]
        assert found.int().tolist() == mask, rule


@pytest.mark.parametrize("density", [0.01, 0.25, 0.49])
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(
    ("low", "high"),
    [("lowest_magnitude", "highest_magnitude"), ("least_sensitive", "most_sensitive")],
)
def test_opposite_rules_choose_disjoint_weights_up_to_one_half(
    low: str, high: str, scope: str, density: float
) -> None:
    weights = tensors()
    ends = [
        flat(select(weights, rule, density, scores=weights, scope=scope, stream=STREAM))
        for rule in (low, high)
    ]
    assert ends[0].sum() == ends[1].sum() == round(density * 77)
    assert not (ends[0] & ends[1]).any()


@pytest.mark.parametrize("rule", ["lowest_magnitude", "highest_magnitude", "random"])
def test_rules_of_magnitude_and_chance_never_look_at_scores(rule: str) -> None:
    weights = tensors()
    poison = {name: torch.full_like(value, torch.nan) for name, value in weights.items()}
    without = select(weights, rule, 0.3, stream=STREAM)
    found = select(weights, rule, 0.3, scores=poison, stream=STREAM)
    assert torch.equal(flat(found), flat(without))


@pytest.mark.parametrize("rule", ["least_sensitive", "most_sensitive", "random"])
def test_rules_of_sensitivity_and_chance_never_look_at_weights(rule: str) -> None:
    weights, scores = tensors(), tensors(seed=1)
    poison = {name: torch.full_like(value, torch.nan) for name, value in weights.items()}
    expected = select(weights, rule, 0.3, scores=scores, stream=STREAM)
    found = select(poison, rule, 0.3, scores=scores, stream=STREAM)
    assert torch.equal(flat(found), flat(expected))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("scope", SCOPES)
def test_ties_go_by_the_draw_s_address(rule: str, scope: str) -> None:
    zeros = {name: torch.zeros(shape) for name, shape in SHAPE.items()}

    def chosen(stream: Stream) -> torch.Tensor:
        return flat(select(zeros, rule, 0.5, scores=zeros, scope=scope, stream=stream))

    assert torch.equal(chosen(Stream(0, ("client", 1))), chosen(Stream(0, ("client", 1))))
    assert not torch.equal(chosen(Stream(0, ("client", 1))), chosen(Stream(1, ("client", 1))))
    assert not torch.equal(chosen(Stream(0, ("client", 1))), chosen(Stream(0, ("client", 2))))


def test_tied_weights_are_chosen_alike_whatever_their_place() -> None:
    """Over 400 seeds each of ten tied weights is drawn about half the time."""
    zeros = {"w": torch.zeros(10)}
    drawn = torch.stack(
        [select(zeros, "lowest_magnitude", 0.5, stream=Stream(s, ()))["w"] for s in range(400)]
    )
    assert (drawn.float().mean(0) - 0.5).abs().max() < 0.1  # four standard deviations


def test_ties_of_two_rules_are_drawn_apart() -> None:
    """Else a rule whose values are all tied would seem to agree with the random one."""
    zeros = {"w": torch.zeros(200)}
    chosen = [select(zeros, rule, 0.5, scores=zeros, stream=STREAM)["w"] for rule in RULES]
    for i, one in enumerate(chosen):
        for other in chosen[:i]:
            assert 25 < int((one & other).sum()) < 75


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("scope", SCOPES)
def test_the_order_in_which_tensors_are_listed_does_not_matter(rule: str, scope: str) -> None:
    weights, scores = tensors(2), tensors(2, seed=1)
    turned = dict(reversed(weights.items()))
    found = select(turned, rule, 0.3, scores=scores, scope=scope, stream=STREAM)
    expected = select(weights, rule, 0.3, scores=scores, scope=scope, stream=STREAM)
    assert list(found) == list(turned)
    assert torch.equal(flat(found), flat(expected))


@pytest.mark.parametrize("scope", SCOPES)
@given(two=st.lists(densities, min_size=2, max_size=2).map(sorted))
def test_masks_of_one_preference_are_nested(scope: str, two: list[float]) -> None:
    order = rank_weights(tensors(2), "highest_magnitude", scope=scope, stream=STREAM)
    inner, outer = (flat(order.masks(density)) for density in two)
    assert not (inner & ~outer).any()


@given(sizes, st.floats(0, 1))
def test_one_density_fits_every_pool_to_half_a_weight(pools: list[int], density: float) -> None:
    total = round(density * sum(pools))
    quotas = apportion(pools, total)
    assert sum(quotas) == total
    assert all(0 <= quota <= size for quota, size in zip(quotas, pools, strict=True))
    half = Fraction(1, 2)
    low = max((quota - half) / size for quota, size in zip(quotas, pools, strict=True))
    high = min((quota + half) / size for quota, size in zip(quotas, pools, strict=True))
    assert low <= high


@given(sizes)
def test_a_smaller_count_never_gives_a_pool_more(pools: list[int]) -> None:
    before = [0] * len(pools)
    for total in range(1, sum(pools) + 1):
        quotas = apportion(pools, total)
        assert sum(now - then for now, then in zip(quotas, before, strict=True)) == 1
        assert all(now >= then for now, then in zip(quotas, before, strict=True))
        before = quotas


def test_quotas_by_hand() -> None:
    """At 10 of 100: 6.2, 2.6 and 1.2 weights; and a pool of none gets none."""
    assert apportion([62, 26, 12], 10) == [6, 3, 1]
    assert apportion([0, 3, 0], 2) == [0, 2, 0]
    assert apportion([1, 1, 1, 1], 2) == [1, 1, 0, 0]


def test_per_tensor_every_tensor_has_the_density_and_globally_none_need_have() -> None:
    weights = {"big": torch.arange(100.0) + 1000, "small": torch.arange(50.0)}
    spread = select(weights, "lowest_magnitude", 0.2, scope="tensor", stream=STREAM)
    assert [int(mask.sum()) for mask in spread.values()] == [20, 10]
    pooled = select(weights, "lowest_magnitude", 0.2, stream=STREAM)
    assert [int(mask.sum()) for mask in pooled.values()] == [0, 30]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_refused_by_name(bad: float) -> None:
    scores = tensors()
    scores["b"][3] = bad
    with pytest.raises(FedlensError, match="rank the weights of b are not finite"):
        select(tensors(), "least_sensitive", 0.5, scores=scores, stream=STREAM)
    with pytest.raises(FedlensError, match="rank the weights of b are not finite"):
        select(scores, "lowest_magnitude", 0.5, stream=STREAM)


@pytest.mark.parametrize("density", [-0.1, 1.1, float("nan")])
def test_a_density_is_a_fraction(density: float) -> None:
    with pytest.raises(FedlensError, match="fraction of weights trained"):
        select(tensors(), "random", density, stream=STREAM)


def test_a_misspelt_rule_or_scope_is_answered_with_the_nearest() -> None:
    with pytest.raises(FedlensError, match="did you mean 'least_sensitive'"):
        select(tensors(), "least_sensitiv", 0.5, stream=STREAM)
    with pytest.raises(FedlensError, match="did you mean 'tensor'"):
        select(tensors(), "random", 0.5, scope="tensors", stream=STREAM)


def test_scores_must_be_there_and_of_the_weights_shapes() -> None:
    with pytest.raises(ValueError, match="needs scores"):
        select(tensors(), "least_sensitive", 0.5, stream=STREAM)
    longer = tensors() | {"b": torch.zeros(31)}
    with pytest.raises(ValueError, match="b has"):
        select(tensors(), "least_sensitive", 0.5, scores=longer, stream=STREAM)


def test_a_mask_owns_its_memory() -> None:
    """A view would keep the masks of all tensors alive, and be written through."""
    masks = select(tensors(), "random", 0.5, stream=STREAM)
    storages = {mask.untyped_storage().data_ptr() for mask in masks.values()}
    assert len(storages) == len(masks)


def test_the_rules_of_the_package_are_these_five_in_this_order() -> None:
    assert [(row.label, needs_scores(row)) for row in mask_rule] == [
        ("least sensitive", True),
        ("most sensitive", True),
        ("lowest magnitude", False),
        ("highest magnitude", False),
        ("random", False),
    ]
    assert not any(row.parameters for row in mask_rule)


@pytest.fixture
def product() -> Iterator[str]:
    """A rule from outside the package, with a parameter."""

    @mask_rule(label="w^{power} times sensitivity", largest=True)
    def product(weight: Tensor, sensitivity: Tensor, *, power: float = 1.0) -> Tensor:
        return weight.abs() ** power * sensitivity

    yield "product"
    del mask_rule.added["product"]


def test_a_rule_from_outside_ranks_by_its_own_values(product: str) -> None:
    weights, scores = {"w": torch.tensor([1.0, -4.0, 2.0])}, {"w": torch.tensor([5.0, 1.0, 3.0])}
    for rule in (product, mask_rule[product]):
        masks = select(weights, rule, 1 / 3, scores=scores, stream=STREAM)
        assert masks["w"].tolist() == [False, False, True]
    masks = select(weights, product, 1 / 3, scores=scores, stream=STREAM, power=0.0)
    assert masks["w"].tolist() == [True, False, False]
    with pytest.raises(ValueError, match="needs scores"):
        select(weights, product, 0.5, stream=STREAM)
