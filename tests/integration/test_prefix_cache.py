"""Runs on cached activations of frozen blocks have the bits of runs on the whole model."""

import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlens import files
from fedlens.config.identity import run_name
from fedlens.config.schema import Config
from fedlens.data.activations import ActivationExamples
from fedlens.data.splits import Choice
from fedlens.experiments import run, settings
from fedlens.experiments.build import Experiment, build
from fedlens.experiments.preparation import prefix
from fedlens.experiments.preparation.local_data import whole
from fedlens.experiments.preparation.prefix import batch_sizes, start_after_frozen_blocks
from fedlens.experiments.run import resume, start
from fedlens.runtime.stop import StopRequest
from fedlens.store.checkpoints import Checkpoints
from fedlens.store.run_folder import RunFolder
from tests.integration.conftest import FEDERATED, Tiny, facts, interrupted_at

LAST = ["train.trainable=last_blocks:1", "train.epochs=2"]
DEEP = ["sparse.density=0.02", "sparse.rule=random", "backbone.freeze_blocks=2"]
LORA = ["train.trainable=lora", "train.trainable.rank=2", "backbone.freeze_blocks=2"]
RESNET = [
    "backbone=timm:test_resnet", "backbone.resolution=32", "train.trainable=last_blocks:2",
    "backbone.batch_norm=averaged",
]  # fmt: skip
SOLVED_AGAIN = [
    "backbone.freeze_blocks=2", "head=deep_ridge", "head.layers=4", "head.train_layers=0",
    "federated.refit_head=1", "federated.refit_examples=5", "evaluate.select=last",
]  # fmt: skip
OFF = "train.prefix_cache_gb=0"
CACHED = "blocks are frozen: their activations are cached ("


@pytest.fixture(autouse=True)
def _no_activations() -> None:
    shutil.rmtree(files.cache_dir() / "activations", ignore_errors=True)


def entries() -> list[Path]:
    return sorted((files.cache_dir() / "activations").glob("*/activations.bin"))


def tensors(folder: RunFolder) -> dict[str, torch.Tensor]:
    checkpoints = Checkpoints(folder.checkpoints)
    return dict(checkpoints.load(checkpoints.names()[-1]).tensors)


def assert_equal_runs(one: RunFolder, other: RunFolder) -> None:
    assert facts(one) == facts(other)
    ours, theirs = tensors(one), tensors(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def started(config: Config) -> Experiment:
    """The experiment as it is trained; nothing is."""
    torch.set_num_threads(1)
    stop = StopRequest()
    built = build(config, torch.device("cpu"), stop, whole(config))
    return start_after_frozen_blocks(built, settings.prefix(config, built), stop)


@pytest.mark.parametrize(
    "words",
    [
        [*LAST, "head.dropout=0.2", "train.micro_batch=20", "evaluate.test_curve=true"],
        [*LAST, *FEDERATED, "engine=parallel", "engine.workers=2"],
        [*DEEP, "head=ridge", *FEDERATED],
        [*RESNET, *FEDERATED],
        [*SOLVED_AGAIN, *FEDERATED, "federated.rounds=3"],
        [*LORA, *FEDERATED, "train.trainable.average=products"],
        ["train.trainable=biases_and_norms", "backbone.freeze_blocks=2", *FEDERATED],
    ],
    ids=[
        "central",
        "parallel",
        "deep masks",
        "BatchNorm after the cut",
        "deep head solved again",
        "LoRA after frozen blocks",
        "biases after frozen blocks",
    ],
)
def test_a_cached_run_has_the_bits_of_the_whole_model(
    words: list[str], tiny: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    cached = start(tiny(*words))
    assert CACHED in caplog.text
    assert len(entries()) == 2  # of the training images, and of the test images
    caplog.clear()
    uncached = start(tiny(*words, OFF, root="whole"))
    assert CACHED not in caplog.text
    assert_equal_runs(cached, uncached)


def test_a_head_is_solved_again_without_validation_images(tiny: Tiny) -> None:
    words = [*SOLVED_AGAIN, *FEDERATED, "data.validation=0", "head.l2=10", "head.temperature=3"]
    assert_equal_runs(start(tiny(*words)), start(tiny(*words, OFF, root="whole")))


def test_an_interrupted_run_ends_with_the_same_bits_also_beside_a_damaged_file(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    uncached = start(tiny(*LAST, OFF, root="whole"))
    config = tiny(*LAST)
    folder = RunFolder(Path(config.run.root) / uncached.name)
    assert interrupted_at(config, 5, monkeypatch)  # while the cache is filled
    assert not list(folder.checkpoints.glob("*"))
    assert interrupted_at(config, 20, monkeypatch)  # within an epoch
    assert Checkpoints(folder.checkpoints).names()
    (path,) = entries()
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    assert_equal_runs(resume(folder), uncached)
    assert "activations are made again" in caplog.text


def test_activations_of_test_images_are_computed_after_the_choice(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    original = run.choose

    def choose(*args: Any, **named: Any) -> Choice:
        seen.append(len(entries()))
        return original(*args, **named)

    monkeypatch.setattr(run, "choose", choose)
    start(tiny(*LAST))
    assert seen == [1]
    assert len(entries()) == 2


def test_batches_that_are_not_exact_on_this_machine_are_computed(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    uncached = start(tiny(*LAST, OFF, root="whole"))
    _differs_at({40}, monkeypatch)  # the last batch of an epoch, and validation
    partly = start(tiny(*LAST))
    assert CACHED in caplog.text
    assert_equal_runs(partly, uncached)
    _differs_at({64}, monkeypatch)  # nearly all batches of training
    assert not isinstance(started(tiny(*LAST)).train, ActivationExamples)
    assert "the last bits of a batch depend on its size" in caplog.text


def _differs_at(sizes: Collection[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine whose matrix products have other last bits for these sizes."""
    original = prefix._identical
    monkeypatch.setattr(
        prefix, "_identical", lambda one, other: len(one) not in sizes and original(one, other)
    )


def test_runs_share_a_cache_if_their_frozen_blocks_see_the_same(tiny: Tiny) -> None:
    first = started(tiny(*LAST)).train
    again = started(tiny(*LAST, "train.lr=0.01", "head=ridge")).train
    assert isinstance(first, ActivationExamples)
    assert isinstance(again, ActivationExamples)
    assert first.activations.file == again.activations.file
    for word in (
        "seed=1",  # other random weights
        "backbone.resolution=32",
        "backbone.freeze_blocks=2",
        "data.train_per_class=5",
    ):
        trained = ["train.trainable=full"] if "freeze" in word else []
        assert started(tiny(*LAST, *trained, word)).train is not None
    assert len(entries()) == 5


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["augment=strong"], "images are augmented"),
        (["train.prefix_cache_gb=0.0001"], "more than train.prefix_cache_gb=0.0001 allows"),
        (
            ["train.steps_per_epoch=1", "train.epochs=1"],
            "this run sees 104 images, fewer than 0.5 times the 400",
        ),
        (["train.compile=true"], "compiles the whole model"),
        ([*FEDERATED, "algorithm=fisher_average"], "statistics of the whole model"),
        ([*FEDERATED, "engine=flower_simulation"], "reached through Flower"),
    ],
)
def test_a_run_that_is_not_cached_says_why(
    words: list[str], reason: str, tiny: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    experiment = started(tiny(*LAST, *words))
    assert experiment.model.cut is None
    assert "first 3 blocks are frozen; their activations are not cached: " in caplog.text
    assert reason in caplog.text
    assert not entries()


def test_a_run_that_sees_half_of_the_images_is_cached(tiny: Tiny) -> None:
    config = tiny(*LAST, "train.steps_per_epoch=1")  # 208 of 400
    assert started(config).model.cut is not None


def test_a_full_disk_is_left_alone(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    usage = type("Usage", (), {"free": prefix.RESERVE})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert started(tiny(*LAST)).model.cut is None
    assert "and the disk has 1.1 GB left" in caplog.text
    assert not entries()


def test_nothing_is_cached_where_the_first_block_is_trained(
    tiny: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert started(tiny("train.trainable=biases_and_norms")).model.cut is None
    assert "activations" not in caplog.text


def test_the_limit_does_not_make_it_another_run(tiny: Tiny) -> None:
    assert run_name(tiny(*LAST, OFF)) == run_name(tiny(*LAST))


def test_sizes_of_batches_by_hand() -> None:
    assert batch_sizes([100], 32) == {32, 4}
    assert batch_sizes([100, 64, 5], 32) == {32, 4, 5}
    assert batch_sizes([100], 32, micro_batch=20) == {20, 12, 4}
    assert batch_sizes([0], 32) == set()
