import inspect
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st

from fedlens.data import splits
from fedlens.data.images import Images
from fedlens.data.splits import Choice, SealedTest, stratified
from fedlens.errors import FedlensError


@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    fraction=st.floats(0, 0.9),
    seed=st.integers(0, 99),
)
def test_stratified_is_a_partition_with_exact_counts(
    counts: list[int], fraction: float, seed: int
) -> None:
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))]
    if any(fraction * count > count - 1 for count in counts if count):
        reject()  # a class might be left without a training sample: a test of its own, below
    train, validation = stratified(labels, fraction, seed)
    assert len(validation) == round(fraction * len(labels))
    assert torch.equal(torch.cat([train, validation]).sort().values, torch.arange(len(labels)))
    assert torch.equal(train, train.sort().values)
    assert torch.equal(validation, validation.sort().values)
    for label, count in enumerate(counts):
        assert abs(int((labels[validation] == label).sum()) - fraction * count) < 1 + 1e-9
        assert count == 0 or (labels[train] == label).any()


def test_stratified_is_addressed_by_seed() -> None:
    labels = torch.arange(10).repeat(100)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    train, validation = stratified(labels, 0.1, 0)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(labels[validation].bincount(), torch.full((10,), 10))
    assert torch.equal(stratified(labels, 0.1, 0)[0], train)
    assert not torch.equal(stratified(labels, 0.1, 1)[0], train)


def test_stratified_does_not_prefer_early_samples() -> None:
    """Each sample is held out about equally often over seeds."""
    labels = torch.arange(2).repeat(10)
    times = torch.zeros(20)
    for seed in range(400):
        times[stratified(labels, 0.3, seed)[1]] += 1
    assert times.min() > 80
    assert times.max() < 160


def test_fraction_zero_holds_nothing_out() -> None:
    train, validation = stratified(torch.tensor([0, 1, 1]), 0.0, 0)
    assert train.tolist() == [0, 1, 2]
    assert validation.tolist() == []
    assert validation.dtype == torch.int64


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 1.5, float("nan")])
def test_impossible_fractions_are_refused(fraction: float) -> None:
    with pytest.raises(FedlensError, match=r"must be in \[0, 1\)"):
        stratified(torch.tensor([0, 1]), fraction, 0)


def test_a_class_keeps_a_training_sample() -> None:
    with pytest.raises(FedlensError, match="leaves class 0 without"):
        stratified(torch.tensor([0, 1, 1, 1]), 0.75, 0)


BEST = Choice(parameters="abc", chosen_on="validation", unit=3)
OTHER = Choice(parameters="def", chosen_on="validation", unit=4)


class Source:
    """Counts how often the test split is read."""

    def __init__(self) -> None:
        self.reads = 0

    def __call__(self) -> Images:
        self.reads += 1
        return Images(torch.zeros(4, 3, 2, 2, dtype=torch.uint8), torch.tensor([0, 1, 2, 3]))


def test_nothing_is_read_before_a_choice() -> None:
    source = Source()
    sealed = SealedTest(source)
    assert (source.reads, sealed.opened) == (0, None)
    assert "choice" in inspect.signature(sealed.open).parameters
    with pytest.raises(TypeError):
        sealed.open()  # type: ignore[call-arg]
    assert len(sealed.open(BEST)) == 4
    assert sealed.opened == BEST
    assert not [name for name in vars(sealed) if not name.startswith("_SealedTest__")]


def test_a_second_choice_is_a_leak() -> None:
    source = Source()
    sealed = SealedTest(source)
    sealed.open(BEST)
    sealed.open(Choice("abc", "validation", 3))
    assert source.reads == 1
    with pytest.raises(splits.TestLeak, match="could depend on test results"):
        sealed.open(OTHER)
    assert sealed.opened == BEST


def test_a_resumed_run_remembers_its_choice() -> None:
    sealed = SealedTest(Source(), opened=BEST)
    with pytest.raises(splits.TestLeak):
        sealed.open(OTHER)
    assert len(sealed.open(BEST)) == 4


def test_curves_can_be_written_and_not_read() -> None:
    written: list[Mapping[str, float]] = []
    sealed = SealedTest(Source(), curves=True)

    def measure(images: Images, guess: int, *, epoch: int) -> Mapping[str, float]:
        return {"epoch": epoch, "accuracy": float((images.labels == guess).float().mean())}

    record = sealed.curve(measure, written.append)
    answers: list[object] = [record(0, epoch=0), record(7, epoch=7)]
    assert answers == [None, None]
    assert written == [{"epoch": 0, "accuracy": 0.25}, {"epoch": 7, "accuracy": 0.0}]
    assert sealed.opened is None


def test_curves_are_refused_unless_they_are_on() -> None:
    with pytest.raises(splits.TestLeak, match="Test curves are off"):
        SealedTest(Source()).curve(lambda images: {}, lambda found: None)
