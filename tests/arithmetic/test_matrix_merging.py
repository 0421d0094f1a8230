"""Merging by singular values, by least squares and by Fisher information, against slow versions."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fedlens as fl
from fedlens import params
from fedlens.arithmetic.merging import merge
from fedlens.errors import FedlensError

F64 = torch.float64
seeds = st.integers(0, 999)


def matrices(count: int, shape: tuple[int, ...], seed: int = 0) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [{"w": torch.randn(shape, generator=draw, dtype=F64)} for _ in range(count)]


def matrix(*rows: list[float]) -> dict[str, Tensor]:
    return {"w": torch.tensor(rows, dtype=F64)}


# --- TSV-Merge -----------------------------------------------------------------------------------


def test_tsv_merge_by_hand() -> None:
    """Of two 2×2 matrices one triplet each stays: 3·e₁e₁ᵀ and 4·e₂e₂ᵀ, orthogonal already."""
    found = merge([matrix([3, 0], [0, 1]), matrix([2, 0], [0, 4])], "tsv_merge")["w"]
    torch.testing.assert_close(found, torch.tensor([[3, 0], [0, 4]], dtype=F64))


def test_tsv_merge_makes_tasks_orthogonal() -> None:
    """u₁ = e₁, u₂ at 60°: the nearest orthonormal pair is at −15° and 75°."""
    cos, sin = math.cos(math.pi / 3), math.sin(math.pi / 3)
    one, two = matrix([1, 0], [0, 0]), matrix([0, cos], [0, sin])  # 1·e₁e₁ᵀ and 1·u₂e₂ᵀ
    found = merge([one, two], "tsv_merge")["w"]
    turned = [math.radians(-15), math.radians(75)]
    expected = torch.tensor([[math.cos(a) for a in turned], [math.sin(a) for a in turned]])
    torch.testing.assert_close(found, expected.double())


def slow_tsv(values: list[Tensor], weights: list[float]) -> Tensor:
    """By eigenvectors of the Gram matrices, and X(XᵀX)^(−1/2) for the nearest orthogonal matrix."""
    kept = max(1, min(values[0].shape) // len(values))
    triplets = []
    for value, weight in zip(values, weights, strict=True):
        squares, rights = torch.linalg.eigh(value.T @ value)
        for place in range(1, kept + 1):
            right, size = rights[:, -place], squares[-place].sqrt()
            triplets.append((value @ right / size, weight * size, right))

    def orthogonal(columns: Tensor) -> Tensor:
        squares, vectors = torch.linalg.eigh(columns.T @ columns)
        return columns @ vectors @ torch.diag(squares**-0.5) @ vectors.T

    left = orthogonal(torch.stack([one[0] for one in triplets], 1))
    right = orthogonal(torch.stack([one[2] for one in triplets], 1))
    terms = enumerate(one[1] for one in triplets)
    return sum((size * torch.outer(left[:, k], right[:, k]) for k, size in terms), torch.zeros(()))


@given(seeds, st.integers(1, 4), st.sampled_from([(5, 7), (8, 4), (6, 6)]))
def test_tsv_merge_is_its_slow_version(seed: int, count: int, shape: tuple[int, int]) -> None:
    vectors = matrices(count, shape, seed)
    weights = [float(k + 1) for k in range(count)]
    factors = [count * weight / sum(weights) for weight in weights]
    expected = slow_tsv([vector["w"] for vector in vectors], factors)
    found = merge(vectors, "tsv_merge", weights=weights)["w"]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    mean = merge(vectors, "tsv_merge", weights=weights, mean=True)["w"]
    torch.testing.assert_close(mean, expected / count, rtol=1e-6, atol=1e-6)


def test_more_tasks_than_rank_keep_one_triplet_each_and_equal_tasks_their_matrix() -> None:
    found = merge(matrices(9, (3, 4)), "tsv_merge")["w"]
    assert found.isfinite().all()
    rank_1 = matrix([2, 0, 0], [0, 0, 0])
    torch.testing.assert_close(merge([rank_1] * 3, "tsv_merge")["w"], rank_1["w"])


# --- Iso-C ---------------------------------------------------------------------------------------


def test_iso_c_by_hand() -> None:
    """diag(3, −1) + diag(1, −1) = diag(4, −2): both singular values become 3."""
    one, two = matrix([3, 0], [0, -1]), matrix([1, 0], [0, -1])
    expected = torch.tensor([[3, 0], [0, -3]], dtype=F64)
    torch.testing.assert_close(merge([one, two], "iso_c")["w"], expected)
    torch.testing.assert_close(merge([one, two], "iso_c", mean=True)["w"], expected / 2)


@given(seeds, st.integers(1, 4), st.sampled_from([(5, 7), (8, 4), (6, 6)]))
def test_iso_c_is_its_slow_version(seed: int, count: int, shape: tuple[int, int]) -> None:
    """U Vᵀ = M (MᵀM)^(−1/2), of the side that has full rank; its factor is tr((MᵀM)^(1/2))/r."""
    vectors = matrices(count, shape, seed)
    weights = [float(k + 1) for k in range(count)]
    total = sum(
        (count * w / sum(weights) * v["w"] for w, v in zip(weights, vectors, strict=True)),
        torch.zeros(()),
    )
    narrow = total if shape[0] >= shape[1] else total.T
    squares, axes = torch.linalg.eigh(narrow.T @ narrow)
    level = squares.sqrt().mean() * narrow @ axes @ torch.diag(squares**-0.5) @ axes.T
    expected = level if shape[0] >= shape[1] else level.T
    found = merge(vectors, "iso_c", weights=weights)["w"]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert float(torch.linalg.cond(found)) == pytest.approx(1.0)


def test_directions_that_no_task_has_stay_zero() -> None:
    found = merge([matrix([0, 6], [0, 0])], "iso_c")["w"]  # singular values 6 and 0: mean 3
    torch.testing.assert_close(found, torch.tensor([[0, 3], [0, 0]], dtype=F64))


# --- both ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["tsv_merge", "iso_c"])
def test_kernels_are_matrices_of_their_outputs_and_other_tensors_are_averaged(method: str) -> None:
    kernels = matrices(2, (6, 2, 3, 3))
    flat = [{"w": vector["w"].flatten(1)} for vector in kernels]
    expected = merge(flat, method)["w"].view(6, 2, 3, 3)
    torch.testing.assert_close(merge(kernels, method)["w"], expected)
    last = [{"w": v["w"].to(memory_format=torch.channels_last)} for v in kernels]
    torch.testing.assert_close(merge(last, method)["w"], expected)
    for shape in ((5,), (), (1, 4, 3), (0, 3)):
        others = matrices(3, shape)
        average = merge(others, "average", weights=[1, 2, 3])
        found = merge(others, method, weights=[1, 2, 3])
        assert params.digest(found) == params.digest(average)


# --- RegMean -------------------------------------------------------------------------------------


def tasks(
    count: int, seed: int, *, width: int = 4, rows: int = 30
) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    mix = torch.randn(count, width, width, generator=draw, dtype=F64)
    inputs = [torch.randn(rows, width, generator=draw, dtype=F64) @ one for one in mix]
    vectors = [{"w": torch.randn(3, width, generator=draw, dtype=F64)} for _ in range(count)]
    return vectors, inputs


def moments(inputs: list[Tensor]) -> list[dict[str, Tensor]]:
    return [{"w": x.T @ x / len(x)} for x in inputs]


@given(seeds, st.integers(1, 4))
def test_regmean_is_least_squares_on_the_stacked_inputs(seed: int, count: int) -> None:
    vectors, inputs = tasks(count, seed)
    weights = [float(k + 1) for k in range(count)]
    stacked = torch.cat([w**0.5 * x for w, x in zip(weights, inputs, strict=True)])
    outputs = torch.cat(
        [w**0.5 * x @ v["w"].T for w, x, v in zip(weights, inputs, vectors, strict=True)]
    )
    expected = torch.linalg.lstsq(stacked, outputs).solution.T
    found = merge(
        vectors, "regmean", weights=weights, statistics=moments(inputs), alpha=1.0, ridge=1e-14
    )["w"]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@given(seeds)
def test_off_diagonal_moments_are_scaled_as_in_the_paper(seed: int) -> None:
    """(Σ G̃)⁻¹ Σ G̃ Wᵀ with G̃ = αG + (1 − α) diag G, written out, for weights and task vectors."""
    vectors, inputs = tasks(3, seed)
    start = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed), dtype=F64)
    scaled = [0.9 * one["w"] + 0.1 * torch.diag(one["w"].diagonal()) for one in moments(inputs)]
    pairs = list(zip(scaled, vectors, strict=True))
    above = sum((g @ (start + v["w"]).T for g, v in pairs), torch.zeros(()))
    whole = torch.linalg.solve(sum(scaled, torch.zeros(())), above).T
    found = merge(vectors, "regmean", statistics=moments(inputs), ridge=1e-12)["w"]
    torch.testing.assert_close(start + found, whole, rtol=1e-6, atol=1e-6)


def test_regmean_by_hand() -> None:
    """Inputs along the axes, 1 : 3 in the first and 2 : 0 in the second coordinate."""
    vectors = [matrix([4.0, 1.0]), matrix([8.0, 5.0])]
    given_ = [
        {"w": torch.diag(torch.tensor([1.0, 2.0]))},
        {"w": torch.diag(torch.tensor([3.0, 0.0]))},
    ]
    found = merge(vectors, "regmean", statistics=given_, ridge=1e-12)["w"]
    torch.testing.assert_close(found, torch.tensor([[7.0, 1.0]], dtype=F64))
    weighted = merge(vectors, "regmean", weights=[3, 1], statistics=given_, ridge=1e-12)["w"]
    torch.testing.assert_close(weighted, torch.tensor([[6.0, 1.0]], dtype=F64))


def test_without_inputs_regmean_is_the_average() -> None:
    vectors, _ = tasks(3, 0)
    nothing = [{"w": torch.zeros(4, 4)}] * 3
    expected = merge(vectors, "average", weights=[1, 2, 3])["w"]
    for statistics in (nothing, [{}] * 3):
        found = merge(vectors, "regmean", weights=[1, 2, 3], statistics=statistics)["w"]
        assert torch.equal(found, expected)


def test_a_grouped_convolution_regresses_every_group() -> None:
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(2, 2, 40, 9, generator=draw, dtype=F64)  # model, group, rows, width
    kernels = [{"w": torch.randn(6, 1, 3, 3, generator=draw, dtype=F64)} for _ in range(2)]
    given_ = [{"w": one.mT @ one / 40} for one in inputs]
    found = merge(kernels, "regmean", statistics=given_)["w"]
    for group in range(2):
        parts = [{"w": one["w"].view(2, 3, 9)[group]} for one in kernels]
        alone = merge(parts, "regmean", statistics=[{"w": one["w"][group]} for one in given_])["w"]
        torch.testing.assert_close(found.view(2, 3, 9)[group], alone)


# --- Fisher --------------------------------------------------------------------------------------


def test_fisher_average_by_hand() -> None:
    vectors = [{"w": torch.tensor([2.0, 4.0, 6.0])}, {"w": torch.tensor([6.0, 8.0, 0.0])}]
    fishers = [{"w": torch.tensor([1.0, 5.0, 0.0])}, {"w": torch.tensor([3.0, 0.0, 0.0])}]
    found = merge(vectors, "fisher_average", statistics=fishers, floor=0)["w"]
    assert found.tolist() == [5.0, 4.0, 3.0]  # without information, the average
    weighted = merge(vectors, "fisher_average", weights=[3, 1], statistics=fishers, floor=0)["w"]
    assert weighted.tolist() == [4.0, 4.0, 4.5]


@given(seeds, st.integers(1, 5))
def test_fisher_average_is_that_of_whole_parameters_entry_by_entry(seed: int, count: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    start, *values = torch.randn(count + 1, 2, 3, generator=draw, dtype=F64)
    fishers = torch.rand(count, 2, 3, generator=draw, dtype=F64)
    weights = [float(k + 1) for k in range(count)]
    found = merge(
        [{"w": value} for value in values],
        "fisher_average",
        weights=weights,
        statistics=[{"w": one} for one in fishers],
        floor=0.0,
    )["w"]
    for i in range(2):
        for j in range(3):
            shares = [w * float(f[i, j]) for w, f in zip(weights, fishers, strict=True)]
            whole = sum(
                s * float(start[i, j] + v[i, j]) for s, v in zip(shares, values, strict=True)
            ) / sum(shares)
            assert float(start[i, j] + found[i, j]) == pytest.approx(whole, rel=1e-9, abs=1e-9)


# --- what is computed of models ------------------------------------------------------------------


class Net(nn.Module):
    """A convolution with stride and padding, a grouped one, and a linear map on every position."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.second = nn.Conv2d(4, 6, 2, groups=2)
        self.mix = nn.Linear(6, 5)
        self.head = nn.Linear(5, 3)
        self.unused = nn.Linear(2, 2)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).relu()).relu()
        return self.head(self.drop(self.mix(x.flatten(2).mT).relu()).mean(1))  # type: ignore[no-any-return]


def test_input_moments_are_those_of_every_position_one_by_one() -> None:
    model, inputs = Net(0), torch.randn(7, 3, 8, 8)
    found = fl.input_moments(model, inputs, batch_size=3)
    assert set(found) == {"first.weight", "second.weight", "mix.weight", "head.weight"}
    assert model.training
    model.eval()
    padded = nn.functional.pad(inputs, (1, 1, 1, 1))
    hidden = model.first(inputs).relu().detach()
    deep = model.second(hidden).relu().detach()
    first = torch.zeros(27, 27, dtype=F64)
    second = torch.zeros(2, 8, 8, dtype=F64)
    mix, head = torch.zeros(6, 6, dtype=F64), torch.zeros(5, 5, dtype=F64)
    for example in range(7):
        for row in range(4):
            for column in range(4):
                top, left = 2 * row, 2 * column
                x = padded[example, :, top : top + 3, left : left + 3].reshape(-1).double()
                first += torch.outer(x, x)
        for row in range(3):
            for column in range(3):
                patch = hidden[example, :, row : row + 2, column : column + 2]
                for group in range(2):
                    x = patch[2 * group : 2 * group + 2].reshape(-1).double()
                    second[group] += torch.outer(x, x)
                x = deep[example, :, row, column].double()
                mix += torch.outer(x, x)
        x = model.mix(deep[example].flatten(1).T).relu().mean(0).detach().double()
        head += torch.outer(x, x)
    for name, total in zip(found, (first, second, mix, head), strict=True):
        torch.testing.assert_close(found[name], total / 7, rtol=1e-4, atol=1e-5)


def test_the_moments_of_clients_add_up() -> None:
    model, inputs = Net(1), torch.randn(9, 3, 8, 8)
    whole = fl.input_moments(model, inputs)
    parts = [fl.input_moments(model, part) for part in (inputs[:2], inputs[2:])]
    for name, total in whole.items():
        mean = (2 * parts[0][name] + 7 * parts[1][name]) / 9
        torch.testing.assert_close(mean, total, rtol=1e-5, atol=1e-5)


def test_a_shared_weight_has_the_moments_of_all_its_layers() -> None:
    one, two = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    two.weight = one.weight
    found = fl.input_moments(nn.Sequential(one, two), torch.ones(1, 2))
    y = one(torch.ones(2)).detach().double()
    torch.testing.assert_close(found["0.weight"], torch.ones(2, 2).double() + torch.outer(y, y))


def test_regmean_of_models_fits_their_outputs_best() -> None:
    """Two models of one layer, each fitted on its own inputs: no other merge has a lower error."""
    draw = torch.Generator().manual_seed(0)
    base, inputs = nn.Linear(6, 4, bias=False), [torch.randn(50, 6, generator=draw) for _ in "12"]
    inputs[0][:, :3] *= 5
    tuned = [nn.Linear(6, 4, bias=False) for _ in "12"]
    vectors = [fl.task_vector(base, one) for one in tuned]
    given_ = [fl.input_moments(one, x) for one, x in zip(tuned, inputs, strict=True)]

    def error(merged: Any) -> float:
        weight = base.weight.detach().double() + merged["weight"]
        pairs = zip(inputs, tuned, strict=True)
        return sum(
            float((x.double() @ weight.T - one(x).detach().double()).square().sum())
            for x, one in pairs
        )

    best = error(fl.merge(vectors, "regmean", statistics=given_, alpha=1.0, ridge=1e-9))
    assert best < error(fl.merge(vectors, "average"))
    for seed in range(20):
        noise = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)).double()
        moved = fl.merge(vectors, "regmean", statistics=given_, alpha=1.0, ridge=1e-9)
        moved["weight"] = moved["weight"] + 1e-3 * noise
        assert error(moved) > best


def test_fisher_average_of_models_reads_what_fisher_gives() -> None:
    models = [nn.Linear(3, 2) for _ in "12"]
    x = torch.randn(8, 3)
    fishers = [fl.fisher(one, x, target="log_prob", labels="expected") for one in models]
    vectors = [fl.task_vector(models[0], one) for one in models]
    found = fl.merge(vectors, "fisher_average", statistics=fishers)
    assert torch.equal(found["bias"], fl.merge(vectors)["bias"])  # `fisher` scores weights
    assert not torch.equal(found["weight"], fl.merge(vectors)["weight"])


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "statistics", "sentence"),
    [
        ("regmean", None, "needs statistics, one map for each of the 2 vectors"),
        ("fisher_average", [{}], "needs statistics, one map for each"),
        ("average", [{}, {}], "'average' reads no statistics"),
        ("fisher_average", [{"w": torch.ones(3, 4)}, {}], "statistics differ: missing w"),
        ("fisher_average", [{"v": torch.ones(1)}] * 2, "have no tensor in common"),
        ("fisher_average", [{"w": torch.ones(4)}] * 2, "must have the tensor's shape"),
        ("fisher_average", [{"w": -torch.ones(3, 4)}] * 2, "no negative value"),
        ("fisher_average", [{"w": torch.full((3, 4), math.nan)}] * 2, "not finite"),
        ("regmean", [{"w": torch.ones(3, 3)}] * 2, "does not fit a weight of shape"),
        ("regmean", [{"w": torch.ones(4)}] * 2, "does not fit a weight of shape"),
    ],
)
def test_statistics_that_do_not_fit_are_refused(
    method: str, statistics: Any, sentence: str
) -> None:
    with pytest.raises(FedlensError, match=sentence):
        merge(matrices(2, (3, 4)), method, statistics=statistics)
