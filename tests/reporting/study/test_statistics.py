from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedlens.reporting.study.statistics import (
    Estimate,
    difference,
    estimate,
    holm,
    proportion,
    significant,
)

VALUES = st.lists(st.integers(0, 10_000).map(lambda n: n / 100), min_size=2, max_size=8)
P_VALUES = st.dictionaries(st.text(max_size=3), st.floats(0, 1), max_size=8)


def test_the_interval_of_three_seeds_by_hand() -> None:
    """s = 2, and Student's 97.5 % quantile with two degrees of freedom is 4.302653."""
    found = estimate([50.0, 52.0, 54.0])
    assert (found.mean, found.deviation, found.count) == (52.0, 2.0, 3)
    assert found.half == pytest.approx(4.302653 * 2 / sqrt(3), rel=1e-6)


def test_one_seed_has_a_mean_and_no_more() -> None:
    assert estimate([51.5]) == Estimate(51.5, None, None, 1)


def test_nothing_cannot_be_estimated_from() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        estimate([])


@given(VALUES.filter(lambda values: len(set(values)) > 1))
def test_intervals_are_those_of_scipy(values: list[float]) -> None:
    found = estimate(values)
    low, high = stats.t.interval(
        0.95, len(values) - 1, loc=sum(values) / len(values), scale=stats.sem(values)
    )
    assert found.half is not None
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx(
        (low, high), abs=1e-9
    )


def test_a_difference_is_over_the_seeds_both_have() -> None:
    found = difference({0: 50.0, 1: 60.0, 7: 99.0}, {0: 49.0, 1: 57.0, 8: 1.0})
    assert found is not None
    assert (found.estimate.mean, found.estimate.count) == (2.0, 2)


def test_without_a_shared_seed_there_is_no_difference() -> None:
    assert difference({0: 1.0}, {1: 1.0}) is None


def test_one_shared_seed_has_a_difference_but_no_p() -> None:
    found = difference({0: 3.0, 1: 9.0}, {0: 1.0})
    assert found is not None
    assert (found.estimate, found.p) == (Estimate(2.0, None, None, 1), None)


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=2, max_size=6))
def test_p_is_that_of_the_paired_t_test(pairs: list[tuple[int, int]]) -> None:
    first, second = ({k: float(pair[side]) for k, pair in enumerate(pairs)} for side in (0, 1))
    found = difference(first, second)
    assert found is not None
    gaps = {a - b for a, b in pairs}
    if len(gaps) == 1:  # there the test divides by nothing, and two seeds may agree by accident
        assert found.p is None
    else:
        told = stats.ttest_rel(list(first.values()), list(second.values())).pvalue
        assert found.p == pytest.approx(float(told), abs=1e-9)


def test_swapping_the_two_turns_the_sign_alone() -> None:
    first, second = {0: 5.0, 1: 7.0, 2: 6.5}, {0: 4.0, 1: 3.0, 2: 6.0}
    one, other = difference(first, second), difference(second, first)
    assert one is not None
    assert other is not None
    assert one.estimate.mean == -other.estimate.mean
    assert (one.estimate.half, one.p) == pytest.approx((other.estimate.half, other.p))


def test_holm_by_hand() -> None:
    """Of four: 0.01 × 4, 0.02 × 3, then 0.03 × 2 = 0.06 which is no less, then 0.9."""
    found = holm({"d": 0.9, "a": 0.01, "c": 0.03, "b": 0.02})
    assert list(found) == ["d", "a", "c", "b"]
    assert found == pytest.approx({"a": 0.04, "b": 0.06, "c": 0.06, "d": 0.9})


def test_tied_values_stay_tied_and_cost_the_full_factor() -> None:
    assert holm({"a": 0.02, "b": 0.02, "c": 0.5}) == pytest.approx({"a": 0.06, "b": 0.06, "c": 0.5})


def test_a_corrected_value_is_at_most_one() -> None:
    assert holm({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0}


@given(P_VALUES)
def test_holm_only_raises_and_keeps_the_order(p_values: dict[str, float]) -> None:
    found = holm(p_values)
    for key, p in p_values.items():
        assert p <= found[key] <= 1
        assert all(found[key] <= found[other] for other, q in p_values.items() if p < q)


@given(P_VALUES, st.randoms())
def test_holm_does_not_depend_on_the_order(p_values: dict[str, float], luck: object) -> None:
    items = list(p_values.items())
    luck.shuffle(items)  # type: ignore[attr-defined]
    assert holm(dict(items)) == holm(p_values)


@given(P_VALUES.filter(bool))
def test_holm_never_asks_more_than_bonferroni(p_values: dict[str, float]) -> None:
    found = holm(p_values)
    for key, p in p_values.items():
        assert found[key] <= min(1.0, p * len(p_values)) + 1e-12


@pytest.mark.parametrize(
    ("corrected", "count", "told"),
    [(0.049, 3, True), (0.05, 3, False), (0.0001, 2, False), (None, 3, False), (None, 1, False)],
)
def test_three_seeds_and_a_small_p_decide(corrected: float | None, count: int, told: bool) -> None:
    assert significant(corrected, count) is told


def test_wilsons_interval_by_hand() -> None:
    """8 of 10: centre (0.8 + z²/20) / (1 + z²/10) = 0.716740, half-width 0.226570."""
    assert proportion(0.8, 10) == pytest.approx((0.490162, 0.943318), abs=1e-6)
    assert proportion(0.0, 10) == pytest.approx((0.0, 0.277533), abs=1e-6)  # z² / (n + z²)
    assert proportion(1.0, 10) == pytest.approx((1 - 0.277533, 1.0), abs=1e-6)
    with pytest.raises(ValueError, match="at least one trial"):
        proportion(0.5, 0)


@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilsons_interval_is_scipys(counts: tuple[int, int]) -> None:
    hits, count = counts
    expected = stats.binomtest(hits, count).proportion_ci(0.95, method="wilson")
    assert proportion(hits / count, count) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_unknown_p_values_count_as_one() -> None:
    known = {"a": 0.01, "b": 0.02}
    whole = holm({**known, "c": 1.0, "d": 1.0})
    assert holm(known, tests=4) == {key: whole[key] for key in known} == {"a": 0.04, "b": 0.06}
