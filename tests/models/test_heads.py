import doctest
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import multivariate_normal
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


def test_what_is_sent_is_half_and_gives_the_same_head() -> None:
    made = Statistics.of(*sample(0), 4)
    sent = made.sent()
    assert Statistics.sent_shapes(7, 4) == {name: tuple(v.shape) for name, v in sent.items()}
    assert sent["xtx"].numel() == 7 * 8 // 2
    back = Statistics.received(sent)
    torch.testing.assert_close(back.xtx, made.xtx)
    for wide in (1, 100):  # both ways to solve
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(heads, "WIDE", wide)
            for one, other in zip(heads.solve(back, [0.1]), heads.solve(made, [0.1]), strict=True):
                assert torch.equal(one[0], other[0])
                assert torch.equal(one[1], other[1])


def test_deep_ridge_is_ridge_on_standardised_features() -> None:
    x, labels = sample(0)
    x = x * torch.logspace(-2, 2, 7) + torch.arange(7.0)
    fitted, _ = heads.deep_ridge(Statistics.of(x, labels, 4), None, l2=3.0, temperature=1.0)
    z = (x - x.mean(0)) / x.std(0, correction=0)
    plain = heads.fit_ridge(z, labels, l2=3.0, classes=4)
    torch.testing.assert_close(fitted(x.float()), plain(z.float()), rtol=1e-3, atol=1e-4)


def test_a_feature_that_never_changes_has_no_say() -> None:
    x, labels = sample(0)
    x[:, 3] = 5.0
    fitted, _ = heads.deep_ridge(Statistics.of(x, labels, 4), None, l2=3.0, temperature=1.0)
    others = [0, 1, 2, 4, 5, 6]
    without, _ = heads.deep_ridge(
        Statistics.of(x[:, others], labels, 4), None, l2=3.0, temperature=1.0
    )
    assert fitted.weight[:, 3].abs().max() < 1e-6
    torch.testing.assert_close(
        fitted(x.float()), without(x[:, others].float()), rtol=1e-4, atol=1e-5
    )


def test_wide_features_are_solved_by_factors_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    statistics = Statistics.of(*sample(0), 4)
    eigen = list(heads.solve(statistics, [0.1, 10.0]))
    monkeypatch.setattr(heads, "WIDE", 3)
    for (weight, bias), (other, more) in zip(
        heads.solve(statistics, [0.1, 10.0]), eigen, strict=True
    ):
        torch.testing.assert_close(weight, other)
        torch.testing.assert_close(bias, more)
    with pytest.raises(FedlensError, match="must be positive"):
        next(heads.solve(statistics, [0.0]))


def test_the_gaussian_head_is_linear_discriminant_analysis() -> None:
    x, labels = sample(0)
    fitted, chosen = heads.gaussian(
        Statistics.of(x, labels, 4), None, shrinkage=1e-9, temperature=1.0
    )
    wide = x.double()
    means = torch.stack([wide[labels == one].mean(0) for one in range(4)])
    within = wide - means[labels]
    covariance = (within.T @ within / len(x)).numpy()
    scores = [
        torch.as_tensor(multivariate_normal(means[one].numpy(), covariance).logpdf(wide.numpy()))
        + ((labels == one).double().mean()).log()
        for one in range(4)
    ]
    posterior = torch.stack(scores, 1).softmax(1).float()
    torch.testing.assert_close(fitted(x.float()).softmax(1), posterior, rtol=1e-3, atol=1e-3)
    assert chosen == {"shrinkage": 1e-9, "temperature": 1.0}


def test_a_class_without_samples_never_wins_under_the_gaussian_head() -> None:
    x, labels = sample(0)
    fitted, _ = heads.gaussian(Statistics.of(x, labels, 6), (x.float(), labels))
    assert set(fitted(x.float()).argmax(1).tolist()) <= {0, 1, 2, 3}


def test_rows_say_how_a_head_is_made() -> None:
    assert [(row.name, row.traits["fitted"], row.traits.get("by")) for row in rows] == [
        ("linear", False, None),
        ("trained", True, "training"),
        ("ridge", True, "statistics"),
        ("class_means", True, "statistics"),
        ("deep_ridge", True, "statistics"),
        ("gaussian", True, "statistics"),
    ]


def test_the_example_in_the_docstring_runs() -> None:
    assert doctest.testmod(heads, raise_on_error=True).attempted > 0


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(0, 2**31), st.floats(1e-3, 1e3))
def test_sums_of_features_have_no_fault(count: int, seed: int, scale: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    features = scale * (torch.randn(count, 5, generator=draw) + 1)
    labels = torch.randint(4, (count,), generator=draw)
    largest = float(features.norm(dim=1).max())
    assert Statistics.of(features, labels, 4).fault(count, 1.001 * largest) is None
