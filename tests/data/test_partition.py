import doctest
import json
import math
import re
from itertools import pairwise, product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from fedlens.data.partitions import class_assignment
from fedlens.data.partitions import partition as module
from fedlens.data.partitions.partition import Partition, partition
from fedlens.data.partitions.partition_statistics import histogram, statistics
from fedlens.errors import FedlensError
from fedlens.registry import partitioner

modest = settings(deadline=None, max_examples=60)
seeds = st.integers(0, 99)
counts_of_classes = st.lists(st.integers(0, 12), min_size=1, max_size=7).filter(any)


def labelled(counts: list[int]) -> torch.Tensor:
    """Shuffled labels with so many samples of each class; a zero is a gap in the numbers."""
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))]


DRAWN = [row.name for row in partitioner if not row.traits.get("assigned")]  # not given


def split(labels: torch.Tensor, clients: int, by: str, seed: int = 0, **keys: Any) -> Partition:
    """With those of `keys` that this partition reads, and small values of its other parameters."""
    small = {"classes_per_client": 1, "min_size": 1} | keys
    known = {one.name for one in partitioner[by].parameters}
    parameters = {key: value for key, value in small.items() if key in known}
    return partition(labels, clients=clients, by=by, seed=seed, **parameters)


def held(labels: torch.Tensor, made: Partition) -> torch.Tensor:
    """The histogram, once the partition is seen to be one: disjoint, covering, in order."""
    assert made.order.dtype == made.offsets.dtype == torch.int64
    assert torch.equal(made.order.sort().values, torch.arange(len(labels)))
    for client in range(len(made)):
        shard = made.shard(client)
        assert len(shard) == made.sizes[client] > 0
        assert torch.equal(shard, shard.sort().values)
    assert torch.equal(torch.cat([made.shard(k) for k in range(len(made))]), made.order)
    counts = histogram(made, labels, int(labels.max()) + 1)
    for client in range(len(made)):
        expected = torch.bincount(labels[made.shard(client)], minlength=counts.shape[1])
        assert torch.equal(counts[client], expected)
    return counts


def least_sum_of_squares(
    owns: npt.NDArray[np.bool_], counts: npt.NDArray[np.int64], clients: int
) -> float:
    """min Σ_k s_k² over all splits that give each owner a sample: a linear programme, in which the
    j-th sample of a client costs j² − (j − 1)² = 2j − 1. Its corners are whole numbers."""
    owner, owned = owns.nonzero()
    total = int(counts.sum())
    costs = np.concatenate([np.zeros(len(owner)), np.tile(2 * np.arange(total) + 1, clients)])
    equal = np.zeros((len(counts) + clients, len(costs)))
    equal[owned, np.arange(len(owner))] = 1
    equal[len(counts) + owner, np.arange(len(owner))] = 1
    for client in range(clients):
        start = len(owner) + client * total
        equal[len(counts) + client, start : start + total] = -1
    right = np.concatenate([counts, np.zeros(clients)])
    bounds = [(1, None)] * len(owner) + [(0, 1)] * (clients * total)
    found = linprog(costs, A_eq=equal, b_eq=right, bounds=bounds)
    assert found.fun is not None, found.message
    return float(found.fun)


@given(counts=counts_of_classes, clients=st.integers(1, 9), seed=seeds)
@modest
def test_iid_is_even_in_sizes_and_in_every_class(
    counts: list[int], clients: int, seed: int
) -> None:
    labels = labelled(counts)
    if clients > len(labels):
        return
    found = held(labels, split(labels, clients, "iid", seed))
    assert found.sum(1).max() - found.sum(1).min() <= 1
    assert (found.max(0).values - found.min(0).values).max() <= 1


def possible(counts: list[int], clients: int, wanted: int) -> bool:
    classes = sum(count > 0 for count in counts)
    return classes <= clients * wanted <= sum(min(count, clients) for count in counts)


@pytest.mark.slow
@given(
    counts=counts_of_classes,
    clients=st.integers(1, 9),
    wanted=st.integers(1, 6),
    seed=seeds,
)
@settings(deadline=None, max_examples=150)
def test_classes_holds_what_it_says(
    counts: list[int], clients: int, wanted: int, seed: int
) -> None:
    labels = labelled(counts)
    if not possible(counts, clients, wanted):
        with pytest.raises(FedlensError) as refused:
            split(labels, clients, "classes", classes_per_client=wanted)
        _check_advice(str(refused.value), labels, counts, clients, wanted)
        return
    found = held(labels, split(labels, clients, "classes", seed, classes_per_client=wanted))
    assert ((found > 0).sum(1) == wanted).all()
    owners = (found > 0).sum(0)
    present = torch.tensor(counts)[: len(owners)]
    assert torch.equal(owners > 0, present > 0)
    _check_owners(owners[present > 0].tolist(), [n for n in counts if n], clients)
    best = least_sum_of_squares((found > 0).numpy(), present.numpy(), clients)
    assert int((found.sum(1) ** 2).sum()) == round(best)


def _check_owners(owners: list[int], counts: list[int], clients: int) -> None:
    """clamp(λ·n_c, 1, min(K, n_c)) with λ by bisection, then the largest remainders go up."""

    def shares(scale: float) -> list[float]:
        return [min(max(scale * n, 1), clients, n) for n in counts]

    low, high = 0.0, float(clients)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(shares(middle)) < sum(owners) else (low, middle)
    exact = [round(share, 9) for share in shares(high)]
    assert all(abs(a - b) < 1 for a, b in zip(owners, exact, strict=True))
    up = [b % 1 for a, b in zip(owners, exact, strict=True) if a > b]
    down = [b % 1 for a, b in zip(owners, exact, strict=True) if a < b]
    assert min(up, default=1) >= max(down, default=0) - 1e-8  # they were rounded to nine digits


def _check_advice(
    message: str, labels: torch.Tensor, counts: list[int], clients: int, wanted: int
) -> None:
    """The nearest that is possible is named, for each of the two keys, and only if there is one."""
    advice = message.rpartition(": choose ")[2]
    if clients > len(labels):
        assert advice == f"clients={len(labels)} or fewer."
        return
    for key, options, now in (
        (
            "classes_per_client",
            [n for n in range(1, 8) if possible(counts, clients, n)],
            wanted,
        ),
        ("clients", [k for k in range(1, 99) if possible(counts, k, wanted)], clients),
    ):
        named = re.search(rf"\b{key}=(\d+)", advice)
        assert (named is not None) == bool(options)
        if named:
            assert int(named[1]) in options
            assert abs(int(named[1]) - now) == min(abs(option - now) for option in options)


@pytest.mark.slow
@given(data=st.data(), clients=st.integers(1, 5), wanted=st.integers(1, 3))
@modest
def test_no_split_of_the_same_ownership_is_more_level(
    data: st.DataObject, clients: int, wanted: int
) -> None:
    """Any ownership, not only the well-mixed ones that the partition makes for itself."""
    rows = st.permutations(range(5)).map(lambda row: row[:wanted])
    owned = np.array(data.draw(st.lists(rows, min_size=clients, max_size=clients)))
    numbers = st.one_of(st.integers(1, 3), st.integers(1, 15))
    flat = data.draw(st.lists(numbers, min_size=owned.size, max_size=owned.size))
    amounts = np.array(flat).reshape(owned.shape)
    owns = np.zeros((clients, 5), dtype=bool)
    np.put_along_axis(owns, owned, True, axis=1)
    counts = np.bincount(owned.ravel(), amounts.ravel(), minlength=5).astype(np.int64)

    class_assignment._equalise(owned, amounts)

    assert amounts.min() >= 1
    assert np.array_equal(np.bincount(owned.ravel(), amounts.ravel(), minlength=5), counts)
    assert (amounts.sum(1) ** 2).sum() == round(least_sum_of_squares(owns, counts, clients))


def test_level_by_hand() -> None:
    """Clients 0 and 1 share 12 samples of class 0, clients 1 and 2 share 3 of class 1, and 0 and 2
    have one of their own: 2 can get no more than 2 of the 3, the other 14 split as 7 and 7."""
    owned = np.array([[0, 2], [0, 1], [1, 3]])
    amounts = np.array([[1, 1], [11, 2], [1, 1]])
    class_assignment._equalise(owned, amounts)
    assert amounts.tolist() == [[6, 1], [6, 1], [2, 1]]


def test_one_class_for_each_of_a_hundred_clients() -> None:
    labels = torch.arange(100).repeat(7)
    found = held(labels, split(labels, 100, "classes"))
    assert ((found == 7).sum(0) == 1).all()
    assert ((found > 0).sum(1) == 1).all()


@pytest.mark.parametrize(("clients", "wanted"), [(100, 50), (100, 5), (60, 3), (7, 33)])
def test_balanced_data_gives_balanced_owners_and_sizes(clients: int, wanted: int) -> None:
    labels = torch.arange(100).repeat(450)
    made = split(labels, clients, "classes", classes_per_client=wanted)
    owners = (histogram(made, labels, 100) > 0).sum(0)
    assert owners.max() - owners.min() <= 1
    assert made.sizes.max() - made.sizes.min() <= 1


def test_owners_share_a_class_evenly_where_sizes_allow() -> None:
    """A client with ten classes learns from ten, not from one and a sample each of nine."""
    labels = torch.arange(100).repeat(450)
    found = histogram(split(labels, 100, "classes", classes_per_client=10), labels, 100)
    assert (found[found > 0] == 45).all()


@pytest.mark.parametrize("name", DRAWN)
def test_ten_thousand_clients(name: str) -> None:
    labels = torch.arange(100).repeat(500)
    made = split(labels, 10_000, name, classes_per_client=5, min_size=2)
    assert len(made) == 10_000
    assert made.sizes.min() >= 2
    assert torch.equal(made.order.sort().values, torch.arange(50_000))


@pytest.mark.slow
@given(
    counts=counts_of_classes,
    clients=st.integers(1, 9),
    least=st.integers(1, 4),
    alpha=st.one_of(st.floats(1e-3, 1e3), st.sampled_from([5e-324, 1e-300, 1e-9, 1e38])),
    seed=seeds,
)
@modest
def test_dirichlet_always_ends_with_everyone_served(
    counts: list[int], clients: int, least: int, alpha: float, seed: int
) -> None:
    labels = labelled(counts)
    if clients * least > len(labels):
        return
    made = split(labels, clients, "dirichlet", seed, alpha=alpha, min_size=least)
    assert held(labels, made).sum(1).min() >= least


@pytest.mark.parametrize("alpha", [0.05, 0.5, 20.0])
def test_dirichlet_laws_have_the_moments_of_theirs(alpha: float) -> None:
    """E p = 1/K, Var p = (1/K)(1 − 1/K)/(Kα + 1)."""
    draw = torch.Generator().manual_seed(0)
    laws = torch.stack([module._dirichlet_proportions(4, alpha, draw) for _ in range(4000)])
    assert torch.allclose(laws.sum(1), torch.ones(4000, dtype=torch.float64))
    assert laws.mean(0) == pytest.approx(torch.full((4,), 0.25), abs=0.03)
    assert laws.var(0) == pytest.approx(torch.full((4,), 0.1875 / (4 * alpha + 1)), rel=0.1)


def test_a_larger_alpha_is_closer_to_iid() -> None:
    labels = torch.arange(10).repeat(500)
    distances = [
        statistics(histogram(split(labels, 20, "dirichlet", alpha=alpha), labels, 10))["summary"]
        for alpha in (0.01, 0.1, 1.0, 10.0, 1000.0)
    ]
    means = [found["emd"]["mean"] for found in distances]
    assert all(nearer < farther for farther, nearer in pairwise(means))
    assert means[0] > 0.75
    assert means[-1] < 0.03


@given(
    counts=counts_of_classes,
    clients=st.integers(1, 9),
    least=st.integers(1, 4),
    sigma=st.one_of(st.floats(0, 5), st.just(1e38)),
    seed=seeds,
)
@modest
def test_quantity_serves_everyone(
    counts: list[int], clients: int, least: int, sigma: float, seed: int
) -> None:
    labels = labelled(counts)
    if clients * least > len(labels):
        return
    sizes = held(labels, split(labels, clients, "quantity", seed, sigma=sigma, min_size=least)).sum(
        1
    )
    assert sizes.min() >= least
    if sigma == 0:
        assert sizes.max() - sizes.min() <= 1


def test_quantity_is_log_normal_in_sizes_and_iid_in_labels() -> None:
    labels = torch.arange(2).repeat(200_000)
    made = split(labels, 400, "quantity", sigma=0.7)
    assert made.sizes.double().log().std().item() == pytest.approx(0.7, rel=0.1)
    halves = histogram(made, labels, 2)[:, 0] / made.sizes
    errors = (halves - 0.5) / (0.25 / made.sizes).sqrt()  # of a fair coin: standard normal
    assert errors.std().item() == pytest.approx(1, abs=0.15)


@given(sizes=st.lists(st.integers(0, 20), min_size=1, max_size=8), least=st.integers(1, 6))
@modest
def test_only_the_largest_pay_for_the_smallest(sizes: list[int], least: int) -> None:
    if sum(sizes) < least * len(sizes):
        return
    lifted = module._with_minimum(torch.tensor(sizes), least).tolist()
    assert sum(lifted) == sum(sizes)
    payers = [after for before, after in zip(sizes, lifted, strict=True) if after < before]
    for before, after in zip(sizes, lifted, strict=True):
        assert after == max(before, least) or before > after >= least
        assert not payers or after <= min(payers) + 1
    assert max(payers, default=0) - min(payers, default=0) <= 1


@pytest.mark.parametrize("name", DRAWN)
def test_a_partition_is_addressed_by_its_seed(name: str) -> None:
    labels = torch.arange(10).repeat(30)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    made, again, other = (split(labels, 6, name, seed, classes_per_client=3) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(made.order, again.order)
    assert torch.equal(made.offsets, again.offsets)
    assert not torch.equal(made.order, other.order)


def test_over_seeds_every_pair_of_classes_meets() -> None:
    labels = torch.arange(5).repeat(20)
    together = torch.zeros(5, 5)
    for seed in range(60):
        made = split(labels, 5, "classes", seed, classes_per_client=2)
        owns = (histogram(made, labels, 5) > 0).float()
        together += owns.T @ owns
    assert together.min() > 15


@pytest.mark.parametrize("seed", range(3))
def test_with_half_of_the_classes_each_every_pair_of_classes_meets(seed: int) -> None:
    labels = torch.arange(100).repeat(450)
    made = split(labels, 100, "classes", seed, classes_per_client=50)
    owns = (histogram(made, labels, 100) > 0).float()
    assert (owns.T @ owns).min() >= 1
    assert (made.sizes == 450).all()


@given(
    counts=st.lists(st.integers(1, 12), min_size=2, max_size=7),
    clients=st.integers(1, 9),
    wanted=st.integers(1, 6),
    seed=seeds,
)
@modest
def test_swaps_keep_numbers_of_classes_and_owners(
    counts: list[int], clients: int, wanted: int, seed: int
) -> None:
    if not possible(counts, clients, wanted):
        return
    draw = torch.Generator().manual_seed(seed)
    owned, amounts = class_assignment.assign_classes(np.array(counts), clients, wanted, draw)
    weight = np.array(counts) % 2
    mixed, moved = class_assignment._swapped(owned, amounts, weight, draw)
    assert all(len(set(row)) == wanted for row in mixed.tolist())
    assert np.array_equal(weight[mixed].sum(1), weight[owned].sum(1))
    assert np.array_equal(np.bincount(mixed.ravel()), np.bincount(owned.ravel()))
    totals = [np.bincount(who.ravel(), n.ravel()) for who, n in ((owned, amounts), (mixed, moved))]
    assert np.array_equal(*totals)


def test_swaps_never_make_sizes_less_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    counts = [draw.integers(1, 80, 12) ** 2 for _ in range(9)]
    cases = list(zip(counts, product((5, 11, 30), (3, 4, 7)), strict=True))

    def squares() -> list[int]:
        sizes = [
            class_assignment.assign_classes(
                counts, clients, wanted, torch.Generator().manual_seed(1)
            )[1].sum(1)
            for counts, (clients, wanted) in cases
        ]
        return [int((one**2).sum()) for one in sizes]

    mixed = squares()
    monkeypatch.setattr(class_assignment, "TRADES", 0)
    assert all(after <= before for after, before in zip(mixed, squares(), strict=True))


def test_shards_are_views() -> None:
    made = split(torch.arange(4).repeat(5), 3, "iid")
    assert made.shard(2).data_ptr() == made.order[int(made.offsets[2]) :].data_ptr()
    for outside in (-1, 3):
        with pytest.raises(IndexError):
            made.shard(outside)


REFUSALS: list[tuple[int, str, dict[str, Any], str]] = [
    (3, "iid_", {}, "no partition 'iid_': did you mean 'iid'?"),
    (3, "skew", {}, "'skew': choose from classes, dirichlet, file, iid, key, quantity."),
    (0, "iid", {}, "clients=0 must be 1 or more."),
    (41, "iid", {}, "clients=41 is more than the 40 samples: choose clients=40 or fewer."),
    (41, "classes", {}, "clients=41 is more than the 40 samples: choose clients=40 or fewer."),
    (3, "classes", {"classes_per_client": 0}, "classes_per_client=0 must be 1 or more."),
    (
        3,
        "classes",
        {"classes_per_client": 5},
        "classes_per_client=5 with clients=3 asks for more classes than the 4 present: choose "
        "classes_per_client=4.",
    ),
    (
        3,
        "classes",
        {"classes_per_client": 1},
        "has 3 places for 4 classes, and each needs an owner: choose "
        "classes_per_client=2 or clients=4.",
    ),
    (
        20,
        "classes",
        {"classes_per_client": 3},
        "has 60 places and too few samples: the classes can fill 40: choose "
        "classes_per_client=2 or clients=13.",
    ),
    (3, "dirichlet", {"alpha": 0.0}, "alpha=0.0 must be positive."),
    (3, "dirichlet", {"alpha": math.nan}, "alpha=nan must be positive and finite."),
    (3, "dirichlet", {"alpha": math.inf}, "alpha=inf must be positive and finite."),
    (3, "quantity", {"sigma": -0.1}, "sigma=-0.1 must be 0 or more."),
    (3, "quantity", {"min_size": 0}, "min_size=0 must be 1 or more."),
    (
        3,
        "dirichlet",
        {"min_size": 14},
        "clients=3 with min_size=14 takes 42 samples and there are 40: choose clients=2 or "
        "min_size=13.",
    ),
    (3, "quantity", {"min_size": 50}, "there are 40: choose min_size=13."),
    (3, "iid", {"alpha": 0.3}, "alpha is not read by 'iid': leave it out, or choose dir"),
    (
        3,
        "classes",
        {"classes": 3},
        "'classes': choose from classes_per_client.",
    ),
]


@pytest.mark.parametrize(("clients", "name", "keys", "sentence"), REFUSALS)
def test_the_impossible_is_refused_with_the_nearest_possible(
    clients: int, name: str, keys: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(FedlensError, match=re.escape(sentence)):
        partition(torch.tensor([0, 2, 5, 7]).repeat(10), clients=clients, by=name, **keys)


def test_no_samples_are_refused() -> None:
    with pytest.raises(FedlensError, match="no samples to partition"):
        split(torch.empty(0, dtype=torch.int64), 1, "iid")


def test_labels_are_a_tensor_an_array_or_a_list() -> None:
    labels = torch.arange(4).repeat(5)
    made = [
        partition(form, clients=3, seed=2)
        for form in (labels, labels.numpy(), labels.tolist(), labels.to(torch.uint8))
    ]
    assert all(torch.equal(made[0].order, other.order) for other in made[1:])
    with pytest.raises(FedlensError, match=re.escape("shape (5, 4): give one class number")):
        partition(labels.view(5, 4), clients=3)


def halves(labels: torch.Tensor, clients: int, seed: int, *, first: int = 0) -> torch.Tensor:
    return (torch.arange(len(labels)) + first) % clients


def test_a_function_of_ones_own() -> None:
    made = partition([7, 8, 9, 7], clients=2, by=halves, first=1)
    assert [made.shard(client).tolist() for client in range(2)] == [[1, 3], [0, 2]]


WRONG: list[tuple[torch.Tensor, str]] = [
    (torch.arange(3) % 2, "return 4 integers, the client of each sample"),
    (torch.rand(4), "return 4 integers"),
    (torch.arange(4), "clients from 0 to 3: number them from 0 to 1"),
    (torch.zeros(4, dtype=torch.int64), "client 1 without samples"),
]


@pytest.mark.parametrize(("holder", "sentence"), WRONG)
def test_what_ones_own_function_returns_is_checked(holder: torch.Tensor, sentence: str) -> None:
    with pytest.raises(FedlensError, match=sentence):
        partition([0, 1, 2, 3], clients=2, by=lambda labels, clients, seed: holder)


def test_labels_of_rows_name_their_parameters() -> None:
    assert [row.described({}) for row in partitioner] == [
        "IID", "Nc=10", "Dirichlet α=0.3", "log-normal sizes σ=1", "natural clients",
        "clients of FILE",
    ]  # fmt: skip


def test_the_example_in_the_docstring_runs() -> None:
    assert doctest.testmod(module, raise_on_error=True).attempted > 0


def test_statistics_by_hand() -> None:
    """Global law (3/8, 5/8, 0); client laws (1, 0, 0), (1/2, 1/2, 0) and (0, 1, 0)."""
    labels = torch.tensor([0, 1, 0, 0, 1, 1, 1, 1])
    made = Partition(
        order=torch.tensor([0, 2, 1, 3, 4, 5, 6, 7]), offsets=torch.tensor([0, 2, 4, 8])
    )
    counts = histogram(made, labels, 3)
    assert counts.tolist() == [[2, 0, 0], [1, 1, 0], [0, 4, 0]]
    found = statistics(counts)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert (found["clients"], found["samples"]) == (3, 8)
    assert found["sizes"] == [2, 2, 4]
    assert found["classes_per_client"] == [1, 2, 1]
    assert found["label_entropy"] == pytest.approx([0, math.log(2), 0])
    assert found["emd"] == pytest.approx([5 / 8, 1 / 8, 3 / 8])
    assert found["summary"]["sizes"] == {"min": 2, "mean": pytest.approx(8 / 3), "max": 4}
    assert found["summary"]["emd"] == {"min": 1 / 8, "mean": pytest.approx(3 / 8), "max": 5 / 8}
    assert found["summary"]["label_entropy"]["mean"] == pytest.approx(math.log(2) / 3)


def test_many_clients_leave_a_summary() -> None:
    even = torch.full((1000, 2), 3)
    assert len(statistics(even)["emd"]) == 1000
    found = statistics(torch.cat([even, even[:1]]))
    assert set(found) == {"clients", "samples", "summary"}
    assert found["summary"]["label_entropy"]["max"] == pytest.approx(math.log(2))
    assert found["summary"]["classes_per_client"] == {"min": 2, "mean": 2.0, "max": 2}
