import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlens.errors import FedlensError
from fedlens.rng import Stream
from fedlens.sparse import voting
from fedlens.sparse.masks import SCOPES, Ranking, rank_weights
from fedlens.sparse.voting import VOTES, merge

STREAM = Stream(0, ())
SHAPE = {"a": (3, 4), "b": (11,), "c": (5, 2)}


def client(seed: int, scope: str = "global") -> Ranking:
    weights = {name: torch.zeros(shape) for name, shape in SHAPE.items()}
    return rank_weights(weights, "random", scope=scope, stream=Stream(seed, ()))


def clients(count: int, seed: int, scope: str) -> list[Ranking]:
    return [client(1000 * seed + index, scope) for index in range(count)]


def given_orders(*orders: list[int]) -> list[Ranking]:
    shapes = {"w": torch.Size([len(orders[0])])}
    return [Ranking(shapes, {("w",): torch.tensor(o, dtype=torch.int32)}) for o in orders]


def chosen(ones: list[Ranking], vote: str, density: float) -> set[int]:
    mask = merge(ones, vote, stream=STREAM).masks(density)["w"]
    return set(mask.nonzero()[:, 0].tolist())


def voted(orders: list[list[int]], first: int, needed: int) -> set[int]:
    """The definition: weights among the `first` of at least `needed` clients."""
    return {
        weight
        for weight in range(len(orders[0]))
        if sum(weight in order[:first] for order in orders) >= needed
    }


@pytest.mark.parametrize("vote", VOTES)
@pytest.mark.parametrize("scope", SCOPES)
@given(count=st.integers(1, 6), seed=st.integers(0, 999), density=st.floats(0, 1))
def test_a_vote_is_its_definition(
    vote: str, scope: str, count: int, seed: int, density: float
) -> None:
    """Between the votes of the largest choice that is not too many, and of one weight more."""
    ones = clients(count, seed, scope)
    merged = merge(ones, vote, stream=STREAM)
    quotas, needed = merged.quotas(density), VOTES[vote](count)
    assert sum(quotas.values()) == round(density * 33)
    for pool, order in merged.orders.items():
        found = set(order[: quotas[pool]].tolist())
        orders = [one.orders[pool].tolist() for one in ones]
        first = max(t for t in range(len(order) + 1) if len(voted(orders, t, needed)) <= len(found))
        assert voted(orders, first, needed) <= found
        if first < len(order):
            assert found <= voted(orders, first + 1, needed)


@pytest.mark.parametrize("vote", VOTES)
@pytest.mark.parametrize("scope", SCOPES)
@given(count=st.integers(1, 5), seed=st.integers(0, 999), density=st.floats(0, 1))
def test_every_vote_has_the_density_asked_for(
    vote: str, scope: str, count: int, seed: int, density: float
) -> None:
    masks = merge(clients(count, seed, scope), vote, stream=STREAM).masks(density)
    assert sum(int(mask.sum()) for mask in masks.values()) == round(density * 33)
    assert {name: tuple(mask.shape) for name, mask in masks.items()} == SHAPE


def test_the_three_votes_by_hand() -> None:
    """Weights 0, 3 and 4 are first for a client each; 1 is second for two; 2 is fourth for all,
    while every other weight is fifth or last for someone."""
    ones = given_orders([0, 1, 5, 2, 3, 4], [3, 1, 4, 2, 5, 0], [4, 5, 3, 2, 0, 1])
    assert chosen(ones, "union", 3 / 6) == {0, 3, 4}
    assert chosen(ones, "majority", 1 / 6) == {1}
    assert chosen(ones, "intersection", 1 / 6) == {2}


def test_majority_is_more_than_half() -> None:
    assert [VOTES["majority"](clients) for clients in range(1, 7)] == [1, 2, 2, 3, 3, 4]
    assert [VOTES["union"](clients) for clients in range(1, 4)] == [1, 1, 1]
    assert [VOTES["intersection"](clients) for clients in range(1, 4)] == [1, 2, 3]


@pytest.mark.parametrize("vote", VOTES)
@pytest.mark.parametrize("scope", SCOPES)
def test_clients_that_agree_are_followed(vote: str, scope: str) -> None:
    merged = merge([client(7, scope)] * 4, vote, stream=STREAM)
    for pool, order in client(7, scope).orders.items():
        assert torch.equal(merged.orders[pool], order)


@pytest.mark.parametrize("vote", VOTES)
def test_whose_vote_it_is_does_not_matter(vote: str) -> None:
    ones = clients(5, 3, "tensor")
    found, turned = (merge(order, vote, stream=STREAM) for order in (ones, ones[::-1]))
    assert all(torch.equal(found.orders[pool], turned.orders[pool]) for pool in found.orders)


@pytest.mark.parametrize("vote", VOTES)
def test_ties_go_by_the_draw_s_address(vote: str) -> None:
    """Two opposite orders: weights i and n − 1 − i have the same ranks."""
    ones = given_orders(list(range(40)), list(range(39, -1, -1)))
    first, again, other = (
        merge(ones, vote, stream=Stream(seed, ())).masks(0.5)["w"] for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    odd = [merge(ones, vote, stream=Stream(seed, ())).masks(11 / 40)["w"] for seed in range(6)]
    assert all(int(mask.sum()) == 11 for mask in odd)
    assert len({tuple(mask.tolist()) for mask in odd}) == 2
    assert torch.equal(first, other)  # 20 is a whole number of pairs, so nothing is left to draw


def test_a_vote_cut_into_blocks_is_the_same_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    ones = clients(5, 1, "global")
    whole = merge(ones, "majority", stream=STREAM)
    monkeypatch.setattr(voting, "BLOCK", 4)
    cut = merge(ones, "majority", stream=STREAM)
    assert all(torch.equal(whole.orders[pool], cut.orders[pool]) for pool in whole.orders)


def test_clients_may_come_one_at_a_time() -> None:
    ones = clients(3, 2, "global")
    found, held = (merge(some, "union", stream=STREAM) for some in (iter(ones), ones))
    assert all(torch.equal(found.orders[pool], held.orders[pool]) for pool in held.orders)


def test_votes_that_cannot_be_counted_are_refused() -> None:
    with pytest.raises(FedlensError, match="at least one client"):
        merge([], "union", stream=STREAM)
    with pytest.raises(FedlensError, match="did you mean 'majority'"):
        merge([client(0)], "majorty", stream=STREAM)
    with pytest.raises(FedlensError, match="different weights"):
        merge([client(0), client(0, "tensor")], "union", stream=STREAM)
    with pytest.raises(FedlensError, match="different weights"):
        merge([client(0), *given_orders([0, 1])], "union", stream=STREAM)
