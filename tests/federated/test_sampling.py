from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlens.federated.sampling import answers, cohort, local_steps, turns


def test_a_cohort_is_distinct_sorted_and_addressed_by_seed_and_round() -> None:
    drawn = cohort(3, 5, clients=100, size=10)
    torch.manual_seed(1)  # no global state has a say
    assert drawn == cohort(3, 5, clients=100, size=10)
    assert drawn == sorted(set(drawn))
    assert len(drawn) == 10
    assert set(drawn) <= set(range(100))
    others = [cohort(3, r, clients=100, size=10) for r in range(30) if r != 5]
    others += [cohort(s, 5, clients=100, size=10) for s in range(30) if s != 3]
    assert len({tuple(other) for other in [drawn, *others]}) == 59


def test_everybody_takes_part_when_asked_to() -> None:
    assert cohort(0, 1, clients=7, size=7) == list(range(7))


def test_clients_are_drawn_uniformly() -> None:
    """Σ (n_k − np)²/(np(1 − p)) has mean K; its standard deviation is about √(2K)."""
    clients, size, rounds = 50, 5, 4000
    counts = torch.zeros(clients, dtype=torch.float64)
    for round_ in range(rounds):
        counts[cohort(0, round_, clients=clients, size=size)] += 1
    p = size / clients
    statistic = float(((counts - rounds * p) ** 2).sum() / (rounds * p * (1 - p)))
    assert abs(statistic - clients) < 4 * (2 * clients) ** 0.5


def test_every_cohort_is_as_likely_as_any_other() -> None:
    """3 of 6 clients: 20 cohorts, each 200 times in 4000 rounds but for five deviations."""
    counts = Counter(tuple(cohort(1, round_, clients=6, size=3)) for round_ in range(4000))
    assert len(counts) == 20
    assert all(abs(count - 200) < 5 * 190**0.5 for count in counts.values())


def test_stragglers_do_every_number_of_steps_in_the_range() -> None:
    done = [local_steps(0, 1, client, fewest=2, most=5) for client in range(400)]
    assert set(done) == {2, 3, 4, 5}
    assert all(80 <= done.count(steps) <= 120 for steps in (2, 3, 4, 5))
    assert done == [local_steps(0, 1, client, fewest=2, most=5) for client in range(400)]
    assert done != [local_steps(0, 2, client, fewest=2, most=5) for client in range(400)]
    assert {local_steps(0, 1, client, fewest=4, most=4) for client in range(20)} == {4}


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
def test_in_turns_nobody_comes_again_before_everybody_came(
    clients: int, data: st.DataObject, seed: int
) -> None:
    size = data.draw(st.sampled_from([n for n in range(1, clients + 1) if clients % n == 0]))
    passes = clients // size
    rounds = [turns(seed, r, clients=clients, size=size) for r in range(1, 2 * passes + 1)]
    for once in (rounds[:passes], rounds[passes:]):
        assert sorted(client for cohort in once for client in cohort) == list(range(clients))
    assert all(cohort == sorted(cohort) for cohort in rounds)


def test_turns_are_shuffled_anew_and_addressed() -> None:
    first = [turns(0, r, clients=100, size=10) for r in range(1, 11)]
    assert first == [turns(0, r, clients=100, size=10) for r in range(1, 11)]
    assert first != [turns(0, r, clients=100, size=10) for r in range(11, 21)]
    assert first != [turns(1, r, clients=100, size=10) for r in range(1, 11)]
