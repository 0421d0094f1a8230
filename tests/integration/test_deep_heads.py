"""Runs whose head reads several layers: one head for all partitions, trained, loaded, refused."""

from pathlib import Path

import pytest
import torch

import fedlens as fl
from fedlens.config.compose import compose
from fedlens.data.examples import ImageExamples
from fedlens.experiments.loaded_run import load_run
from fedlens.experiments.run import start
from fedlens.runtime.stop import StopRequest
from fedlens.store.run_folder import RunFolder
from tests.integration.conftest import FEDERATED, TINY, Call

DEEP = [*FEDERATED, "head=deep_ridge", "head.layers=2", "head.l2=10", "evaluate.select=last"]
RUNS = {
    "even": ["train.trainable=head", "partition=iid"],
    "one_class": [
        "train.trainable=head", "partition=classes", "partition.classes_per_client=1",
        "federated.clients=100",
    ],
    "shallow": ["train.trainable=head", "head.layers=1"],
    "tuned": ["train.trainable=full", "train.lr=0.01"],
    "masked": ["train.trainable=full", "sparse.density=0.1", "sparse.rounds=2", "train.lr=0.01"],
    "random": ["train.trainable=head", "head.random_features=40"],
    "gaussian": ["train.trainable=head", "head=gaussian", "head.layers=2"],
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunFolder]:
    root = tmp_path_factory.mktemp("deep")
    deep = {name: [word for word in DEEP if not (name == "gaussian" and "head" in word)]
            for name in RUNS}  # fmt: skip
    return {
        name: start(
            compose(
                "quickstart", [*TINY, *deep[name], *words, f"run.root={root}", f"run.name={name}"]
            )
        )
        for name, words in RUNS.items()
    }


def head(folder: RunFolder) -> torch.Tensor:
    return load_run(folder, StopRequest()).tuned["head.weight"]


def test_every_partition_gives_the_same_head(runs: dict[str, RunFolder]) -> None:
    even, one_class = (head(runs[name]) for name in ("even", "one_class"))
    assert even.shape[1] == 3 * 96  # the output and the means of two blocks
    torch.testing.assert_close(even, one_class, rtol=1e-4, atol=1e-5)


def test_a_shallower_reading_is_the_beginning_of_a_deeper_one_that_is_cached(
    runs: dict[str, RunFolder],
) -> None:
    """`shallow` read the features that `even` had cached; computed anew they are the same."""
    experiment = load_run(runs["shallow"], StopRequest()).experiment
    features = experiment.features
    images = ImageExamples(
        features.images, features.train_index, experiment.extractor.pipeline
    ).batch(torch.arange(len(features.train_index)))
    with torch.no_grad():
        computed = experiment.backbone(images)
    assert features.train.features.shape == computed.shape
    torch.testing.assert_close(features.train.features, computed)


def test_bytes_are_those_of_half_the_matrix(runs: dict[str, RunFolder]) -> None:
    result = runs["even"].result
    assert result is not None
    width, classes, clients = 3 * 96, 100, load_run(runs["even"], StopRequest()).experiment
    assert clients.partition is not None
    numbers = width * (width + 1) // 2 + width * classes + classes
    sent = result["facts"]["statistics_bytes_up"] / len(clients.partition)
    assert numbers * 8 <= sent < numbers * 8 + 1000


def test_training_starts_from_the_head_s_accuracy_and_moves_every_block(
    runs: dict[str, RunFolder],
) -> None:
    for name in ("tuned", "masked"):
        run = load_run(runs[name], StopRequest())
        assert torch.equal(run.start["head.weight"], run.tuned["head.weight"])
        moved = {key for key in run.start if not torch.equal(run.start[key], run.tuned[key])}
        assert moved
        assert all(key.startswith("backbone.") for key in moved)
        first = runs[name].journal("metrics").read()[0]
        assert first["validation"]["top1"] == pytest.approx(run.validate(run.start).top1)


def test_an_exported_model_reads_the_same_layers(
    runs: dict[str, RunFolder], fedlens: Call, tmp_path: Path
) -> None:
    for name in ("tuned", "random"):
        out = tmp_path / name
        code, _, error = fedlens("export", str(runs[name].path), "--out", str(out))
        assert code == 0, error
        run = load_run(runs[name], StopRequest())
        model = fl.load_model(out)
        images = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8)
        experiment = run.experiment
        inputs = model.preprocess(images)
        run.assign(run.tuned)
        with torch.no_grad():
            expected = experiment.model.head(experiment.backbone(inputs))
            torch.testing.assert_close(model(inputs), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("engine", ["parallel", "auto"])
def test_other_engines_give_the_same(
    engine: str, runs: dict[str, RunFolder], tmp_path: Path
) -> None:
    words = [*TINY, *DEEP, *RUNS["tuned"], f"run.root={tmp_path}", f"engine={engine}"]
    folder = start(compose("quickstart", words))
    ours, theirs = (load_run(one, StopRequest()).tuned for one in (folder, runs["tuned"]))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["head.layers=9"], "head.layers=9 must be in 0 to 4, the number of blocks."),
        (["head.layers=-1"], "head.layers=-1 must be in"),
        (["head.tokens=all"], "head.tokens=all is unknown"),
        (["head.random_features=0"], "head.random_features=0 must be in"),
    ],
)
def test_impossible_readings_are_refused(
    words: list[str], sentence: str, fedlens: Call, tmp_path: Path
) -> None:
    code, _, error = fedlens("run", "quickstart", *TINY, *words, f"run.root={tmp_path}")
    assert code == 2
    assert sentence in error
    assert "Traceback" not in error


def test_labels_say_what_is_read() -> None:
    from fedlens.config.labels import labels

    shown = [labels(compose("ridge", words))["head"] for words in (
        [], ["head=deep_ridge"], ["head=deep_ridge", "head.layers=1"],
        ["head.layers=2", "head.tokens=both"], ["head.random_features=5000"],
    )]  # fmt: skip
    assert shown == [
        "ridge head", "deep ridge head on 6 blocks", "deep ridge head on 1 block",
        "ridge head on 2 blocks, class and mean tokens", "ridge head on 5,000 random features",
    ]  # fmt: skip
