from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedlens import params
from fedlens.errors import FedlensError
from fedlens.params import Params
from fedlens.rng import Stream
from fedlens.sparse.calibration import METHODS, calibrate, kept
from fedlens.sparse.masks import SCOPES, Masks, select

STREAM = Stream(0, ())
SHAPE = {"a": (20, 30), "b": (15, 20), "c": (100,)}
SENSITIVE = ("least_sensitive", "most_sensitive")


def live(seed: int = 0) -> dict[str, nn.Parameter]:
    """Weights none of which is zero, so that any scaling shows."""
    draw = torch.Generator().manual_seed(seed)
    return {n: nn.Parameter(1 + torch.rand(s, generator=draw)) for n, s in SHAPE.items()}


def fresh(seed: int) -> Masks:
    """Scores without ties: 0 to 999, shuffled."""
    shuffled = torch.randperm(1000, generator=torch.Generator().manual_seed(seed)).float()
    parts = shuffled.split([600, 300, 100])
    return {n: part.view(s) for (n, s), part in zip(SHAPE.items(), parts, strict=True)}


def flat(values: Params) -> torch.Tensor:
    return torch.cat([values[name].detach().reshape(-1) for name in sorted(values)])


class Watched:
    """Scores drawn anew each round, and the weights as they stood while they were taken."""

    def __init__(self, parameters: Params, seed: int = 10) -> None:
        self.parameters, self.seed = parameters, seed
        self.whole = flat(parameters).clone()
        self.factors: list[torch.Tensor] = []

    def __call__(self, index: int) -> Params:
        assert index == len(self.factors)
        self.factors.append(flat(self.parameters) / self.whole)
        return fresh(self.seed + index)


def by_definition(scores: list[Masks], density: float, largest: bool) -> torch.Tensor:
    """The global schedule without ties, on Python lists."""
    alive = list(range(1000))
    for index, found in enumerate(scores):
        values = flat(found).tolist()
        alive.sort(key=values.__getitem__, reverse=largest)
        alive = alive[: round(density ** ((index + 1) / len(scores)) * 1000)]
    mask = torch.zeros(1000, dtype=torch.bool)
    mask[alive] = True
    return mask


def test_for_a_tenth_in_four_rounds_56_32_18_and_10_percent_are_kept() -> None:
    fractions = [kept(0.1, 4, done) for done in range(5)]
    assert [round(100 * fraction) for fraction in fractions] == [100, 56, 32, 18, 10]
    assert fractions[0] == 1
    assert fractions[-1] == 0.1


def test_while_calibrating_the_kept_weights_are_whole_and_the_dropped_a_tenth() -> None:
    parameters = live()
    watched = Watched(parameters)
    order = calibrate(parameters, watched, rule="least_sensitive", density=0.1, stream=STREAM)
    for done, factor in enumerate(watched.factors):
        whole = factor == 1
        assert int(whole.sum()) == round(0.1 ** (done / 4) * 1000)
        torch.testing.assert_close(factor[~whole], torch.full_like(factor[~whole], 0.1))
    assert len(watched.factors) == 4
    assert int(flat(order.masks(0.1)).sum()) == 100


@pytest.mark.parametrize("scope", SCOPES)
def test_a_weight_dropped_once_stays_dropped(scope: str) -> None:
    parameters = live()
    watched = Watched(parameters)
    order = calibrate(
        parameters,
        watched,
        rule="most_sensitive",
        density=0.03,
        rounds=6,
        scope=scope,
        stream=STREAM,
    )
    kept_masks = [factor == 1 for factor in watched.factors] + [flat(order.masks(0.03))]
    for before, after in pairwise(kept_masks):
        assert after.sum() < before.sum()
        assert not (after & ~before).any()


@pytest.mark.parametrize("rule", SENSITIVE)
@given(density=st.floats(0, 1), rounds=st.integers(1, 5), seed=st.integers(0, 99))
def test_talos_is_its_definition(rule: str, density: float, rounds: int, seed: int) -> None:
    scores = [fresh(seed + index) for index in range(rounds)]
    order = calibrate(
        live(), scores.__getitem__, rule=rule, density=density, rounds=rounds, stream=STREAM
    )
    expected = by_definition(scores, density, rule == "most_sensitive")
    assert torch.equal(flat(order.masks(density)), expected)


def test_a_larger_density_takes_back_first_what_was_dropped_last() -> None:
    parameters = live()
    watched = Watched(parameters)
    order = calibrate(parameters, watched, rule="least_sensitive", density=0.1, stream=STREAM)
    for done, factor in enumerate(watched.factors):
        assert torch.equal(flat(order.masks(kept(0.1, 4, done))), factor == 1)


@pytest.mark.parametrize("rule", SENSITIVE)
@pytest.mark.parametrize("scope", SCOPES)
def test_the_mean_is_one_selection_on_the_average_and_leaves_weights_whole(
    rule: str, scope: str
) -> None:
    parameters = live()
    watched = Watched(parameters)
    order = calibrate(
        parameters,
        watched,
        rule=rule,
        density=0.1,
        rounds=3,
        method="mean",
        scope=scope,
        stream=STREAM,
    )
    rounds = [fresh(10 + index) for index in range(3)]
    average = {name: sum(one[name].double() for one in rounds) / 3 for name in SHAPE}
    expected = select(parameters, rule, 0.1, scores=average, scope=scope, stream=STREAM)
    assert torch.equal(flat(order.masks(0.1)), flat(expected))
    assert len(watched.factors) == 3
    assert all((factor == 1).all() for factor in watched.factors)


def test_rounds_of_talos_are_more_than_an_average() -> None:
    masks = [
        flat(
            calibrate(
                live(),
                lambda index: fresh(index),
                rule="least_sensitive",
                density=0.1,
                method=method,
                stream=STREAM,
            ).masks(0.1)
        )
        for method in METHODS
    ]
    assert masks[0].sum() == masks[1].sum() == 100
    assert not torch.equal(*masks)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("levels", [1, 3, 1000])
def test_one_round_is_one_selection_ties_included(method: str, scope: str, levels: int) -> None:
    scores = {name: (value * levels / 1000).floor() for name, value in fresh(3).items()}
    order = calibrate(
        live(),
        lambda index: scores,
        rule="least_sensitive",
        density=0.37,
        rounds=1,
        method=method,
        scope=scope,
        stream=STREAM,
    )
    expected = select(live(), "least_sensitive", 0.37, scores=scores, scope=scope, stream=STREAM)
    assert torch.equal(flat(order.masks(0.37)), flat(expected))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scope", SCOPES)
@given(density=st.floats(0, 1), rounds=st.integers(1, 4))
def test_the_count_is_exact_though_all_scores_are_tied(
    method: str, scope: str, density: float, rounds: int
) -> None:
    zeros = params.zeros_like(fresh(0))
    order = calibrate(
        live(),
        lambda index: zeros,
        rule="most_sensitive",
        density=density,
        rounds=rounds,
        method=method,
        scope=scope,
        stream=STREAM,
    )
    assert int(flat(order.masks(density)).sum()) == round(density * 1000)


@pytest.mark.parametrize("rule", ["lowest_magnitude", "highest_magnitude", "random"])
@pytest.mark.parametrize("method", METHODS)
def test_other_rules_need_no_scores_and_go_by_the_whole_weights(rule: str, method: str) -> None:
    def never(index: int) -> Params:
        raise AssertionError("scores were computed")

    order = calibrate(live(), never, rule=rule, density=0.2, method=method, stream=STREAM)
    expected = select(live(), rule, 0.2, stream=STREAM)
    assert torch.equal(flat(order.masks(0.2)), flat(expected))


def breaking(how: type[BaseException]) -> Callable[[int], Params]:
    def score(index: int) -> Params:
        if index == 2:
            raise how("stop")
        return fresh(index)

    return score


def spoilt(index: int) -> Params:
    found = fresh(index)
    if index == 1:
        found["b"][0, 0] = torch.nan
    return found


@pytest.mark.parametrize(
    ("score", "fault"),
    [
        (fresh, None),
        (breaking(RuntimeError), RuntimeError),
        (breaking(KeyboardInterrupt), KeyboardInterrupt),
        (spoilt, FedlensError),
    ],
)
@pytest.mark.parametrize("shrink_factor", [0.1, 0.0])
def test_weights_are_bit_identical_afterwards_whatever_happens(
    score: Callable[[int], Params], fault: type[BaseException] | None, shrink_factor: float
) -> None:
    parameters = live()
    before, where = params.digest(parameters), {n: p.data_ptr() for n, p in parameters.items()}

    def run() -> None:
        calibrate(
            parameters,
            score,
            rule="least_sensitive",
            density=0.1,
            shrink_factor=shrink_factor,
            stream=STREAM,
        )

    if fault:
        with pytest.raises(fault):
            run()
    else:
        run()
    assert params.digest(parameters) == before
    assert {name: value.data_ptr() for name, value in parameters.items()} == where
    assert all(value.requires_grad and value.grad is None for value in parameters.values())


def test_the_model_that_is_scored_is_the_shrunk_one() -> None:
    """Four inputs, one output: the squared gradient is x², seen through weights shrunk by ½."""
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    outputs = []

    def score(index: int) -> Params:
        x = torch.tensor([1.0, 2.0, 3.0, 4.0])
        outputs.append(model(x).item())
        (gradient,) = torch.autograd.grad(model(x).sum(), [model.weight])
        return {"weight": gradient.square()}

    order = calibrate(
        dict(model.named_parameters()),
        score,
        rule="least_sensitive",
        density=0.25,
        rounds=2,
        shrink_factor=0.5,
        stream=STREAM,
    )
    assert outputs == [10.0, 1 + 2 + (3 + 4) / 2]
    assert order.masks(0.25)["weight"].tolist() == [[True, False, False, False]]


def test_bad_requests_are_refused_before_any_scoring() -> None:
    def never(index: int) -> Params:
        raise AssertionError("scores were computed")

    good = {"rule": "least_sensitive", "density": 0.5, "stream": STREAM}
    for bad, words in (
        ({"method": "talo"}, "did you mean 'talos'"),
        ({"rounds": 0}, "rounds=0 must be 1 or more"),
        ({"density": 1.5}, "from 0 to 1"),
        ({"rule": "fisher"}, "choose from"),
        ({"scope": "block"}, "no mask scope"),
    ):
        with pytest.raises(FedlensError, match=words):
            calibrate(live(), never, **(good | bad))  # type: ignore[arg-type]
