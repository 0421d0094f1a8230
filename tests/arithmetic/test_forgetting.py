import pytest

from fedlens.arithmetic.forgetting import choose_forgetting_scale, coefficients
from fedlens.errors import FedlensError


def test_coefficients_say_what_becomes_of_each_client() -> None:
    found = coefficients([9, 3, 5, 4], drop=[3], negate=[5], weights={9: 2})
    assert found == {9: 2.0, 3: 0.0, 5: -1.0, 4: 1.0}
    assert coefficients([1, 2]) == {1: 1.0, 2: 1.0}


def test_a_client_unknown_or_named_twice_is_refused() -> None:
    with pytest.raises(FedlensError, match="Client 7 did not take part"):
        coefficients([1, 2], negate=[7])
    with pytest.raises(FedlensError, match="Client 2 is named twice"):
        coefficients([1, 2], drop=[2], negate=[2])
    with pytest.raises(FedlensError, match="Client 2 is named twice"):
        coefficients([1, 2], drop=[2, 2])
    with pytest.raises(FedlensError, match="Client 1 is named twice"):
        coefficients([1, 2], drop=[1], weights={1: 0.5})


def test_forgetting_stops_where_the_control_would_suffer() -> None:
    """0.76 is 95 % of 0.8: λ = 0.6 forgets more but keeps too little."""
    alphas, target = [0.0, 0.2, 0.4, 0.6], [0.9, 0.5, 0.2, 0.0]
    assert choose_forgetting_scale(alphas, target, [0.8, 0.79, 0.77, 0.7]) == 0.4
    assert choose_forgetting_scale(alphas, target, [0.8, 0.79, 0.77, 0.7], keep=0.8) == 0.6
    assert choose_forgetting_scale(alphas, target, [0.8, 0.1, 0.1, 0.1]) == 0.0
    assert (
        choose_forgetting_scale([0.0, 1.0], [0.5, 0.25], [1.0, 0.95]) == 1.0
    )  # just enough is enough


def test_of_equals_the_gentlest_is_chosen() -> None:
    assert choose_forgetting_scale([1.0, 0.5, 0.0], [0.1, 0.1, 0.9], [0.8, 0.8, 0.8]) == 0.5
    assert choose_forgetting_scale([-1.0, -0.5, 0.0], [0.1, 0.1, 0.9], [0.8, 0.8, 0.8]) == -0.5


def test_forgetting_needs_the_model_as_it_is() -> None:
    with pytest.raises(FedlensError, match="add λ = 0"):
        choose_forgetting_scale([0.5, 1.0], [0.1, 0.1], [0.8, 0.8])
