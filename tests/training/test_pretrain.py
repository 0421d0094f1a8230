"""Pretraining repeats itself bit for bit; features of the shipped weights say more than pixels."""

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedlens import params
from fedlens.cache import recall
from fedlens.data.sources import synthetic
from fedlens.data.transforms import Pipeline
from fedlens.models.architectures import backbones, weights
from fedlens.runtime.threads import limited_threads
from fedlens.training.pretrain import (
    SHIPPED,
    Recipe,
    SumOfParts,
    file_name,
    pico_weights,
    pretrain,
)
from fedlens.training.step import Tally, local_step

ROW = backbones.find("vit_pico")
PIPELINE = Pipeline(ROW.resolution, ROW.mean, ROW.std)
MOMENT = Recipe(per_class=1, batch_size=256)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Steps this small only wait for a second core that others use."""
    with limited_threads(1):
        yield


@pytest.fixture(scope="module", autouse=True)
def _drawn_once() -> Iterator[None]:
    """That the same images are drawn twice is for tests/data/test_synthetic.py to say."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic, "pretraining", cache(synthetic.pretraining))
        yield


@pytest.mark.slow
def test_the_same_weights_twice_and_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    states = [pretrain(lambda: backbones.create(ROW), PIPELINE, recipe=MOMENT) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert params.digest(states[0]) == params.digest(states[1])
    other = pretrain(lambda: backbones.create(ROW), PIPELINE, recipe=replace(MOMENT, seed=1))
    assert params.digest(other) != params.digest(states[0])


@pytest.mark.slow
def test_a_short_pretraining_is_better_than_guessing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No image is seen twice, so the loss of a step is that of new images: 5.83 at the end, where
    a guess among 380 classes has ln 380 = 5.94."""
    losses: list[float] = []

    def watched(*words: Any, **more: Any) -> None:
        *others, _ = words
        local_step(*others, tally := Tally(), **more)
        losses.append(tally.metrics()["loss"])

    monkeypatch.setattr("fedlens.training.pretrain.local_step", watched)
    pretrain(lambda: backbones.create(ROW), PIPELINE, recipe=Recipe(per_class=4))
    last = losses[-len(losses) // 4 :]
    assert sum(last) / len(last) < math.log(len(synthetic.combinations()[1])) - 0.05


def test_a_class_is_the_sum_of_its_words() -> None:
    model = SumOfParts(backbones.create(ROW))
    inputs = torch.randn(2, 3, 32, 32)
    words = [*synthetic.COLOURS, *synthetic.TEXTURES, *synthetic.SHAPES]
    of_words, logits = model.words(model.backbone(inputs)), model(inputs)
    _, classes = synthetic.combinations()
    for label in (0, len(classes) - 1):
        parts = [of_words[:, words.index(word)] for word in classes[label]]
        torch.testing.assert_close(logits[:, label], sum(parts))


@pytest.mark.slow
def test_weights_are_made_once_at_any_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FEDLENS_CACHE", str(tmp_path))
    seen: list[tuple[int, int]] = []

    def make() -> Path:
        return pico_weights(recipe=MOMENT, progress=lambda *done: seen.append(done))

    path = make()
    whole, steps = path.read_bytes(), seen[-1][1]
    assert seen == [(step + 1, steps) for step in range(steps)]
    assert path.parent == tmp_path / "weights"
    assert make() == path
    assert len(seen) == steps  # nothing was trained the second time
    path.write_bytes(whole[:-100])
    torch.set_num_threads(2)
    with caplog.at_level(logging.WARNING):
        make()
    assert torch.get_num_threads() == 2
    assert "made again" in caplog.text
    assert path.read_bytes() == whole
    assert pico_weights(recipe=replace(MOMENT, lr=1e-3)) != path


def test_the_shipped_weights_are_those_of_the_default_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a change of the recipe or the architecture, CONTRIBUTING.md says how to make them."""
    monkeypatch.setenv("FEDLENS_CACHE", str(tmp_path))
    [shipped] = SHIPPED.iterdir()
    assert shipped.name == file_name(Recipe(), ROW)
    assert pico_weights() == shipped
    assert recall(shipped) is not None  # undamaged
    weights.verify(ROW, shipped)
    assert not list(tmp_path.iterdir())  # nothing was pretrained


def test_a_new_version_is_not_the_shipped_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedlens.training.pretrain.VERSION", 0)
    assert not (SHIPPED / file_name(Recipe(), ROW)).exists()


@pytest.mark.slow
def test_features_say_more_than_pixels(tmp_path: Path) -> None:
    """Ridge in closed form; pixels may take the best λ on the test images, features may not."""
    data = synthetic.draw_dataset(train_per_class=10, test_per_class=10, cache=tmp_path)
    train, test = data.load_train(), data.load_test()
    targets = F.one_hot(train.labels).double() - 1 / 100

    def accuracy(describe: nn.Module, *lambdas: float) -> float:
        with torch.no_grad():
            X, Z = (
                torch.cat([describe(PIPELINE(part)) for part in images.pixels.split(500)]).double()
                for images in (train, test)
            )
        X, Z = X - X.mean(0), Z - X.mean(0)
        kernel = X @ X.T  # the dual, for there are more pixels than images
        size, one = kernel.diagonal().mean(), torch.eye(len(kernel), dtype=torch.float64)
        hits = [
            (Z @ (X.T @ torch.linalg.solve(kernel + value * size * one, targets))).argmax(1)
            == test.labels
            for value in lambdas
        ]
        return max(hit.double().mean().item() for hit in hits)

    untrained, pretrained = backbones.create(ROW).eval(), backbones.create(ROW).eval()
    weights.load(pretrained, ROW, pico_weights())
    of_features = accuracy(pretrained, 0.01)
    assert of_features > 1.5 * accuracy(nn.Flatten(), 1, 10, 100)
    assert of_features > 3 * accuracy(untrained, 0.01)
