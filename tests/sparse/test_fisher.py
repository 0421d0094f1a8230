from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from fedlens import params, rng
from fedlens.data.examples import FeatureExamples
from fedlens.errors import FedlensError
from fedlens.models.classifier import Classifier
from fedlens.sparse.sensitivity.fisher import LABELS, TARGETS, Sensitivity, sensitivity
from fedlens.sparse.sensitivity.per_example_gradients import SquaredGradients

COUNT, CLASSES = 7, 3
STREAM = rng.Stream(0, ("test",))


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=rng.generator(seed, "test"))


def classifier() -> Classifier:
    backbone = VisionTransformer(
        img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2, num_classes=0
    )
    model = Classifier(backbone, nn.Linear(16, CLASSES)).eval()
    for number, value in enumerate(model.parameters()):
        params.assign({"w": value}, {"w": 0.5 * draw(*value.shape, seed=number)})
    return model


MODEL = classifier()
NAMES = [name for name, _ in MODEL.named_parameters() if name.startswith("backbone")]
EXAMPLES = FeatureExamples(
    draw(COUNT, 3, 16, 16), torch.randint(CLASSES, (COUNT,), generator=rng.generator(0, "labels"))
)


def measure(**keys: Any) -> Sensitivity:
    squares = SquaredGradients(MODEL, NAMES, EXAMPLES.features[:2])
    return sensitivity(squares, EXAMPLES, **{"stream": STREAM, **keys})


def brute_force(target: str, weights: torch.Tensor) -> dict[str, torch.Tensor]:
    """Σ over examples b and classes c of weights[b, c] times the squared gradient of t_c."""
    total = {name: torch.zeros(MODEL.get_parameter(name).shape).double() for name in NAMES}
    for b in range(COUNT):
        for c in range(CLASSES):
            MODEL.zero_grad()
            logits = MODEL(EXAMPLES.features[b : b + 1])[0]
            (logits if target == "logit" else logits.log_softmax(0))[c].backward()
            for name, running in total.items():
                running += weights[b, c] * MODEL.get_parameter(name).grad.double() ** 2
    MODEL.zero_grad()
    return total


def one_hot(classes: torch.Tensor) -> torch.Tensor:
    return torch.eye(CLASSES)[classes]


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in found.items():
        assert value.dtype == torch.float64
        error = (value - expected[name]).norm()
        assert error <= 2e-4 * expected[name].norm(), name


@pytest.fixture(scope="module")
def probabilities() -> torch.Tensor:
    with torch.no_grad():
        return MODEL(EXAMPLES.features).softmax(1)


@pytest.mark.parametrize("target", TARGETS)
def test_with_the_data_s_labels_it_is_the_sum_over_single_examples(target: str) -> None:
    found = measure(labels="data", target=target, micro_batch=3)
    assert_close(found.sums, brute_force(target, one_hot(EXAMPLES.labels)))
    assert found.count == COUNT


@pytest.mark.parametrize("target", TARGETS)
def test_the_expectation_weighs_every_class_by_its_probability(
    target: str, probabilities: torch.Tensor
) -> None:
    assert_close(measure(labels="expected", target=target).sums, brute_force(target, probabilities))


def test_the_square_of_the_mean_gradient_is_something_else() -> None:
    MODEL.zero_grad()
    logits = MODEL(EXAMPLES.features)
    logits.gather(1, EXAMPLES.labels[:, None]).mean().backward()
    name = "backbone.blocks.0.mlp.fc1.weight"
    wrong = MODEL.get_parameter(name).grad.double() ** 2
    MODEL.zero_grad()
    found = measure(labels="data").mean()[name]
    assert (found > wrong).all()  # a mean of squares exceeds the square of the mean
    assert found.sum() > 1.5 * wrong.sum()


def test_labels_are_drawn_by_inverting_the_cumulated_probabilities() -> None:
    p = torch.tensor([[0.2, 0.5, 0.3]]).double().expand(6, 3)
    uniform = torch.tensor([0.0, 0.19, 0.21, 0.69, 0.71, 1 - 2**-53], dtype=torch.float64)
    ((classes, weights),) = LABELS["sampled"](p, torch.zeros(6), uniform)
    assert classes.tolist() == [0, 0, 1, 1, 2, 2]
    assert weights.tolist() == [1.0] * 6


def test_a_class_of_no_probability_is_never_drawn() -> None:
    p = torch.tensor([[0.0, 1.0, 0.0]]).double().expand(2, 3)
    uniform = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    ((classes, _),) = LABELS["sampled"](p, torch.zeros(2), uniform)
    assert classes.tolist() == [1, 1]


class Chosen(nn.Module):
    """Logits of fixed probabilities; ∂ logit_c / ∂ weight is one-hot, so sums count the draws."""

    def __init__(self, p: list[float]) -> None:
        super().__init__()
        self.last = nn.Linear(1, len(p), bias=False)
        params.assign({"w": self.last.weight}, {"w": torch.tensor(p).log()[:, None]})

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(inputs)


def draws(**keys: Any) -> torch.Tensor:
    model, count = Chosen([0.1, 0.6, 0.3]), 2000
    examples = FeatureExamples(torch.ones(count, 1), torch.zeros(count, dtype=torch.int64))
    keys = {"stream": STREAM, "micro_batch": 512, **keys}
    squares = SquaredGradients(model, ["last.weight"], examples.features[:2])
    return sensitivity(squares, examples, **keys).sums["last.weight"][:, 0]


def test_sampled_labels_follow_the_model() -> None:
    found, expected = draws(passes=2), 4000 * torch.tensor([0.1, 0.6, 0.3])
    assert found.sum() == 4000
    assert ((found - expected) ** 2 / expected).sum() < 9.2  # χ² of 2 degrees, 1 %


def test_every_pass_and_every_stream_draws_anew() -> None:
    once, twice = draws(), draws(passes=2)
    assert not torch.equal(2 * once, twice)
    assert not torch.equal(once, draws(stream=replace(STREAM, seed=1)))
    assert torch.equal(once, draws())


@settings(max_examples=6, deadline=None)
@given(st.integers(1, COUNT + 2), st.integers(1, 2))
def test_the_size_of_micro_batches_does_not_matter(micro_batch: int, passes: int) -> None:
    found = measure(micro_batch=micro_batch, passes=passes)
    assert_close(found.sums, measure(passes=passes).sums)
    assert found.count == COUNT * passes


def test_shards_add_up_to_the_whole() -> None:
    index = torch.tensor([3, 0, 6, 2, 5, 1, 4])
    parts = [measure(labels="data", index=part) for part in index.split([3, 1, 3])]
    whole, total = measure(labels="data"), parts[0] + parts[1] + parts[2]
    assert_close(total.sums, whole.sums)
    assert total.count == whole.count
    assert_close(total.mean(), {name: value / COUNT for name, value in whole.sums.items()})


def test_what_does_not_match_does_not_add() -> None:
    one = Sensitivity({"w": torch.ones(2)}, 1)
    with pytest.raises(ValueError, match="missing w"):
        one + Sensitivity({"v": torch.ones(2)}, 1)
    with pytest.raises(ValueError, match="shape"):
        one + Sensitivity({"w": torch.ones(3)}, 1)


def test_progress_is_told() -> None:
    calls: list[tuple[int, int]] = []
    measure(micro_batch=3, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(3, 7), (6, 7), (7, 7)]


def test_wrong_words_are_refused_with_the_nearest_right_one() -> None:
    with pytest.raises(FedlensError, match="label rule 'sample': did you mean 'sampled'"):
        measure(labels="sample")
    with pytest.raises(FedlensError, match="target 'logits': did you mean 'logit'"):
        measure(target="logits")


def test_no_examples_and_no_passes_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        measure(index=torch.arange(0))
    with pytest.raises(ValueError, match="at least one"):
        measure(passes=0)


def test_a_sum_that_is_not_finite_names_its_parameter() -> None:
    model = Chosen([0.5, 0.5])
    examples = FeatureExamples(torch.full((3, 1), 1e30), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(FedlensError, match=r"last\.weight"):
        squares = SquaredGradients(model, ["last.weight"], torch.ones(2, 1))
        sensitivity(squares, examples, labels="data", stream=STREAM)


def test_a_plan_serves_many_calls_and_each_begins_anew() -> None:
    squares = SquaredGradients(MODEL, NAMES, EXAMPLES.features[:2])
    first = sensitivity(squares, EXAMPLES, labels="data", stream=STREAM)
    again = sensitivity(squares, EXAMPLES, labels="data", stream=STREAM)
    assert params.digest(first.sums) == params.digest(again.sums)
