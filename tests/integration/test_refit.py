"""A closed-form head that is solved again while the backbone below it is trained."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fedlens.config.compose import compose
from fedlens.config.identity import run_name
from fedlens.data.examples import ImageExamples
from fedlens.experiments.loaded_run import load_run
from fedlens.experiments.preparation.refit import HeadRefit
from fedlens.experiments.run import start
from fedlens.models.heads import Statistics, deep_ridge
from fedlens.runtime.stop import Interrupted, StopRequest
from fedlens.store.run_folder import RunFolder
from tests.integration.conftest import FEDERATED, TINY, Call, facts

WORDS = [
    *FEDERATED, "head=deep_ridge", "head.layers=2", "head.l2=10", "head.temperature=3",
    "federated.refit_head=2", "train.trainable=full", "train.lr=0.01", "evaluate.select=last",
    "federated.rounds=4",
]  # fmt: skip
UNDER_FEWER = [
    *WORDS, "head.train_layers=1", "federated.refit_head=3", "evaluate.every=4",
    "checkpoint.every=4",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    root = tmp_path_factory.mktemp("refit")
    return start(compose("quickstart", [*TINY, *WORDS, f"run.root={root}"]))


@pytest.fixture(scope="module")
def deepened(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    root = tmp_path_factory.mktemp("deepened")
    return start(compose("quickstart", [*TINY, *UNDER_FEWER, f"run.root={root}"]))


@pytest.mark.parametrize("name", ["folder", "deepened"])
def test_the_last_head_is_the_solution_for_the_last_backbone(
    name: str, request: pytest.FixtureRequest
) -> None:
    run = load_run(request.getfixturevalue(name), StopRequest())
    run.assign(run.tuned)
    run.experiment.model.requires_grad_(False)
    experiment = run.experiment
    features = experiment.features
    images = ImageExamples(
        features.images, features.train_index, experiment.extractor.pipeline
    ).batch(torch.arange(len(features.train_index)))
    sums = Statistics.of(
        experiment.backbone(images), features.images.labels[features.train_index], 100
    )
    expected, _ = deep_ridge(sums, None, l2=10.0, temperature=3.0)
    torch.testing.assert_close(run.tuned["head.weight"], expected.weight, rtol=1e-3, atol=2e-4)
    assert not torch.allclose(run.start["head.weight"], expected.weight, atol=1e-3)


def test_rounds_record_what_was_solved_and_sent(folder: RunFolder) -> None:
    records = folder.journal("metrics").read()
    solved = {record["round"]: record["refit"] for record in records if "refit" in record}
    assert sorted(solved) == [2, 4]
    by_round = {record["round"]: record for record in records if "bytes_up" in record}
    assert by_round[2]["bytes_up"] - by_round[1]["bytes_up"] == solved[2]["bytes_up"]
    assert by_round[2]["bytes_down"] == by_round[1]["bytes_down"]


def test_the_backbone_is_trained_under_a_head_on_fewer_blocks(deepened: RunFolder) -> None:
    """Features of vit_pico: 96 numbers of its output, and 96 of each block."""
    run = load_run(deepened, StopRequest())
    first, last = run.start["head.weight"], run.tuned["head.weight"]
    assert first.shape == last.shape == (100, 3 * 96)
    assert first[:, : 2 * 96].ne(0).any(0).all()
    assert not first[:, 2 * 96 :].any()
    assert last.ne(0).any(0).all()
    solved = {
        record["round"]: record["refit"]["bytes_up"]
        for record in deepened.journal("metrics").read()
        if "refit" in record
    }
    assert sorted(solved) == [3, 4]
    message = run.experiment.measurements["statistics_bytes_up"]
    assert solved[3] == message < solved[4]


def test_a_head_on_fewer_blocks_is_the_one_that_a_run_with_those_blocks_starts_from(
    deepened: RunFolder, tmp_path: Path
) -> None:
    words = [*TINY, *WORDS, "head.layers=1", f"run.root={tmp_path}", "federated.rounds=1"]
    other = load_run(start(compose("quickstart", words)), StopRequest()).start["head.weight"]
    mine = load_run(deepened, StopRequest()).start["head.weight"]
    torch.testing.assert_close(mine[:, : other.shape[1]], other, rtol=1e-5, atol=1e-6)


def test_the_blocks_that_it_is_trained_under_name_the_run() -> None:
    words = [*FEDERATED, "head=deep_ridge", "head.layers=2", "train.trainable=full"]
    plain = compose("quickstart", words)
    for layers in (0, 1):
        assert run_name(compose("quickstart", [*words, f"head.train_layers={layers}"])) != (
            run_name(plain)
        )
    assert run_name(compose("quickstart", [*words, "head.train_layers=null"])) == run_name(plain)


def test_worker_processes_receive_the_new_head(folder: RunFolder, tmp_path: Path) -> None:
    words = [*TINY, *WORDS, f"run.root={tmp_path}", "engine=parallel", "engine.workers=2",
             "engine.threads_per_client=1"]  # fmt: skip
    other = load_run(start(compose("quickstart", words)), StopRequest()).tuned
    for name, value in load_run(folder, StopRequest()).tuned.items():
        assert torch.equal(other[name], value)


@pytest.mark.parametrize("nth", [1, 2])  # of the heads: the second is the last round's
def test_a_run_stopped_while_it_solves_a_head_ends_with_the_same_bits(
    nth: int, deepened: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose("quickstart", [*TINY, *UNDER_FEWER, f"run.root={tmp_path}"])
    whole, solved = HeadRefit._sums, 0

    def sums(*args: Any) -> Statistics:
        nonlocal solved
        solved += 1
        if solved == nth:
            raise Interrupted("SIGINT")
        return whole(*args)

    with monkeypatch.context() as patch:
        patch.setattr(HeadRefit, "_sums", sums)
        with pytest.raises(Interrupted):
            start(config)
    assert facts(start(config)) == facts(deepened)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["head=linear"],
            "federated.refit_head=2 solves a head in closed form, and head=linear is none",
        ),
        (["head.freeze=false"], "federated.refit_head=2 replaces the head"),
        (["train.trainable=head"], "federated.refit_head=2 is for a backbone that moves"),
        (["federated.clients=null"], "federated.refit_head=2 counts rounds"),
        (["engine=flower_simulation"], "federated.refit_head=2 needs clients in this process"),
        (["federated.refit_head=0"], "federated.refit_head=0 must be 1 or more"),
        (
            ["federated.refit_head=null", "federated.refit_examples=5"],
            "federated.refit_examples=5 is for a head that is solved again",
        ),
        (["head.train_layers=0"], "head.train_layers=0 must be less than head.layers=0"),
        (
            ["head.layers=2", "head.train_layers=1", "head.random_features=9"],
            "head.train_layers=1 reads a part of the tokens",
        ),
        (
            ["head.layers=2", "head.train_layers=1", "train.early_stopping=1"],
            "train.early_stopping may end before it",
        ),
        (
            [
                "federated.refit_head=null",
                "head.layers=1",
                "head.train_layers=0",
                "head.freeze=false",
            ],
            "head.train_layers=0 replaces the head",
        ),
    ],
)
def test_where_nothing_can_be_solved_it_is_refused(
    words: list[str], sentence: str, fedlens: Call, tmp_path: Path
) -> None:
    base = [*FEDERATED, "head=ridge", "federated.refit_head=2", "train.trainable=full"]
    code, _, error = fedlens("run", "quickstart", *TINY, *base, *words, f"run.root={tmp_path}")
    assert code == 2
    assert sentence in error
