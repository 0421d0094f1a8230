from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlens.federated.diagnostics import Delta, client_accuracy, make_diagnostics
from fedlens.params import Params
from fedlens.registry import diagnostic
from tests.federated.test_aggregation import elements

SHAPES = {"w": (2, 3), "b": (3,)}
SIZE = 9

coordinate = st.one_of(st.just(0.0), st.floats(-4, 4, width=16))
update = st.one_of(st.lists(coordinate, min_size=SIZE, max_size=SIZE), st.just([0.0] * SIZE))
rounds = st.lists(st.tuples(update, st.integers(1, 300)), min_size=1, max_size=7)
Round = list[tuple[list[float], int]]


def start() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape) for name, shape in SHAPES.items()}


class Observer:
    """All diagnostics of one round."""

    def __init__(self, start: Params) -> None:
        self.delta = Delta(start)
        self.rows = {name: make(start) for name, make in make_diagnostics(diagnostic.names).items()}

    def measure(self, parameters: Params) -> float:
        return self.delta.measure(parameters)

    def add(self, norm: float, examples: int) -> None:
        for row in self.rows.values():
            row.add(self.delta.values, norm, examples)

    def metrics(self, mean: Params) -> dict[str, Any]:
        return {name: row.result(mean) for name, row in self.rows.items()}


def observed(clients: Round, begin: dict[str, torch.Tensor] | None = None) -> Observer:
    begin = begin or start()
    observer = Observer(begin)
    for delta, examples in clients:
        flat = torch.tensor(delta)
        moved = {"w": begin["w"] + flat[:6].view(2, 3), "b": begin["b"] + flat[6:]}
        observer.add(observer.measure(moved), examples)
    return observer


def test_the_rows() -> None:
    assert diagnostic.names == ["update_norms", "drift", "cosine", "sign_agreement"]


def test_a_row_leaves_the_lent_update_alone() -> None:
    observer = Observer(start())
    norm = observer.measure({name: torch.full(shape, -2.0) for name, shape in SHAPES.items()})
    observer.add(norm, 3)
    assert all(bool((value == -2.0).all()) for value in observer.delta.values.values())


def metrics(clients: Round) -> dict[str, Any]:
    deltas = torch.tensor([delta for delta, _ in clients], dtype=torch.float64)
    shares = torch.tensor([examples for _, examples in clients], dtype=torch.float64)
    average = (shares / shares.sum()) @ deltas
    return observed(clients).metrics({"w": average[:6].view(2, 3), "b": average[6:]})


def mean(values: list[torch.Tensor]) -> float | None:
    return torch.stack(values).mean().item() if values else None


@given(rounds)
def test_one_pass_sees_what_all_pairs_show(clients: Round) -> None:
    deltas = torch.tensor([delta for delta, _ in clients], dtype=torch.float64)
    shares = torch.tensor([examples for _, examples in clients], dtype=torch.float64)
    shares /= shares.sum()
    found = metrics(clients)

    norms = deltas.norm(dim=1)
    assert found["update_norms"] == pytest.approx(norms.tolist(), rel=1e-5)
    distances = (deltas - shares @ deltas).square().sum(1)
    scale = max(1e-9, norms.max().item())
    assert found["drift"] == pytest.approx((shares @ distances).sqrt().item(), abs=1e-3 * scale)

    cosines = [a @ b / (a.norm() * b.norm()) for a, b in combinations(deltas[norms > 0], 2)]
    assert found["cosine"] == pytest.approx(mean(cosines), abs=1e-5)
    agreements = []
    for a, b in combinations(deltas, 2):
        agreements += [torch.where(a * b == 0, 0.5, (a.sign() == b.sign()).double()).mean()]
    assert found["sign_agreement"] == pytest.approx(mean(agreements), abs=1e-6)


def test_a_pair_by_hand() -> None:
    """3 of 9 coordinates agree, 1 disagrees, 5 did not move in one of the two: (3 + 5/2)/9."""
    one = [1.0, 2.0, 2.0, 0, 0, 0, -4.0, 0, 0]
    two = [1.0, 2.0, 2.0, 0, 0, 0, 4.0, 1.0, 0]
    found = metrics([(one, 30), (two, 10)])
    assert found["update_norms"] == pytest.approx([5.0, 26**0.5])
    assert found["cosine"] == pytest.approx((9 - 16) / (5 * 26**0.5), abs=1e-6)
    assert found["sign_agreement"] == pytest.approx(5.5 / 9)
    # They differ by (8, 1) in two coordinates: ¼·¾·65.
    assert found["drift"] == pytest.approx((0.1875 * 65) ** 0.5, rel=1e-5)


def test_a_single_client_has_no_pair_and_no_drift() -> None:
    found = metrics([([0.5] * SIZE, 3)])
    assert found["cosine"] is None
    assert found["sign_agreement"] is None
    assert found["drift"] == pytest.approx(0.0, abs=1e-3)


def test_clients_that_did_not_move_have_no_cosine_and_agree_by_chance() -> None:
    still = [0.0] * SIZE
    found = metrics([(still, 1), (still, 2)])
    assert (found["cosine"], found["sign_agreement"], found["drift"]) == (None, 0.5, 0.0)
    assert metrics([(still, 1), ([1.0] * SIZE, 2)])["cosine"] is None


def test_opposite_and_equal_updates_are_the_ends_of_the_scale() -> None:
    ahead, back = [1.0] * SIZE, [-2.0] * SIZE
    found = metrics([(ahead, 2), (back, 1)])
    assert (found["cosine"], found["sign_agreement"]) == (pytest.approx(-1), pytest.approx(0))
    found = metrics([(ahead, 2), (ahead, 1), (ahead, 1)])
    assert (found["cosine"], found["sign_agreement"]) == (pytest.approx(1), pytest.approx(1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_the_norm_of_what_is_not_finite_is_not_finite(bad: float) -> None:
    moved = start()
    moved["b"][1] = bad
    norm = Observer(start()).measure(moved)
    assert not torch.isfinite(torch.tensor(norm))


def test_what_was_measured_but_not_added_leaves_no_trace() -> None:
    clients: Round = [([1.0, -1.0, 0, 2, 0, 0, 0, 3, 1], 4), ([1.0] * SIZE, 2)]
    expected = metrics(clients)
    observer = observed(clients[:1])
    observer.measure({name: torch.full(shape, 7.0) for name, shape in SHAPES.items()})
    observer.add(observer.measure({n: torch.ones(s) for n, s in SHAPES.items()}), 2)
    assert observer.metrics(start())["cosine"] == expected["cosine"]


def test_tensors_do_not_grow_with_the_cohort() -> None:
    few, many = (observed([([1.0] * SIZE, 1)] * count) for count in (1, 40))
    assert elements(few) == elements(many)


def test_client_accuracy_by_hand() -> None:
    """Class 2 has no validation examples, so nobody is judged by it, and client 3 not at all."""
    held = torch.tensor([[10, 0, 0], [0, 4, 90], [3, 1, 0], [0, 0, 5]])
    found = client_accuracy([0.8, 0.4, None], held)
    accuracies = [0.8, 0.4, (3 * 0.8 + 0.4) / 4]
    assert found["mean"] == pytest.approx(sum(accuracies) / 3)
    assert found["worst_decile"] == pytest.approx(0.4)


@pytest.mark.parametrize(("clients", "worst"), [(10, 1), (11, 2), (20, 2), (21, 3)])
def test_the_worst_decile_is_a_tenth_of_the_clients_rounded_up(clients: int, worst: int) -> None:
    """Client k holds only class k, whose accuracy is k/100; class 0 has 0, not None."""
    per_class = [k / 100 for k in range(clients)]
    found = client_accuracy(per_class, torch.eye(clients, dtype=torch.long).flip(0) * 7)
    assert found["worst_decile"] == pytest.approx(sum(per_class[:worst]) / worst)
    assert found["mean"] == pytest.approx(sum(per_class) / clients)
