import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedlens.data.examples import FeatureExamples
from fedlens.errors import FedlensError
from fedlens.models.classifier import Classifier
from fedlens.rng import Stream, generator
from fedlens.training.precision import Precision
from fedlens.training.step import StepSettings, Tally, dropout_mask, local_step, train_step

FP32 = Precision("fp32", "cpu")


def setting() -> tuple[Classifier, torch.Tensor, torch.Tensor]:
    draw = generator(0, "test")
    torch.manual_seed(0)
    model = Classifier(nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 3))
    return model, torch.randn(10, 6, generator=draw), torch.randint(3, (10,), generator=draw)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def test_a_step_is_the_obvious_one() -> None:
    ours, inputs, labels = setting()
    plain = copy.deepcopy(ours)
    theirs = sgd(plain)
    optimizer = sgd(ours)
    for _ in range(3):
        loss, correct = train_step(ours, optimizer, inputs, labels, StepSettings(FP32))
        theirs.zero_grad()
        logits = plain(inputs)
        expected = F.cross_entropy(logits, labels)
        expected.backward()
        theirs.step()
        assert loss == pytest.approx(expected.item() * len(labels))
        assert correct == int((logits.argmax(1) == labels).sum())
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("size", [1, 3, 4, 10, 99])
def test_micro_batches_give_the_same_update(size: int) -> None:
    whole, inputs, labels = setting()
    cut = copy.deepcopy(whole)
    keep = dropout_mask(10, 8, 0.5, generator(0, "dropout"))
    options = {"label_smoothing": 0.1, "clip_norm": 0.05}
    first = train_step(whole, sgd(whole), inputs, labels, StepSettings(FP32, **options), keep)
    settings = StepSettings(FP32, micro_batch=size, **options)
    second = train_step(cut, sgd(cut), inputs, labels, settings, keep)
    assert first == (pytest.approx(second[0]), second[1])
    for a, b in zip(whole.parameters(), cut.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_clipping_bounds_the_update() -> None:
    model, inputs, labels = setting()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    train_step(model, optimizer, inputs, labels, StepSettings(FP32, clip_norm=1e-3))
    moved = sum(((a - b) ** 2).sum() for a, b in zip(before, model.parameters(), strict=True))
    assert moved.sqrt().item() == pytest.approx(1e-3, rel=1e-3)


def test_dropout_keeps_the_mean_and_is_addressed() -> None:
    mask = dropout_mask(200, 100, 0.25, generator(1, "dropout"))
    assert mask.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert float(mask.mean()) == pytest.approx(1.0, abs=0.02)
    assert torch.equal(mask, dropout_mask(200, 100, 0.25, generator(1, "dropout")))


def run_steps(model: Classifier, steps: range, inputs: torch.Tensor, labels: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    examples, settings = FeatureExamples(inputs, labels), StepSettings(FP32, dropout=0.5)
    for step in steps:
        local_step(
            model, optimizer, examples, torch.arange(5), settings, Tally(),
            stream=Stream(0, ("test",)), step=step, width=8,
        )  # fmt: skip


def test_a_stretch_of_steps_can_be_cut_anywhere() -> None:
    whole, inputs, labels = setting()
    cut = copy.deepcopy(whole)
    run_steps(whole, range(6), inputs, labels)
    run_steps(cut, range(2), inputs, labels)
    run_steps(cut, range(2, 6), inputs, labels)
    for a, b in zip(whole.parameters(), cut.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_loss_that_is_no_number_stops_in_words() -> None:
    model, inputs, labels = setting()
    with pytest.raises(FedlensError, match=r"became nan.*lower the learning rate"):
        run_steps(model, range(1), inputs * float("inf"), labels)


def test_the_tally_adds() -> None:
    model, inputs, labels = setting()
    examples, tally = FeatureExamples(inputs, labels), Tally()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    for step, index in enumerate((torch.arange(4), torch.arange(4, 10))):
        local_step(
            model, optimizer, examples, index, StepSettings(FP32), tally,
            stream=Stream(0, ("test",)), step=step,
        )  # fmt: skip
    logits = model(inputs)
    assert tally.seen == 10
    assert tally.metrics()["loss"] == pytest.approx(F.cross_entropy(logits, labels).item())
    assert tally.correct == int((logits.argmax(1) == labels).sum())


def test_a_plain_module_of_one_argument_is_trained_and_dropout_needs_a_width() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3))
    examples = FeatureExamples(torch.randn(6, 3, 8, 8), torch.arange(6) % 3)
    optimizer, tally = sgd(model), Tally()
    before = [value.detach().clone() for value in model.parameters()]
    arguments = (model, optimizer, examples, torch.arange(6))
    stream = Stream(0, ("test",))
    local_step(*arguments, StepSettings(FP32, micro_batch=3), tally, stream=stream, step=0)
    assert tally.seen == 6
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    with pytest.raises(ValueError, match="needs the width"):
        local_step(*arguments, StepSettings(FP32, dropout=0.5), tally, stream=stream, step=1)
