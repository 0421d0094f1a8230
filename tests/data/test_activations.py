"""Activations in a mapped file: equal to computed ones, resumed, repaired, and read anywhere."""

import pickle
from pathlib import Path

import pytest
import torch

from fedlens import rng
from fedlens.data import activations as module
from fedlens.data.activations import (
    ActivationExamples,
    Activations,
    ComputedActivations,
    activations,
)
from fedlens.data.examples import TensorExamples
from fedlens.runtime.stop import StopRequest

COUNT, BATCH = 22, 4  # parts of 8, 8 and 6 rows
KEY = {"parameters": "abc"}


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART", 2)


class Counting:
    """Some first blocks, which give channels_last maps; they may die on the way."""

    def __init__(self, dies_after: int | None = None) -> None:
        self.sizes: list[int] = []
        self.dies_after = dies_after

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        if len(self.sizes) == self.dies_after:
            raise KeyboardInterrupt
        self.sizes.append(len(inputs))
        return inputs.mul(2).to(memory_format=torch.channels_last)


@pytest.fixture
def examples() -> TensorExamples:
    values = torch.randn(COUNT, 3, 2, 5, generator=rng.generator(0, "values"))
    return TensorExamples(values, torch.arange(COUNT))


def stored(examples: TensorExamples, root: Path, **key: str) -> Activations:
    sample = Counting()(examples.batch(torch.arange(2)))
    return activations(COUNT, sample, {**KEY, **key}, batch=BATCH, root=root)


def make(found: Activations, examples: TensorExamples, compute: Counting) -> None:
    found.make(examples, compute, title="", stop=StopRequest())


def test_a_batch_has_the_values_and_the_layout_that_were_computed(
    examples: TensorExamples, tmp_path: Path
) -> None:
    found, compute = stored(examples, tmp_path), Counting()
    make(found, examples, compute)
    index = torch.tensor([21, 3, 3, 0])
    expected = Counting()(examples.batch(index))
    assert torch.equal(found[index], expected)
    assert found[index].stride() == expected.stride()
    assert found.file.bytes == COUNT * 3 * 2 * 5 * 4
    assert set(compute.sizes) == {BATCH}  # the last batch too


def test_a_killed_build_continues_where_it_was(examples: TensorExamples, tmp_path: Path) -> None:
    found = stored(examples, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        make(found, examples, Counting(dies_after=3))
    assert not found.file.complete
    again = Counting()
    make(found, examples, again)
    assert len(again.sizes) == 4  # two of the second part, two of the third
    assert torch.equal(found[torch.arange(COUNT)], 2 * examples.inputs)
    last = Counting()
    make(found, examples, last)
    assert last.sizes == []


@pytest.mark.parametrize("damage", ["bit", "cut"])
def test_a_damaged_file_is_made_again(
    damage: str, examples: TensorExamples, tmp_path: Path
) -> None:
    found = stored(examples, tmp_path)
    make(found, examples, Counting())
    content = bytearray(found.file.path.read_bytes())
    content[9 * found.file.row_bytes] ^= 1  # a bit of row 9, in the second part
    found.file.path.write_bytes(content if damage == "bit" else content[:-1])
    again = Counting()
    make(stored(examples, tmp_path), examples, again)
    assert len(again.sizes) == (2 if damage == "bit" else 6)
    assert torch.equal(stored(examples, tmp_path)[torch.arange(COUNT)], 2 * examples.inputs)


def test_another_key_is_another_file(examples: TensorExamples, tmp_path: Path) -> None:
    keys: list[dict[str, str]] = [{}, {"parameters": "other"}, {"resolution": "48"}]
    assert len({stored(examples, tmp_path, **key).file.path for key in keys}) == 3


def test_another_process_maps_the_file_itself(examples: TensorExamples, tmp_path: Path) -> None:
    found = stored(examples, tmp_path)
    make(found, examples, Counting())
    whole = found[torch.arange(COUNT)]
    sent = pickle.dumps(found)
    assert len(sent) < 2000
    assert torch.equal(pickle.loads(sent)[torch.arange(COUNT)], whole)


def test_sizes_that_are_not_exact_are_computed(examples: TensorExamples, tmp_path: Path) -> None:
    found, compute = stored(examples, tmp_path), Counting()
    make(found, examples, Counting())
    index = torch.arange(10, 20)
    within = TensorExamples(examples.inputs[index], examples.labels[index])
    chosen = ActivationExamples(found, ComputedActivations(within, compute), index, exact={4})
    assert torch.equal(chosen.labels, index)
    for size in (4, 3):
        assert torch.equal(chosen.batch(torch.arange(size)), 2 * within.inputs[:size])
    assert compute.sizes == [3]
