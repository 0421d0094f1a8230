"""Nothing is chosen on test data: the split stays unread, and what it holds changes nothing."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedlens.data import splits, synthetic
from fedlens.data.images import Dataset, Images
from fedlens.experiments.run import start
from fedlens.store.run_folder import runs
from tests.integration.conftest import FEDERATED, ON_FEATURES, Tiny, facts


def swapped(monkeypatch: pytest.MonkeyPatch, change: Callable[[Images], Images]) -> None:
    real = synthetic.dataset

    def changed() -> Dataset:
        found = real()
        return dataclasses.replace(found, load_test=lambda: change(found.load_test()))

    monkeypatch.setattr(synthetic, "dataset", changed)


RIDGE = ["head=ridge", "train.what=head", "augment=none"]


@pytest.mark.parametrize(
    "mode", [[], RIDGE, FEDERATED, [*FEDERATED, *ON_FEATURES], [*FEDERATED, *RIDGE]]
)
def test_the_test_split_is_not_read_before_the_final_evaluation(
    mode: list[str], tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(*mode)
    known = []

    def look(images: Images) -> Images:
        (folder,) = runs(Path(config.run.root))
        known.append((folder.choice, len(folder.journal("metrics").read())))
        return images

    swapped(monkeypatch, look)
    folder = start(config)
    assert folder.result is not None
    units = len(folder.journal("metrics").read())
    assert known == [(folder.result["choice"], units)]  # read once, with all choices made


@pytest.mark.parametrize("mode", [[], [*FEDERATED, *ON_FEATURES]])
@pytest.mark.parametrize("curve", ["true", "false"])
def test_what_the_test_split_holds_changes_nothing_but_the_test_numbers(
    curve: str, mode: list[str], tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [*mode, f"evaluate.test_curve={curve}", "train.early_stopping=1"]
    honest = start(tiny(*options, root="honest"))
    with monkeypatch.context() as patch:
        swapped(patch, lambda images: Images(images.pixels, images.labels.flip(0)))
        lied_to = start(tiny(*options, root="lied_to"))
    assert honest.result is not None
    assert lied_to.result is not None
    assert honest.result["test"] != lied_to.result["test"]
    assert honest.result["choice"] == lied_to.result["choice"]
    assert facts(honest)["metrics"] == facts(lied_to)["metrics"]


def test_a_test_curve_is_recorded_apart_and_disturbs_nothing(tiny: Tiny) -> None:
    without = start(tiny("evaluate.test_curve=false", "run.name=without"))
    with_it = start(tiny("evaluate.test_curve=true", "run.name=with_it"))
    assert facts(without)["metrics"] == facts(with_it)["metrics"]
    assert facts(without)["result"] == facts(with_it)["result"]
    curve = with_it.journal("test_curve").read()
    assert [point["unit"] for point in curve] == [1, 2, 3]
    assert without.journal("test_curve").read() == []
    assert "test" not in json.dumps(with_it.journal("metrics").read())


def test_the_final_numbers_are_those_of_the_chosen_parameters(tiny: Tiny) -> None:
    folder = start(tiny("evaluate.test_curve=true", "train.epochs=4"))
    assert folder.result is not None
    unit = folder.result["choice"]["unit"]
    at_choice = next(p for p in folder.journal("test_curve").read() if p["unit"] == unit)
    assert at_choice["top1"] == folder.result["test"]["top1"]
    validation = [r["validation"]["top1"] for r in folder.journal("metrics").read()]
    assert unit == 1 + validation.index(max(validation))
    assert torch.isfinite(torch.tensor(folder.result["test"]["loss"]))


def test_a_second_choice_is_refused_however_often_one_tries(tiny: Tiny) -> None:
    config = tiny("run.name=it")
    folder = start(config)
    assert folder.choice is not None
    folder.write("choice", {**folder.choice, "parameters": "others"})
    (folder.path / "result.json").unlink()
    for _ in range(2):
        with pytest.raises(splits.TestLeak, match="second choice"):
            start(config)
