from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import trim_mean

from fedlens import params
from fedlens.arithmetic.merging import merge
from fedlens.arithmetic.task_vectors import task_vector
from fedlens.errors import FedlensError
from fedlens.federated.algorithms.choice import make_aggregator
from fedlens.federated.server.aggregation import Aggregator, Contribution
from fedlens.params import Params
from fedlens.registry import aggregator, merge_method
from fedlens.rng import Stream

CLIENTS = count()
MERGES = {
    *("task_arithmetic", "ties", "dare", "breadcrumbs", "consensus"),
    *("fisher_average", "regmean", "tsv_merge", "iso_c"),
}
STREAMING = ("mean", "clipped_mean", "fednova")
NAMES = tuple(aggregator.names)
STREAM = Stream(0, ("merge",))
Found = dict[str, torch.Tensor]


def start() -> Found:
    draw = torch.Generator().manual_seed(0)
    return {"w": torch.randn(3, 4, generator=draw), "b": torch.randn(5, generator=draw)}


def cohort(count: int, seed: int = 0, spread: float = 0.1) -> list[Contribution]:
    draw = torch.Generator().manual_seed(seed)
    made = []
    for client in range(count):
        moved = {n: v + spread * torch.randn(v.shape, generator=draw) for n, v in start().items()}
        squares = sum(float((moved[n] - v).double().square().sum()) for n, v in start().items())
        examples = int(torch.randint(1, 500, (), generator=draw))
        steps = 1 + 9 * float(torch.rand((), generator=draw))
        made.append(Contribution(client, moved, examples, steps, squares**0.5))
    return made


def informed(name: str, ones: list[Contribution]) -> list[Contribution]:
    """With the statistics that the row needs, different for every client."""
    needs = aggregator[name].traits.get("needs")
    if needs is None or "w" not in ones[0].parameters:
        return ones
    made = []
    for one in ones:
        draw = torch.Generator().manual_seed(one.client)
        inputs = torch.randn(9, 4, generator=draw)
        fishers = {n: torch.rand(v.shape, generator=draw) for n, v in start().items()}
        statistics = fishers if needs == "fisher" else {"w": inputs.T @ inputs / 9}
        made.append(replace(one, statistics=statistics))
    return made


def change(name: str, ones: list[Contribution], begin: Params | None = None, **keys: Any) -> Found:
    rule = make_aggregator(name, keys)(begin or start(), STREAM)
    for one in informed(name, ones):
        rule.add(one)
    return rule.change()


def by_numpy(ones: list[Contribution], rule: Callable[[np.ndarray], np.ndarray]) -> Found:
    """`rule` maps the clients' values [n, ...] in float64 to one; the start is subtracted."""
    return {
        name: torch.from_numpy(
            rule(np.stack([one.parameters[name].double().numpy() for one in ones]))
            - value.double().numpy()
        )
        for name, value in start().items()
    }


def assert_close(found: Found, expected: Found, tolerance: float = 1e-12) -> None:
    assert set(found) == set(expected)
    for name, value in found.items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance)


def scalar(value: float, examples: int = 1, steps: float = 1.0) -> Contribution:
    return Contribution(next(CLIENTS), {"w": torch.tensor([value])}, examples, steps, abs(value))


def of_scalars(name: str, ones: list[Contribution], **keys: Any) -> float:
    return change(name, ones, {"w": torch.zeros(1)}, **keys)["w"].item()


cohorts = st.builds(
    cohort, st.integers(1, 12), st.integers(0, 999), st.sampled_from([1e-4, 0.1, 10.0])
)


@given(cohorts)
def test_the_mean_is_weighted_by_examples(ones: list[Contribution]) -> None:
    weights = [one.weight for one in ones]
    expected = by_numpy(ones, lambda values: np.average(values, axis=0, weights=weights))
    assert_close(change("mean", ones), expected)


@pytest.mark.parametrize("name", NAMES)
@given(ones=cohorts, seed=st.integers(0, 99))
def test_the_order_of_clients_does_not_matter(
    name: str, ones: list[Contribution], seed: int
) -> None:
    order = torch.randperm(len(ones), generator=torch.Generator().manual_seed(seed)).tolist()
    assert_close(change(name, [ones[k] for k in order]), change(name, ones))


@pytest.mark.parametrize("name", NAMES)
def test_the_same_order_gives_the_same_bits(name: str) -> None:
    assert params.digest(change(name, cohort(9))) == params.digest(change(name, cohort(9)))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in MERGES])
def test_clients_that_agree_are_followed_and_clients_that_stay_change_nothing(name: str) -> None:
    agreed = [scalar(0.5, examples, steps=3.0) for examples in (1, 7, 4)]
    assert of_scalars(name, agreed) == pytest.approx(0.5, rel=1e-12)
    assert of_scalars(name, [scalar(0.0), scalar(0.0, 3)]) == 0.0


def test_the_mean_by_hand() -> None:
    assert of_scalars("mean", [scalar(1.0, 1), scalar(4.0, 3), scalar(-2.0, 4)]) == 0.625


def test_the_clipped_mean_by_hand() -> None:
    """At most 2 long: (1·1 + 3·2 + 4·(−2))/8."""
    ones = [scalar(1.0, 1), scalar(4.0, 3), scalar(-8.0, 4)]
    assert of_scalars("clipped_mean", ones, clip_norm=2.0) == pytest.approx(-1 / 8)


@given(cohorts)
def test_a_clipped_mean_is_no_longer_than_its_limit(ones: list[Contribution]) -> None:
    found = change("clipped_mean", ones, clip_norm=0.05)
    assert sum(float(v.square().sum()) for v in found.values()) <= 0.05**2 * (1 + 1e-6)
    assert_close(change("clipped_mean", ones, clip_norm=1e9), change("mean", ones))


def test_fednova_by_hand() -> None:
    """p = (¼, ¾), τ = (2, 4): (¼·2 + ¾·4) · (¼·1/2 + ¾·6/4) = 3.5 · 1.25."""
    ones = [scalar(1.0, 1, steps=2.0), scalar(6.0, 3, steps=4.0)]
    assert of_scalars("fednova", ones) == pytest.approx(4.375)


@given(cohorts, st.floats(1, 50))
def test_fednova_of_equal_steps_is_the_mean(ones: list[Contribution], steps: float) -> None:
    equal = [replace(one, effective_steps=steps) for one in ones]
    assert_close(change("fednova", equal), change("mean", equal))


@given(cohorts)
def test_fednova_is_the_paper_s(ones: list[Contribution]) -> None:
    total = sum(one.weight for one in ones)
    shares = np.array([one.weight / total for one in ones])
    steps = np.array([one.effective_steps for one in ones])
    expected = {}
    for name, value in start().items():
        deltas = [(one.parameters[name].double() - value.double()).numpy() for one in ones]
        normalised = np.stack(deltas) / steps.reshape(-1, *[1] * value.ndim)
        expected[name] = torch.from_numpy(
            (shares * steps).sum() * np.tensordot(shares, normalised, axes=1)
        )
    assert_close(change("fednova", ones), expected)


@given(cohorts)
def test_the_median_is_numpy_s_for_odd_and_even_cohorts(ones: list[Contribution]) -> None:
    assert_close(change("median", ones), by_numpy(ones, lambda values: np.median(values, axis=0)))


@given(cohorts, st.sampled_from([0.0, 0.1, 0.25, 0.4, 0.49]))
def test_the_trimmed_mean_is_scipy_s(ones: list[Contribution], trim: float) -> None:
    expected = by_numpy(ones, lambda values: trim_mean(values, trim, axis=0))
    assert_close(change("trimmed_mean", ones, trim=trim), expected)


@pytest.mark.parametrize(("name", "least"), [("median", 3), ("trimmed_mean", 4)])
def test_a_wild_client_does_not_move_a_robust_row(name: str, least: int) -> None:
    honest = [scalar(1.0 + 0.01 * k) for k in range(least)]
    keys = {"trim": 0.25} if name == "trimmed_mean" else {}
    found = of_scalars(name, [*honest, scalar(1e30)], **keys)
    assert 1.0 <= found <= 1.04


def elements(thing: Any) -> int:
    """Of all tensors that can be reached from an object."""
    if isinstance(thing, torch.Tensor):
        return thing.numel()
    if isinstance(thing, dict):
        return sum(elements(value) for value in thing.values())
    if isinstance(thing, list | tuple):
        return sum(elements(value) for value in thing)
    return elements(vars(thing)) if hasattr(thing, "__dict__") else 0


@pytest.mark.parametrize("name", STREAMING)
def test_a_streaming_row_holds_one_sum_whatever_the_cohort(name: str) -> None:
    begin = start()
    rule = make_aggregator(name)(begin, STREAM)
    size = elements(begin)
    for one in cohort(30):
        rule.add(one)
        assert elements(rule) == 2 * size  # the start and the sum


@pytest.mark.parametrize("name", NAMES)
def test_what_a_client_lent_may_change_afterwards(name: str) -> None:
    expected = change(name, cohort(5))
    rule = make_aggregator(name)(start(), STREAM)
    lent = start()
    for one in informed(name, cohort(5)):
        params.assign(lent, one.parameters)
        beside = params.copy(one.statistics)
        rule.add(replace(one, parameters=lent, statistics=beside))
        params.assign(beside, params.zeros_like(beside))
    params.assign(lent, params.zeros_like(lent))
    assert params.digest(rule.change()) == params.digest(expected)


@pytest.mark.parametrize("name", sorted(MERGES))
def test_a_merge_is_that_of_the_clients_task_vectors(name: str) -> None:
    ones, stream = informed(name, cohort(5)), Stream(3, ("m", 8))
    keys = {"scale": 0.7, **({"density": 0.5} if name in ("ties", "dare", "breadcrumbs") else {})}
    expected = merge(
        [task_vector(start(), one.parameters) for one in ones],
        name,
        weights=[one.weight for one in ones],
        stream=stream,
        ids=[one.client for one in ones],
        statistics=[one.statistics for one in ones] if ones[0].statistics else None,
        **keys,
    )
    rule = make_aggregator(name, keys)(start(), stream)
    for one in ones:
        rule.add(one)
    assert params.digest(rule.change()) == params.digest(expected)


def test_every_merge_but_the_average_is_a_row() -> None:
    assert set(merge_method.names) - {"average"} == MERGES
    assert set(NAMES) == MERGES | {"mean", "clipped_mean", "fednova", "median", "trimmed_mean"}


def test_fednova_refuses_clients_without_effective_steps() -> None:
    with pytest.raises(FedlensError, match="only SGD"):
        change("fednova", [replace(one, effective_steps=None) for one in cohort(2)])


def test_a_plain_function_aggregates_changes_in_the_order_of_the_clients() -> None:
    ones = cohort(4)

    def mean(updates: list[Params], weights: list[float], *, power: float = 1.0) -> Found:
        shares = [weight**power / sum(w**power for w in weights) for weight in weights]
        assert weights == [one.weight for one in ones]
        assert all(value.dtype == torch.float64 for one in updates for value in one.values())
        return {
            name: sum(
                (share * one[name] for share, one in zip(shares, updates, strict=True)),
                torch.zeros_like(value),
            )
            for name, value in updates[0].items()
        }

    def of(rule: Aggregator, ordered: list[Contribution]) -> Found:
        for one in ordered:
            rule.add(one)
        return rule.change()

    expected = of(make_aggregator(mean)(start(), STREAM), ones)
    assert_close(expected, change("mean", ones))
    backwards = of(make_aggregator(mean)(start(), STREAM), ones[::-1])
    assert params.digest(backwards) == params.digest(expected)
    uniform = of(make_aggregator(mean, {"power": 0.0})(start(), STREAM), ones)
    assert_close(uniform, change("mean", [replace(one, weight=1) for one in ones]))


def test_a_function_s_result_must_fit_the_model() -> None:
    rule = make_aggregator(lambda updates, weights: {"w": updates[0]["w"]})(start(), STREAM)
    rule.add(cohort(1)[0])
    with pytest.raises(FedlensError, match="missing b"):
        rule.change()


def test_a_class_of_one_s_own_streams() -> None:
    class Largest:
        def __init__(self, start: Params, stream: Stream, *, factor: float) -> None:
            self.start, self.best, self.norm, self.factor = start, dict(start), -1.0, factor

        def add(self, one: Contribution) -> None:
            if one.norm > self.norm:
                self.best, self.norm = params.copy(one.parameters), one.norm

        def change(self) -> Found:
            return {n: self.factor * (self.best[n] - v).double() for n, v in self.start.items()}

    rule = make_aggregator(Largest, {"factor": 2.0})({"w": torch.zeros(1)}, STREAM)
    for value in (1.0, -3.0, 2.0):
        rule.add(scalar(value))
    assert rule.change()["w"].item() == -6.0


def test_unknown_rows_and_parameters_are_refused() -> None:
    with pytest.raises(FedlensError, match="did you mean 'median'"):
        make_aggregator("medain")
    with pytest.raises(FedlensError, match="trim is not read by 'median'"):
        make_aggregator("median", {"trim": 0.1})
    with pytest.raises(FedlensError, match="trim"):
        make_aggregator("trimmed_mean", {"trim": 0.5})
