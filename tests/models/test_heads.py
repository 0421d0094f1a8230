import doctest
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fedlens.errors import FedlensError
from fedlens.models import heads
from fedlens.models.heads import Statistics
from fedlens.registry import head as rows


def sample(
    seed: int, count: int = 60, dim: int = 7, classes: int = 4, shift: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=draw)
    centres = torch.randn(classes, dim, generator=draw, dtype=torch.float64)
    noise = torch.randn(count, dim, generator=draw, dtype=torch.float64)
    return centres[labels] + noise + shift, labels


def brute_ridge(
    x: torch.Tensor, labels: torch.Tensor, classes: int, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Least squares on [X 1; √λI 0], whose last column is the intercept, never penalised."""
    count, dim = x.shape
    bottom = torch.cat([lam**0.5 * torch.eye(dim), torch.zeros(dim, 1)], 1).double()
    left = torch.cat([torch.cat([x, torch.ones(count, 1).double()], 1), bottom])
    right = torch.cat([F.one_hot(labels, classes), torch.zeros(dim, classes)]).double()
    solution = torch.linalg.lstsq(left, right, driver="gelsd").solution
    return solution[:-1].T, solution[-1]


@given(
    seed=st.integers(0, 999),
    count=st.integers(1, 60),
    log_lam=st.floats(-3, 4),
    shift=st.floats(-10, 10),
)
def test_ridge_is_least_squares_with_a_free_intercept(
    seed: int, count: int, log_lam: float, shift: float
) -> None:
    x, labels = sample(seed, count, shift=shift)
    lam = 10.0**log_lam
    weight, bias = next(heads.solve(Statistics.of(x, labels, 4), [lam]))
    expected_weight, expected_bias = brute_ridge(x, labels, 4, lam)
    torch.testing.assert_close(weight, expected_weight, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(bias, expected_bias, rtol=1e-6, atol=1e-6)


def test_a_path_is_the_same_as_its_points() -> None:
    x, labels = sample(0)
    stats = Statistics.of(x, labels, 4)
    grid = [100.0, 0.1, 1.0]
    for lam, head in zip(grid, heads.ridge_path(stats, grid), strict=True):
        alone, facts = heads.ridge(stats, None, l2=lam, temperature=1.0)
        assert facts == {"l2": lam, "temperature": 1.0}
        assert head.weight.dtype == torch.float32
        assert torch.equal(head.weight, alone.weight)
        assert torch.equal(head.bias, alone.bias)


def test_a_large_penalty_leaves_the_class_priors() -> None:
    x, labels = sample(0, shift=5.0)
    head = heads.fit_ridge(x, labels, l2=1e12)
    assert head.weight.abs().max() < 1e-9
    torch.testing.assert_close(head.bias.data, labels.bincount(minlength=4) / len(labels))


def test_refusals() -> None:
    x, labels = sample(0)
    stats = Statistics.of(x, labels, 4)
    with pytest.raises(FedlensError, match=r"l2=0\.0 must be positive"):
        heads.fit_ridge(x, labels, l2=0.0)
    with pytest.raises(FedlensError, match="at least one sample"):
        heads.ridge(Statistics.of(x[:0], labels[:0], 4), None, l2=1.0)
    with pytest.raises(FedlensError, match="at least one sample"):
        heads.fit_ridge(x[:0], labels[:0], l2=1.0)
    with pytest.raises(FedlensError, match=r"give features \[N, D\] and N labels"):
        heads.fit_ridge(x, labels[1:], l2=1.0)
    with pytest.raises(FedlensError, match="give validation data or set l2"):
        heads.ridge(stats, None, temperature=1.0)
    for fit in (lambda: heads.ridge(stats, None, l2=1.0), lambda: heads.class_means(stats, None)):
        with pytest.raises(FedlensError, match="give validation data or set temperature"):
            fit()
    with pytest.raises(FedlensError, match="empty"):
        heads.choose_ridge(stats, x.float(), labels, [])
    with pytest.raises(ValueError, match="do not add"):
        _ = stats + Statistics.of(x, labels, 5)


@given(
    seed=st.integers(0, 999),
    cuts=st.lists(st.integers(0, 60), max_size=6),
    chunk=st.integers(1, 70),
)
def test_statistics_of_parts_add_up_to_the_whole(seed: int, cuts: list[int], chunk: int) -> None:
    x, labels = sample(seed)
    whole = Statistics.of(x, labels, 4)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(seed))
    edges = [0, *sorted(cuts), 60]
    parts = [order[start:stop] for start, stop in pairwise(edges)]
    total, *rest = [Statistics.of(x[part], labels[part], 4, chunk=chunk) for part in parts]
    for other in rest:
        total = total + other
    for name in ("xtx", "class_sums", "counts"):
        torch.testing.assert_close(getattr(total, name), getattr(whole, name))
    torch.testing.assert_close(whole.xtx, x.T @ x)
    torch.testing.assert_close(whole.class_sums, F.one_hot(labels, 4).double().T @ x)


def test_statistics_are_float64_sums_of_float32_features() -> None:
    """A million equal values: float32 sums would be visibly off."""
    features = torch.full((1_000_000, 1), 0.1)
    stats = Statistics.of(features, torch.zeros(1_000_000, dtype=torch.int64), 1)
    assert stats.class_sums.item() == pytest.approx(1e6 * features[0].double().item(), rel=1e-12)


def test_lambda_is_chosen_on_validation_and_ties_go_to_the_larger() -> None:
    x, labels = sample(1, 40, dim=30)
    held, truth = sample(1, 400, dim=30)
    stats, grid = Statistics.of(x, labels, 4), [1e-3, 1e-1, 1e1, 1e3]
    head, lam = heads.choose_ridge(stats, held.float(), truth, reversed(grid))
    correct = [
        int((other(held.float()).argmax(1) == truth).sum())
        for other in heads.ridge_path(stats, grid)
    ]
    assert lam == max(lam for lam, hits in zip(grid, correct, strict=True) if hits == max(correct))
    assert torch.equal(head.weight, next(heads.ridge_path(stats, [lam])).weight)
    _, tied = heads.choose_ridge(stats, held[:0].float(), truth[:0], grid)
    assert tied == 1e3


@given(seed=st.integers(0, 999), shift=st.floats(-3, 3))
def test_class_means_pick_the_nearest_mean(seed: int, shift: float) -> None:
    x, labels = sample(seed, shift=shift)
    labels = labels % 3  # class 3 has no samples
    head, _ = heads.class_means(Statistics.of(x, labels, 4), None, temperature=1.0)
    means = torch.stack([x[labels == c].mean(0) for c in range(3)])
    distances = torch.cdist(x, means)
    scores = head(x.float())
    assert torch.isfinite(head.bias).all()
    chosen = scores.argmax(1)
    assert (chosen < 3).all()
    nearest = distances.min(1).values
    assert (distances.gather(1, chosen[:, None])[:, 0] - nearest < 1e-4).all()


@settings(max_examples=15)
@given(seed=st.integers(0, 999), stretch=st.floats(0.01, 100))
def test_temperature_beats_a_grid(seed: int, stretch: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(200, 5, generator=draw)
    labels = logits.argmax(1)
    wrong = torch.rand(200, generator=draw) < 0.3
    labels[wrong] = torch.randint(5, (int(wrong.sum()),), generator=draw)
    s = heads.fit_temperature(logits * stretch, labels)

    def loss(scale: float) -> float:
        return float(F.cross_entropy(logits.double() * stretch * scale, labels))

    grid = [10 ** (power / 8) for power in range(-32, 33)]
    assert loss(s) <= min(map(loss, grid)) + 1e-7
    # Scaling the logits changes the temperature by the inverse and nothing else.
    assert s * stretch == pytest.approx(heads.fit_temperature(logits, labels), rel=1e-3)


def test_temperature_of_separable_logits_stays_finite() -> None:
    s = heads.fit_temperature(10 * torch.eye(4), torch.arange(4))
    assert 1 < s <= 1e4


def test_scaled_folds_the_scale_into_the_head() -> None:
    x, labels = sample(2)
    head = heads.fit_ridge(x, labels, l2=1.0)
    before = head.weight.detach().clone()
    larger = heads.scaled(head, 30.0)
    torch.testing.assert_close(larger(x.float()), 30 * head(x.float()))
    assert torch.equal(head.weight, before)
    assert larger.weight.requires_grad
    assert larger.weight.is_leaf


def test_making_heads_leaves_the_global_generator_alone() -> None:
    x, labels = sample(2)
    stats = Statistics.of(x, labels, 4)
    before = torch.get_rng_state()
    first, again, other = (heads.linear(7, 4, seed) for seed in (0, 0, 1))
    heads.class_means(stats, None, temperature=2.0)
    heads.ridge(stats, None, l2=1.0, temperature=2.0)
    assert torch.equal(torch.get_rng_state(), before)
    assert isinstance(first, nn.Linear)
    assert torch.equal(first.weight, again.weight)
    assert not torch.equal(first.weight, other.weight)


def test_a_ridge_head_has_the_penalty_and_the_temperature_of_validation() -> None:
    x, labels = sample(1)
    held, truth = sample(1, 400)
    stats, validation = Statistics.of(x, labels, 4), (held.float(), truth)
    head, facts = heads.ridge(stats, validation)
    chosen, l2 = heads.choose_ridge(stats, *validation)
    with torch.no_grad():
        s = heads.fit_temperature(chosen(held.float()), truth)
    assert list(facts.items()) == [("l2", l2), ("temperature", s)]
    assert torch.equal(head.weight, heads.scaled(chosen, s).weight)
    mean_head, facts = heads.class_means(stats, validation)
    assert list(facts) == ["temperature"]
    plain, _ = heads.class_means(stats, None, temperature=1.0)
    assert torch.equal(mean_head.bias, heads.scaled(plain, facts["temperature"]).bias)


def test_a_trained_head_starts_from_the_linear_one() -> None:
    assert torch.equal(heads.trained(7, 4, 3).weight, heads.linear(7, 4, 3).weight)


def test_fit_ridge_takes_arrays_and_counts_classes() -> None:
    x, labels = sample(0)
    expected = next(heads.ridge_path(Statistics.of(x, labels, 4), [2.0]))
    assert torch.equal(heads.fit_ridge(x.numpy(), labels.tolist(), l2=2.0).weight, expected.weight)
    assert heads.fit_ridge(x, labels, l2=2.0, classes=9).out_features == 9


def test_shapes_are_those_of_the_statistics() -> None:
    made = Statistics.of(*sample(0), 4)
    assert Statistics.shapes(7, 4) == {name: tuple(v.shape) for name, v in vars(made).items()}


def test_rows_say_how_a_head_is_made() -> None:
    assert [(row.name, row.traits["fitted"], row.traits.get("by")) for row in rows] == [
        ("linear", False, None),
        ("trained", True, "training"),
        ("ridge", True, "statistics"),
        ("class_means", True, "statistics"),
    ]


def test_the_example_in_the_docstring_runs() -> None:
    assert doctest.testmod(heads, raise_on_error=True).attempted > 0
