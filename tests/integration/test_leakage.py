"""Nothing is chosen on test data: the test split is read last, and its content changes nothing."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedlens.config.schema import Config
from fedlens.data import splits
from fedlens.data.images import Dataset, Images
from fedlens.experiments.preparation import local_data
from fedlens.experiments.run import start
from fedlens.store.run_folder import runs
from tests.integration.conftest import FEDERATED, ON_FEATURES, Tiny, facts


def change_test_split(monkeypatch: pytest.MonkeyPatch, change: Callable[[Images], Images]) -> None:
    """Datasets load `change(images)` as their test split."""
    real = local_data.dataset

    def changed(config: Config) -> Dataset:
        data = real(config)
        return dataclasses.replace(data, load_test=lambda: change(data.load_test()))

    monkeypatch.setattr(local_data, "dataset", changed)


RIDGE = ["head=ridge", "train.trainable=head", "augment=none"]


@pytest.mark.parametrize(
    "mode", [[], RIDGE, FEDERATED, [*FEDERATED, *ON_FEATURES], [*FEDERATED, *RIDGE]]
)
def test_the_test_split_is_not_read_before_the_final_evaluation(
    mode: list[str], tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(*mode)
    openings = []

    def record(images: Images) -> Images:
        (folder,) = runs(Path(config.run.root))
        openings.append((folder.choice, len(folder.journal("metrics").read())))
        return images

    change_test_split(monkeypatch, record)
    folder = start(config)
    assert folder.result is not None
    units = len(folder.journal("metrics").read())
    assert openings == [(folder.result["choice"], units)]  # once, after all choices


@pytest.mark.parametrize("mode", [[], [*FEDERATED, *ON_FEATURES]])
@pytest.mark.parametrize("curve", ["true", "false"])
def test_the_content_of_the_test_split_changes_the_test_numbers_only(
    curve: str, mode: list[str], tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [*mode, f"evaluate.test_curve={curve}", "train.early_stopping=1"]
    original = start(tiny(*options, root="original"))
    with monkeypatch.context() as patch:
        change_test_split(patch, lambda images: Images(images.pixels, images.labels.flip(0)))
        flipped = start(tiny(*options, root="flipped"))
    assert original.result is not None
    assert flipped.result is not None
    assert original.result["test"] != flipped.result["test"]
    assert original.result["choice"] == flipped.result["choice"]
    assert facts(original)["metrics"] == facts(flipped)["metrics"]


def test_a_test_curve_has_its_own_record_and_changes_nothing_else(tiny: Tiny) -> None:
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


def test_a_second_choice_is_refused_every_time(tiny: Tiny) -> None:
    config = tiny("run.name=it")
    folder = start(config)
    assert folder.choice is not None
    folder.write("choice", {**folder.choice, "parameters": "others"})
    (folder.path / "result.json").unlink()
    for _ in range(2):
        with pytest.raises(splits.TestLeak, match="cannot be opened for"):
            start(config)
