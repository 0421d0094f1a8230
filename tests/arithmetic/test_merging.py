from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlens import params
from fedlens.arithmetic.merging import merge
from fedlens.errors import FedlensError
from fedlens.params import Params
from fedlens.registry import merge_method
from fedlens.rng import Stream

STREAM = Stream(0, (7,))
METHODS = merge_method.names
Vectors = list[dict[str, torch.Tensor]]


def cohort(count: int, seed: int = 0) -> Vectors:
    """Rounded, so that magnitudes tie and some entries are zero."""
    draw = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"w": (3, 4), "b": (7,), "s": (), "none": (0,)}
    return [
        {n: (2 * torch.randn(shape, generator=draw)).round() / 2 for n, shape in shapes.items()}
        for _ in range(count)
    ]


def statistics_of(vector: Params) -> Any:
    """Some that belong to a vector, whatever its place: of both kinds that methods need."""
    draw = torch.Generator().manual_seed(
        int(1e3 * sum(float(v.abs().sum()) for v in vector.values()))
    )
    fishers = {name: torch.rand(v.shape, generator=draw) for name, v in sorted(vector.items())}
    inputs = torch.randn(9, 4, generator=draw)
    return {
        "fisher": fishers,
        "input_moments": {"w": inputs.T @ inputs / 9} if vector["w"].shape == (3, 4) else {},
    }


def merged(method: str, vectors: Any, weights: Any = None, ids: Any = None, **keys: Any) -> Any:
    """With those of the parameters, and of the statistics, that the method has."""
    own = {one.name for one in merge_method[method].parameters} if method in METHODS else keys
    keys = {key: value for key, value in keys.items() if key in own}
    if method in METHODS and (needs := merge_method[method].traits.get("needs")):
        keys["statistics"] = [statistics_of(vector)[needs] for vector in vectors]
    return merge(vectors, method, weights=weights, stream=STREAM, ids=ids, **keys)


def row(method: str, *vectors: list[float], weights: Any = None, **keys: Any) -> list[float]:
    """Vectors of one tensor, merged."""
    maps = [{"w": torch.tensor(vector)} for vector in vectors]
    found = merged(method, maps, weights, **keys)["w"]
    assert found.dtype == torch.float64
    return [float(value) for value in found]


cohorts = st.builds(cohort, st.integers(1, 6), st.integers(0, 999))


def test_the_average_by_hand() -> None:
    assert row("average", [1.0, 0.0], [3.0, -4.0]) == [2.0, -2.0]
    assert row("average", [1.0, 0.0], [3.0, -4.0], weights=[3, 1]) == [1.5, -1.0]
    assert row("average", [1.0, 0.0], [3.0, -4.0], weights=[3, 1], scale=2.0) == [3.0, -2.0]


def test_task_arithmetic_by_hand() -> None:
    """A plain sum; weights 3 : 1 are factors of 1.5 and 0.5."""
    vectors = [1.0, 0.0], [3.0, -4.0], [1.0, 1.0]
    assert row("task_arithmetic", *vectors) == [5.0, -3.0]
    assert row("task_arithmetic", *vectors[:2], weights=[30, 10], scale=0.5) == [1.5, -1.0]


def test_ties_by_hand() -> None:
    """Half of each stays: (4, −3, ·, ·), (2, ·, ·, −5), (−1, −3, ·, ·); then 4 + 2 against 1."""
    vectors = [4.0, -3.0, 1.0, 2.0], [2.0, 1.0, 0.5, -5.0], [-1.0, -3.0, 0.5, 0.25]
    assert row("ties", *vectors, density=0.5) == [3.0, -3.0, 0.0, -5.0]
    assert row("ties", *vectors, density=0.5, scale=0.5) == [1.5, -1.5, 0.0, -2.5]


def test_ties_elects_and_averages_by_weight() -> None:
    """1·4 against 3·2 gives the minus; then (1·4 + 3·8)/4 where both agree."""
    assert row("ties", [4.0, 4.0], [-2.0, 8.0], weights=[1, 3], density=1.0) == [-2.0, 7.0]


def test_ties_trims_the_whole_vector_not_every_tensor() -> None:
    vector = {"b": torch.tensor([[1.0, -2.0]]), "a": torch.tensor([9.0, 8.0, -7.0])}
    found = merged("ties", [vector], density=0.6)
    assert found["a"].tolist() == [9.0, 8.0, -7.0]
    assert found["b"].tolist() == [[0.0, 0.0]]


def test_equal_magnitudes_are_kept_from_the_front_and_in_exact_number() -> None:
    vector = {"b": torch.ones(4), "a": torch.tensor([1.0, -1.0, 2.0, 0.5])}
    found = merged("ties", [vector], density=0.5)
    assert found["a"].tolist() == [1.0, -1.0, 2.0, 0.0]
    assert found["b"].tolist() == [1.0, 0.0, 0.0, 0.0]


@given(st.integers(0, 999), st.sampled_from([0.01, 0.1, 0.25, 0.5, 0.75, 0.99, 1.0]))
def test_thinning_is_that_of_a_plain_stable_sort(seed: int, density: float) -> None:
    vector = cohort(1, seed)[0]
    flat = torch.cat([vector[name].reshape(-1) for name in sorted(vector)])
    order = sorted(range(20), key=lambda place: (-abs(float(flat[place])), place))
    expected = torch.zeros(20, dtype=torch.float64)
    for place in order[: round(density * 20)]:
        expected[place] = flat[place]
    found = merged("ties", [vector], density=density)
    assert torch.equal(torch.cat([found[name].reshape(-1) for name in sorted(found)]), expected)


def test_opposite_vectors_leave_nothing() -> None:
    vector = [1.0, -2.0, 0.5]
    opposite = [-value for value in vector]
    for method in ("average", "task_arithmetic", "ties", "breadcrumbs", "consensus"):
        assert row(method, vector, opposite) == [0.0] * 3


def test_breadcrumbs_by_hand() -> None:
    """Of ten entries the largest goes, the next three stay, six small ones go; in every tensor."""
    values = [10.0, -9.0, 8.0, 7.0, 6.0, 5.0, -4.0, 3.0, 2.0, 1.0]
    kept = [0.0, -9.0, 8.0, 7.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert row("breadcrumbs", values, density=0.3, outliers=0.1) == kept
    both = [{"w": torch.tensor(values), "small": torch.tensor(values).view(5, 2) / 100}]
    assert merged("breadcrumbs", both, density=0.3, outliers=0.1)["small"].count_nonzero() == 3
    assert row("breadcrumbs", values, density=1.0, outliers=0.2) == [0.0, 0.0, *values[2:]]


def test_breadcrumbs_are_averaged_by_weight() -> None:
    found = row(
        "breadcrumbs",
        [8.0, 4.0, 1.0, 0.0],
        [0.0, 2.0, 8.0, 4.0],
        weights=[3, 1],
        density=0.25,
        outliers=0.25,
        scale=2.0,
    )
    assert found == [0.0, 6.0, 0.0, 2.0]


def test_consensus_by_hand() -> None:
    """Of two, each must be at least 0.4 times the other: 3 and 2; not 4 and 1, not 1 and 10."""
    vectors = [3.0, 4.0, 1.0, 0.0], [2.0, -1.0, 10.0, 0.0]
    assert row("consensus", *vectors) == [2.5, 0.0, 0.0, 0.0]
    assert row("consensus", *vectors, agreement=1) == [2.5, 1.5, 5.5, 0.0]
    assert row("consensus", *vectors, threshold=0.25, scale=2.0) == [5.0, 3.0, 0.0, 0.0]


def test_consensus_masks_measure_against_the_weighted_sum() -> None:
    """τ = 1.5·4 + 0.5·1.7 = 6.85, and 1.7 < 0.4·5.15; unweighted, 1.7 ≥ 0.4·4."""
    assert row("consensus", [4.0], [1.7]) == pytest.approx([2.85])
    assert row("consensus", [4.0], [1.7], weights=[3, 1]) == [0.0]


def test_consensus_drops_what_many_clients_have_in_common() -> None:
    """Each of n equal vectors is active where 1 ≥ 0.4·(n − 1): three are, four are not."""
    assert row("consensus", *[[1.0]] * 3, threshold=0.4) == [1.0]
    assert row("consensus", *[[1.0]] * 4, threshold=0.4) == [0.0]
    assert row("consensus", *[[1.0]] * 4, threshold=0.3) == [1.0]


@given(st.integers(1, 40), st.integers(0, 999))
def test_consensus_keeps_equal_vectors_by_default_however_many(count: int, seed: int) -> None:
    vector = torch.randn(50, generator=torch.Generator().manual_seed(seed))
    found = merge([{"w": vector}] * count, "consensus")["w"]
    torch.testing.assert_close(found, vector.double())


def test_the_default_threshold_of_consensus_is_0_4_at_most() -> None:
    vectors = [{"w": torch.randn(99, generator=torch.Generator().manual_seed(s))} for s in (0, 1)]
    expected = merge(vectors, "consensus", threshold=0.4)
    assert params.digest(merge(vectors, "consensus")) == params.digest(expected)


def test_dare_keeps_a_share_and_rescales_it() -> None:
    vector = {"w": torch.ones(100, 100)}
    found = merged("dare", [vector], density=0.25)["w"]
    assert set(found.unique().tolist()) == {0.0, 4.0}
    assert 2350 < found.count_nonzero() < 2650  # 2500 ± 3.5 standard deviations
    assert merged("dare", [vector], density=0.25, scale=0.5)["w"].max() == 2.0


def test_dare_is_right_on_average() -> None:
    vectors = [{"w": torch.full((20_000,), value)} for value in (1.0, 5.0)]
    found = merged("dare", vectors, weights=[3, 1], density=0.5)["w"]
    assert float(found.mean()) == pytest.approx(2.0, rel=0.02)
    # Draws of two clients are independent: a quarter of the entries each way.
    assert sorted(found.unique().tolist()) == [0.0, 1.5, 2.5, 4.0]
    for value in (0.0, 1.5, 2.5, 4.0):
        assert float((found == value).double().mean()) == pytest.approx(0.25, abs=0.015)


def test_a_draw_belongs_to_the_client_the_tensor_and_the_stream() -> None:
    ones = {"a": torch.ones(200), "b": torch.ones(200)}

    def kept(client: int, stream: Stream = STREAM, among: int = 1) -> tuple[torch.Tensor, ...]:
        vectors = [ones, *[params.zeros_like(ones)] * (among - 1)]
        ids = [client, *range(100, 99 + among)]
        found = merge(vectors, "dare", density=0.5, stream=stream, ids=ids)
        return found["a"] != 0, found["b"] != 0

    a, b = kept(3)
    assert not torch.equal(a, b)
    assert not torch.equal(a, kept(4)[0])
    assert not torch.equal(a, kept(3, Stream(0, (8,)))[0])
    assert torch.equal(a, kept(3)[0])
    assert torch.equal(a, kept(3, among=3)[0])


@pytest.mark.parametrize("method", METHODS)
@given(vectors=cohorts, seed=st.integers(0, 99))
def test_the_order_of_clients_does_not_matter_at_all(
    method: str, vectors: Vectors, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    count = len(vectors)
    weights = torch.randint(1, 500, (count,), generator=draw).tolist()
    ids = torch.randperm(100, generator=draw)[:count].tolist()
    order = torch.randperm(count, generator=draw).tolist()
    expected = merged(method, vectors, weights, ids, density=0.5)
    moved = [[listed[k] for k in order] for listed in (vectors, weights, ids)]
    reversed_names = [dict(reversed(vector.items())) for vector in moved[0]]
    assert params.digest(merged(method, *moved, density=0.5)) == params.digest(expected)
    assert params.digest(merged(method, reversed_names, *moved[1:], density=0.5)) == params.digest(
        expected
    )


@pytest.mark.parametrize("method", METHODS)
@given(vectors=cohorts)
def test_names_and_shapes_stay_and_inputs_are_not_touched(method: str, vectors: Vectors) -> None:
    before = [params.digest(vector) for vector in vectors]
    found = merged(method, vectors)
    assert params.mismatch(vectors[0], found) is None
    assert all(value.dtype == torch.float64 for value in found.values())
    assert all(value.isfinite().all() for value in found.values())
    assert [params.digest(vector) for vector in vectors] == before


@pytest.mark.parametrize("method", METHODS)
@given(vectors=cohorts)
def test_a_vector_alone_and_whole_comes_back(method: str, vectors: Vectors) -> None:
    found = merged(method, vectors[:1], [17], density=1.0, outliers=0.0)
    if method == "iso_c":  # it levels the singular values of a matrix, even of one alone
        del found["w"]
    for name, value in found.items():
        if method == "tsv_merge":  # taken apart and put together again, so up to rounding
            torch.testing.assert_close(value, vectors[0][name].double())
        else:
            assert torch.equal(value, vectors[0][name].double())


@pytest.mark.parametrize("method", ["dare", "breadcrumbs"])
@given(vectors=cohorts)
def test_without_thinning_these_rows_are_the_average(method: str, vectors: Vectors) -> None:
    weights = list(range(1, len(vectors) + 1))
    found = merged(method, vectors, weights, density=1.0, outliers=0.0)
    assert params.digest(found) == params.digest(merged("average", vectors, weights))


@given(cohorts, st.sampled_from([0.3, 1.0]))
def test_ties_is_what_its_words_say_entry_by_entry(vectors: Vectors, density: float) -> None:
    weights = list(range(1, len(vectors) + 1))
    thinned = [merged("ties", [vector], density=density) for vector in vectors]
    found = merged("ties", vectors, weights, density=density)
    for name, value in found.items():
        columns = zip(*(one[name].reshape(-1).tolist() for one in thinned), strict=True)
        for got, column in zip(value.reshape(-1).tolist(), columns, strict=True):
            up = [(w, v) for w, v in zip(weights, column, strict=True) if v > 0]
            down = [(w, v) for w, v in zip(weights, column, strict=True) if v < 0]
            mass = sum(w * v for w, v in up) + sum(w * v for w, v in down)
            winners = up if mass > 0 else down if mass < 0 else []
            total = sum(w for w, _ in winners)
            wanted = sum(w * v for w, v in winners) / total if winners else 0.0
            if mass != 0:  # a tie may be broken by the rounding of weights
                assert got == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_vectors_of_zeros_merge_to_zeros(method: str) -> None:
    assert row(method, [0.0, 0.0], [0.0, 0.0]) == [0.0, 0.0]
    assert row(method, [0.0, 0.0], weights=[2.0]) == [0.0, 0.0]
    zeros = [{"w": torch.zeros(3, 4)}] * 2
    assert not merged(method, zeros)["w"].any()


@pytest.mark.parametrize("method", METHODS)
def test_a_client_of_weight_zero_adds_nothing(method: str) -> None:
    found = row(method, [2.0, 0.0], [5.0, 3.0], weights=[1, 0], density=1.0, agreement=1)
    assert found == pytest.approx([4.0 if method == "task_arithmetic" else 2.0, 0.0])
    one, two = cohort(2, seed=3)
    alone = merged(method, [one], density=1.0, agreement=1, outliers=0.0, mean=True)["w"]
    both = merged(method, [one, two], [1, 0], density=1.0, agreement=1, outliers=0.0, mean=True)[
        "w"
    ]
    factor = 2 if method == "task_arithmetic" else 1
    if method != "consensus":  # whose sum of the others has two times the first vector in it
        torch.testing.assert_close(both, factor * alone)


@pytest.mark.parametrize("method", METHODS)
def test_every_row_names_its_paper(method: str) -> None:
    assert "https://arxiv.org/abs/" in merge_method[method].paper
    assert merge_method[method].doc


def test_what_cannot_be_merged_is_refused() -> None:
    one, two = {"w": torch.ones(1)}, {"w": torch.ones(2)}
    with pytest.raises(FedlensError, match="did you mean 'ties'"):
        merged("tie", [one])
    with pytest.raises(ValueError, match="w has shape"):
        merged("average", [one, two])
    with pytest.raises(ValueError, match="one weight and id for each"):
        merged("average", [one, one], ids=[3, 3])
    with pytest.raises(ValueError, match="one weight and id for each"):
        merged("average", [one, one], [1.0])
    with pytest.raises(ValueError, match="at least one vector"):
        merged("average", [])
    for weights in ([1.0, -0.5], [0.0, 0.0], [1.0, float("nan")], [1.0, float("inf")]):
        with pytest.raises(ValueError, match="weights must be finite"):
            merged("average", [one, one], weights)


@pytest.mark.parametrize(
    ("method", "keys"),
    [
        ("ties", {"density": 0.0}),
        ("dare", {"density": 1.5}),
        ("breadcrumbs", {"outliers": 1.0}),
        ("consensus", {"agreement": 0}),
        ("consensus", {"threshold": -1.0}),
        ("average", {"scale": 0.0}),
        ("average", {"density": 0.5}),
    ],
)
def test_a_parameter_out_of_range_or_of_another_method_is_refused_by_name(
    method: str, keys: dict[str, Any]
) -> None:
    with pytest.raises(FedlensError, match=next(iter(keys))):
        merge(cohort(2), method, **keys)


def test_without_weights_and_ids_vectors_count_alike_and_seeds_differ() -> None:
    vectors = cohort(3)
    expected = merge(vectors, "dare", weights=[5, 5, 5], ids=[0, 1, 2], stream=Stream(4, ()))
    assert params.digest(merge(vectors, "dare", seed=4)) == params.digest(expected)
    assert params.digest(merge(vectors, "dare", seed=5)) != params.digest(expected)


def test_a_function_is_a_method_and_its_weights_have_mean_1() -> None:
    def heaviest(vectors: list[Params], weights: list[float], *, power: int = 1) -> Params:
        assert sum(weights) == len(weights)
        best = max(range(len(vectors)), key=weights.__getitem__)
        return {name: value**power for name, value in vectors[best].items()}

    vectors = [{"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}]
    found = merge(vectors, heaviest, weights=[1, 7], power=2, scale=0.5)
    assert found["w"].tolist() == [4.5]
    assert found["w"].dtype == torch.float64
    with pytest.raises(FedlensError, match="does not fit the vectors: missing w"):
        merge(vectors, lambda vectors, weights: {})


def test_a_method_from_outside_is_a_row_with_checked_parameters() -> None:
    @merge_method(label="first", random=True)
    def first_of_all(vectors: Any, weights: Any, draws: Any, *, flip: float = 0.0) -> Params:
        assert draws[0]("w").initial_seed() == STREAM.draw("merge", 3, "w").initial_seed()
        return {name: value * (1 - 2 * flip) for name, value in vectors[0].items()}

    try:
        vectors = [{"w": torch.tensor([1.0])}, {"w": torch.tensor([2.0])}]
        found = merge(vectors, "first_of_all", flip=1, scale=2.0, stream=STREAM, ids=[8, 3])
        assert found["w"].tolist() == [-4.0]
        with pytest.raises(FedlensError, match="must be float"):
            merge(vectors, "first_of_all", flip="yes")
    finally:
        del merge_method.added["first_of_all"]
