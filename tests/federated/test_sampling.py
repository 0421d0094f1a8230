from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlens.errors import FedlensError
from fedlens.federated.sampling import (
    answers,
    chain,
    cohort_size,
    cyclic,
    draw_cohort,
    drawn_steps,
    uniform,
)


def test_a_cohort_is_distinct_sorted_and_addressed_by_seed_and_round() -> None:
    drawn = uniform(3, 5, 100, 10)
    torch.manual_seed(1)  # no global state has a say
    assert drawn == uniform(3, 5, 100, 10)
    assert drawn == sorted(set(drawn))
    assert len(drawn) == 10
    assert set(drawn) <= set(range(100))
    others = [uniform(3, r, 100, 10) for r in range(30) if r != 5]
    others += [uniform(s, 5, 100, 10) for s in range(30) if s != 3]
    assert len({tuple(other) for other in [drawn, *others]}) == 59


def test_everybody_takes_part_when_asked_to() -> None:
    assert uniform(0, 1, 7, 7) == list(range(7))


def test_clients_are_drawn_uniformly() -> None:
    """Σ (n_k − np)²/(np(1 − p)) has mean K; its standard deviation is about √(2K)."""
    clients, size, rounds = 50, 5, 4000
    counts = torch.zeros(clients, dtype=torch.float64)
    for round_ in range(rounds):
        counts[uniform(0, round_, clients, size)] += 1
    p = size / clients
    statistic = float(((counts - rounds * p) ** 2).sum() / (rounds * p * (1 - p)))
    assert abs(statistic - clients) < 4 * (2 * clients) ** 0.5


def test_every_cohort_is_as_likely_as_any_other() -> None:
    """3 of 6 clients: 20 cohorts, each 200 times in 4000 rounds but for five deviations."""
    counts = Counter(tuple(uniform(1, round_, 6, 3)) for round_ in range(4000))
    assert len(counts) == 20
    assert all(abs(count - 200) < 5 * 190**0.5 for count in counts.values())


def test_stragglers_do_every_number_of_steps_in_the_range() -> None:
    done = [drawn_steps(0, 1, client, fewest=2, most=5) for client in range(400)]
    assert set(done) == {2, 3, 4, 5}
    assert all(80 <= done.count(steps) <= 120 for steps in (2, 3, 4, 5))
    assert done == [drawn_steps(0, 1, client, fewest=2, most=5) for client in range(400)]
    assert done != [drawn_steps(0, 2, client, fewest=2, most=5) for client in range(400)]
    assert {drawn_steps(0, 1, client, fewest=4, most=4) for client in range(20)} == {4}


@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.9])
def test_clients_drop_out_as_often_as_said(dropout: float) -> None:
    silent = [not answers(0, r, k, dropout=dropout) for r in range(50) for k in range(40)]
    assert sum(silent) / 2000 == pytest.approx(dropout, abs=0.04)
    assert silent == [not answers(0, r, k, dropout=dropout) for r in range(50) for k in range(40)]


def test_without_dropout_everybody_answers() -> None:
    assert all(answers(0, r, k, dropout=0.0) for r in range(20) for k in range(20))


def test_steps_and_dropout_do_not_share_a_draw_with_other_clients_or_seeds() -> None:
    def drawn(seed: int, round_: int) -> list[bool]:
        return [answers(seed, round_, k, dropout=0.5) for k in range(64)]

    assert len({tuple(drawn(seed, r)) for seed in range(4) for r in range(4)}) == 16


@given(clients=st.integers(1, 40), data=st.data(), seed=st.integers(0, 5))
def test_in_a_cycle_every_client_takes_part_once(
    clients: int, data: st.DataObject, seed: int
) -> None:
    size = data.draw(st.sampled_from([n for n in range(1, clients + 1) if clients % n == 0]))
    passes = clients // size
    rounds = [cyclic(seed, r, clients, size) for r in range(1, 2 * passes + 1)]
    for once in (rounds[:passes], rounds[passes:]):
        assert sorted(client for cohort in once for client in cohort) == list(range(clients))
    assert all(cohort == sorted(cohort) for cohort in rounds)


def test_cycles_are_shuffled_anew_and_addressed() -> None:
    first = [cyclic(0, r, 100, 10) for r in range(1, 11)]
    assert first == [cyclic(0, r, 100, 10) for r in range(1, 11)]
    assert first != [cyclic(0, r, 100, 10) for r in range(11, 21)]
    assert first != [cyclic(1, r, 100, 10) for r in range(1, 11)]


def test_a_cycle_needs_cohorts_of_equal_size() -> None:
    with pytest.raises(FedlensError, match="3 does not divide 10 clients"):
        cyclic(0, 1, 10, 3)


@given(size=st.sampled_from([1, 2, 6, 12]), round_=st.integers(1, 30), data=st.data())
def test_chains_cut_the_cohort_of_a_cycle(size: int, round_: int, data: st.DataObject) -> None:
    chains = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    cut = chain(3, round_, 12, size, chains=chains)
    assert [len(one) for one in cut] == [size // chains] * chains
    visited = [client for one in cut for client in one]
    assert sorted(visited) == cyclic(3, round_, 12, size)
    assert [visited] == chain(3, round_, 12, size)
    both = chain(3, round_, 12, size, chains=chains, order="opposite")
    assert both == [*cut, *(one[::-1] for one in cut)]


def test_chains_keep_the_order_of_the_shuffle() -> None:
    orders = [chain(0, round_, 20, 20)[0] for round_ in range(1, 9)]
    assert len({tuple(one) for one in orders}) == 8
    assert all(one != sorted(one) for one in orders)


def test_chains_are_of_equal_length() -> None:
    with pytest.raises(FedlensError, match="4 does not divide 10 clients"):
        chain(0, 1, 20, 10, chains=4)
    with pytest.raises(FedlensError, match="3 does not divide 10 clients"):
        chain(0, 1, 10, 3)


def test_the_tasks_of_a_cohort_know_their_chain() -> None:
    """A client does the same steps wherever it is in a chain, and drops out of all of them."""

    def opposite(*drawn: int) -> list[list[int]]:
        return chain(*drawn, order="opposite")

    found = draw_cohort(
        1, 1, [5] * 10, size=10, lr=0.1, local_steps=6, min_local_steps=1, dropout=0.3,
        sample=opposite,
    )  # fmt: skip
    one, two = found.chains
    assert [task.chain for task in found.tasks] == [0] * len(one) + [1] * len(two)
    assert [replace(task, chain=0) for task in two[::-1]] == one
    assert len(found.drawn) == 20
    assert len(found.dropped) == 20 - len(found.tasks) > 0
    assert draw_cohort(1, 1, [5] * 10, size=5, lr=0.1, local_steps=3).chains == []
    with pytest.raises(FedlensError, match=r"\[\[1, 2\], 3\] mix single clients and chains"):
        draw_cohort(1, 1, [5] * 9, size=3, lr=0.1, local_steps=3, sample=lambda *_: [[1, 2], 3])


@pytest.mark.parametrize(
    ("clients", "participation", "size"), [(100, 0.07, 7), (100, 0.071, 8), (5, 0.01, 1), (3, 1, 3)]
)
def test_a_cohort_has_its_share_of_the_clients_rounded_up(
    clients: int, participation: float, size: int
) -> None:
    assert cohort_size(clients, participation) == size


@pytest.mark.parametrize("participation", [0.0, 1.5, -1.0])
def test_a_share_that_is_none_is_refused(participation: float) -> None:
    with pytest.raises(FedlensError, match="participation="):
        cohort_size(10, participation)


def test_a_cohort_has_the_draws_of_its_parts() -> None:
    sizes = list(range(10, 30))
    found = draw_cohort(3, 2, sizes, size=8, lr=0.1, local_steps=6, min_local_steps=2, dropout=0.5)
    assert found.drawn == tuple(uniform(3, 2, 20, 8))
    present = [client for client in found.drawn if answers(3, 2, client, dropout=0.5)]
    assert [task.client for task in found.tasks] == present
    assert found.dropped == sorted(set(found.drawn) - set(present))
    assert 0 < len(found.dropped) < 8
    for task in found.tasks:
        assert task.steps == drawn_steps(3, 2, task.client, fewest=2, most=6)
        assert (task.round, task.lr, task.examples) == (2, 0.1, 10 + task.client)
        assert task.correction is None
    assert found.dropout
    assert found.stragglers


def test_by_default_everybody_drawn_does_every_step() -> None:
    found = draw_cohort(0, 1, [5] * 10, size=5, lr=0.1, local_steps=3, sample=cyclic)
    assert found.drawn == tuple(cyclic(0, 1, 10, 5))
    assert found.dropped == []
    assert {task.steps for task in found.tasks} == {3}
    assert not found.dropout
    assert not found.stragglers
