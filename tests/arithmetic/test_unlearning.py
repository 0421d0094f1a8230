from collections.abc import Iterator, Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlens.arithmetic.merging import MergeSettings, merge
from fedlens.arithmetic.task_vectors import applied
from fedlens.arithmetic.unlearning import coefficients, forgetting_choice, recombined
from fedlens.errors import FedlensError
from fedlens.params import Params
from fedlens.rng import Stream

BASE = {"w": torch.tensor([1.0, 1.0])}
MOVES = {
    3: {"w": torch.tensor([4.0, 0.0])},
    5: {"w": torch.tensor([0.0, 8.0])},
    9: {"w": torch.tensor([2.0, 2.0])},
}
SHARES = {3: 0.5, 5: 0.25, 9: 0.25}


def edited(renormalise: bool = False, **keys: object) -> list[float]:
    chosen = coefficients(list(MOVES), **keys)  # type: ignore[arg-type]
    found = recombined(BASE, MOVES, chosen, SHARES, renormalise=renormalise)
    assert found["w"].dtype == torch.float32
    return [float(value) for value in found["w"]]


def test_coefficients_say_what_becomes_of_each_client() -> None:
    found = coefficients([9, 3, 5, 4], drop=[3], negate=[5], weights={9: 2})
    assert found == {9: 2.0, 3: 0.0, 5: -1.0, 4: 1.0}
    assert coefficients([1, 2]) == {1: 1.0, 2: 1.0}


def test_a_client_unknown_or_named_twice_is_refused() -> None:
    with pytest.raises(FedlensError, match="Client 7 took no part"):
        coefficients([1, 2], negate=[7])
    with pytest.raises(FedlensError, match="Client 2 is named twice"):
        coefficients([1, 2], drop=[2], negate=[2])
    with pytest.raises(FedlensError, match="Client 2 is named twice"):
        coefficients([1, 2], drop=[2, 2])
    with pytest.raises(FedlensError, match="Client 1 is named twice"):
        coefficients([1, 2], drop=[1], weights={1: 0.5})


def test_recombination_by_hand() -> None:
    assert edited() == [3.5, 3.5]
    assert edited(drop=[3]) == [1.5, 3.5]
    assert edited(negate=[5]) == [3.5, -0.5]
    assert edited(weights={9: 3.0}) == [4.5, 4.5]
    assert edited(drop=[3, 5, 9]) == [1.0, 1.0]


def test_renormalised_by_hand() -> None:
    """Without client 3 the others have ½ each; with 5 negated, all grow by 4/3."""
    assert edited(True) == [3.5, 3.5]
    assert edited(True, drop=[3]) == [2.0, 6.0]
    assert edited(True, negate=[5]) == pytest.approx([1 + 2.5 * 4 / 3, 1 - 1.5 * 4 / 3])
    assert edited(True, weights={3: 5.0}) == pytest.approx([1 + 10.5 / 3, 1 + 2.5 / 3])
    with pytest.raises(FedlensError, match="keep at least one"):
        edited(True, drop=[3, 9], negate=[5])


@given(st.integers(0, 999), st.integers(2, 6))
def test_a_client_dropped_is_one_never_sampled(seed: int, count: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    moves = {k: {"w": torch.randn(5, generator=draw)} for k in range(count)}
    sizes = torch.randint(1, 100, (count,), generator=draw).tolist()
    base = {"w": torch.randn(5, generator=draw)}
    shares = {k: size / sum(sizes) for k, size in enumerate(sizes)}
    found = recombined(base, moves, coefficients(range(count), drop=[0]), shares, renormalise=True)
    others = [moves[k] for k in range(1, count)]
    never = merge("average", others, sizes[1:], MergeSettings(), Stream(0, ()), ids=range(1, count))
    torch.testing.assert_close(found, applied(base, never), rtol=1e-6, atol=1e-6)


@given(st.permutations([3, 5, 9]))
def test_the_order_of_clients_does_not_matter_at_all(order: list[int]) -> None:
    """The sum of these depends on its order: 1 if the big ones meet first, else 0."""
    moves = {3: 1e16, 5: 1.0, 9: -1e16}
    given_so = {k: {"w": torch.tensor([moves[k]], dtype=torch.float64)} for k in order}
    found = recombined(
        {"w": torch.zeros(1)}, given_so, coefficients(order), dict.fromkeys(order, 1.0)
    )
    assert found["w"].tolist() == [0.0]


def test_a_dropped_client_is_not_even_read() -> None:
    class OnDemand(Mapping[int, Params]):
        def __getitem__(self, client: int) -> Params:
            assert client != 3
            return MOVES[client]

        def __iter__(self) -> Iterator[int]:
            return iter(MOVES)

        def __len__(self) -> int:
            return len(MOVES)

    found = recombined(BASE, OnDemand(), coefficients(list(MOVES), drop=[3]), SHARES)
    assert found["w"].tolist() == [1.5, 3.5]


def test_nothing_left_is_the_base_in_memory_of_its_own() -> None:
    found = recombined(BASE, MOVES, dict.fromkeys(MOVES, 0.0), SHARES)
    found["w"].zero_()
    assert BASE["w"].tolist() == [1.0, 1.0]


def test_clients_must_be_the_same_throughout() -> None:
    with pytest.raises(ValueError, match="the same clients"):
        recombined(BASE, MOVES, coefficients([3, 5]), SHARES)


def test_forgetting_stops_where_the_control_would_suffer() -> None:
    """0.76 is 95 % of 0.8: λ = 0.6 forgets more but keeps too little."""
    alphas, target = [0.0, 0.2, 0.4, 0.6], [0.9, 0.5, 0.2, 0.0]
    assert forgetting_choice(alphas, target, [0.8, 0.79, 0.77, 0.7]) == 0.4
    assert forgetting_choice(alphas, target, [0.8, 0.79, 0.77, 0.7], keep=0.8) == 0.6
    assert forgetting_choice(alphas, target, [0.8, 0.1, 0.1, 0.1]) == 0.0
    assert forgetting_choice([0.0, 1.0], [0.5, 0.25], [1.0, 0.95]) == 1.0  # just enough is enough


def test_of_equals_the_gentlest_is_chosen() -> None:
    assert forgetting_choice([1.0, 0.5, 0.0], [0.1, 0.1, 0.9], [0.8, 0.8, 0.8]) == 0.5
    assert forgetting_choice([-1.0, -0.5, 0.0], [0.1, 0.1, 0.9], [0.8, 0.8, 0.8]) == -0.5


def test_forgetting_needs_the_model_as_it_is() -> None:
    with pytest.raises(FedlensError, match="add λ = 0"):
        forgetting_choice([0.5, 1.0], [0.1, 0.1], [0.8, 0.8])
