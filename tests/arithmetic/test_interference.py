import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlens.arithmetic.interference import (
    barrier,
    cosine_matrix,
    disentanglement,
    normalised,
    sign_conflict,
    sign_conflict_matrix,
)
from fedlens.arithmetic.task_vectors import cosine
from fedlens.errors import FedlensError
from fedlens.params import Params


def vectors(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Small whole numbers, so that zeros abound."""
    draw = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"w": (2, 3), "b": (4,), "s": (), "none": (0,)}
    return [
        {n: torch.randint(-1, 2, shape, generator=draw).float() for n, shape in shapes.items()}
        for _ in range(count)
    ]


def rows(*values: list[float]) -> list[dict[str, torch.Tensor]]:
    return [{"w": torch.tensor(value)} for value in values]


cohorts = st.builds(vectors, st.integers(2, 5), st.integers(0, 999))


def test_sign_conflict_by_hand() -> None:
    """Moved by two or more: the first, the second and the fourth; both ways: the second."""
    cohort = rows(
        [1.0, 2.0, 3.0, -1.0, 0.0], [4.0, -0.1, 0.0, -2.0, 0.0], [0.0, 5.0, 0.0, -3.0, 0.0]
    )
    assert sign_conflict(cohort) == pytest.approx(1 / 3)
    assert sign_conflict_matrix(cohort) == [[0.0, 1 / 3, 0.0], [1 / 3, 0.0, 0.5], [0.0, 0.5, 0.0]]


def test_a_conflict_needs_two() -> None:
    assert sign_conflict(rows([1.0, 0.0], [0.0, -1.0])) is None
    assert sign_conflict(rows([1.0, 2.0])) is None
    assert sign_conflict_matrix(rows([1.0, 0.0], [0.0, -1.0])) == [[0.0, None], [None, 0.0]]
    assert sign_conflict(rows([1.0, 2.0], [-1.0, -2.0])) == 1.0


@pytest.mark.slow
@given(cohorts)
def test_the_matrix_holds_the_conflict_of_each_pair(
    cohort: list[dict[str, torch.Tensor]],
) -> None:
    found = sign_conflict_matrix(cohort)
    for one, row in zip(cohort, found, strict=True):
        for other, value in zip(cohort, row, strict=True):
            assert value == sign_conflict([one, other])


@given(cohorts)
def test_the_cosine_matrix_holds_the_cosine_of_each_pair(
    cohort: list[dict[str, torch.Tensor]],
) -> None:
    found = cosine_matrix(cohort)
    for place, (one, row) in enumerate(zip(cohort, found, strict=True)):
        assert row[place] in (1.0, None)
        for other, value in zip(cohort, row, strict=True):
            assert value == pytest.approx(cosine(one, other), abs=1e-12)


def test_cosines_by_hand() -> None:
    found = cosine_matrix(rows([3.0, 4.0], [4.0, 3.0], [0.0, 0.0]))
    assert found[0] == [1.0, pytest.approx(24 / 25), None]
    assert found[2] == [None, None, None]


class Toy:
    """Labels are the signs of w·x on two points a task, and every model asked is counted."""

    def __init__(self, first: list[list[float]], second: list[list[float]]) -> None:
        self.tasks = torch.tensor(first), torch.tensor(second)
        self.asked: list[list[float]] = []

    def __call__(self, parameters: Params) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.append(parameters["w"].tolist())
        one, two = ((points @ parameters["w"] > 0).long() for points in self.tasks)
        return one, two


def test_disentanglement_by_hand() -> None:
    """θ = (1, 1) + α₁(−2, 0) + α₂(0, −2). Task 1 has (1, 0) and (2, 1); task 2 has (0, 1) only.

    At (1, 1) θ is (−1, −1), and task 1's model (−1, 1): 2x + y is −1 under it and −3 merged.
    At (½, 1) θ is (0, −1), task 1's model (0, 1): 2x + y is 1 and turns to −1, half its points.
    """
    base = {"w": torch.tensor([1.0, 1.0])}
    toy = Toy([[1.0, 0.0], [2.0, 1.0]], [[0.0, 1.0]])
    found = disentanglement(base, *rows([-2.0, 0.0], [0.0, -2.0]), [0.5, 1.0], toy)
    assert found.alphas == [0.5, 1.0]
    assert found.first == [[0.5, 0.5], [0.0, 0.0]]
    assert found.second == [[0.0, 0.0], [0.0, 0.0]]
    assert found.error == [[0.25, 0.25], [0.0, 0.0]]
    swapped = Toy([[0.0, 1.0]], [[1.0, 0.0], [2.0, 1.0]])
    other = disentanglement(base, *rows([0.0, -2.0], [-2.0, 0.0]), [0.5, 1.0], swapped)
    assert other.second == [list(column) for column in zip(*found.first, strict=True)]
    assert base["w"].tolist() == [1.0, 1.0]


@given(st.integers(0, 999), st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.5, 2.0]), unique=True))
def test_disentanglement_is_the_plain_double_loop(seed: int, alphas: list[float]) -> None:
    draw = torch.Generator().manual_seed(seed)
    base, one, two = torch.randn(3, 4, generator=draw)
    toy = Toy(*torch.randn(2, 6, 4, generator=draw).tolist())
    found = disentanglement({"w": base}, {"w": one}, {"w": two}, alphas, toy)
    calls = len(toy.asked)
    for i, a in enumerate(alphas):
        for j, b in enumerate(alphas):
            merged = toy({"w": base + a * one + b * two})
            first = float((toy({"w": base + a * one})[0] != merged[0]).double().mean())
            second = float((toy({"w": base + b * two})[1] != merged[1]).double().mean())
            assert (found.first[i][j], found.second[i][j]) == (first, second)
            assert found.error[i][j] == (first + second) / 2
    wanted = {(a, b) for a in [*alphas, 0.0] for b in [*alphas, 0.0]} - {(0.0, 0.0)}
    assert calls == len(wanted) + (0.0 in alphas)  # every model once


def test_tasks_in_coordinates_of_their_own_do_not_interfere() -> None:
    base = {"w": torch.tensor([0.1, 0.1])}
    toy = Toy([[1.0, 0.0], [-1.0, 0.0]], [[0.0, 1.0], [0.0, -1.0]])
    found = disentanglement(base, *rows([-2.0, 0.0], [0.0, -3.0]), [-1.0, 0.0, 0.4, 1.0], toy)
    assert found.error == [[0.0] * 4] * 4


def test_accuracy_is_normalised_by_each_task_s_own() -> None:
    assert normalised([0.4, 0.9], [0.8, 0.9]) == ([0.5, 1.0], 0.75)
    assert normalised([0.4, 0.1], [0.8, 0.0]) == ([0.5, None], 0.5)
    assert normalised([0.1], [0.0]) == ([None], None)


def test_the_barrier_by_hand() -> None:
    """The chord from 1 to 3 is 1.5 at ¼ and 2 at ½; α = 2 does not count."""
    assert barrier([0.0, 0.25, 0.5, 1.0, 2.0], [1.0, 2.0, 2.25, 3.0, 99.0]) == 0.5
    assert barrier([1.0, -1.0, 0.0], [3.0, 99.0, 1.0]) == 0.0


@given(st.lists(st.floats(0.0, 1.0), max_size=6), st.floats(-5, 5), st.floats(-5, 5))
def test_a_straight_line_has_no_barrier_and_a_valley_has_none_either(
    between: list[float], start: float, slope: float
) -> None:
    alphas = [0.0, *between, 1.0]
    assert barrier(alphas, [start + slope * a for a in alphas]) == pytest.approx(0.0, abs=1e-12)
    assert barrier(alphas, [start + (a - 0.5) ** 2 for a in alphas]) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("alphas", [[0.0, 0.5], [0.5, 1.0]])
def test_a_barrier_needs_both_ends(alphas: list[float]) -> None:
    with pytest.raises(FedlensError, match="add α = 0 and α = 1"):
        barrier(alphas, [1.0, math.pi])


def test_vectors_that_do_not_match_are_refused() -> None:
    for call in (sign_conflict, sign_conflict_matrix, cosine_matrix):
        with pytest.raises(ValueError, match="w has shape"):
            call(rows([1.0], [1.0, 2.0]))
