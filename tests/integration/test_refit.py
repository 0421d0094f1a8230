"""A closed-form head that is solved again while the backbone below it is trained."""

from pathlib import Path

import pytest
import torch

from fedlens.config.compose import compose
from fedlens.data.examples import ImageExamples
from fedlens.experiments.loaded_run import load_run
from fedlens.experiments.run import start
from fedlens.models.heads import Statistics, deep_ridge
from fedlens.runtime.stop import StopRequest
from fedlens.store.run_folder import RunFolder
from tests.integration.conftest import FEDERATED, TINY, Call

WORDS = [
    *FEDERATED, "head=deep_ridge", "head.layers=2", "head.l2=10", "head.temperature=3",
    "federated.refit_head=2", "train.trainable=full", "train.lr=0.01", "evaluate.select=last",
    "federated.rounds=4",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    root = tmp_path_factory.mktemp("refit")
    return start(compose("quickstart", [*TINY, *WORDS, f"run.root={root}"]))


@torch.no_grad()
def test_the_last_head_is_the_solution_for_the_last_backbone(folder: RunFolder) -> None:
    run = load_run(folder, StopRequest())
    run.assign(run.tuned)
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


def test_worker_processes_receive_the_new_head(folder: RunFolder, tmp_path: Path) -> None:
    words = [*TINY, *WORDS, f"run.root={tmp_path}", "engine=parallel", "engine.workers=2",
             "engine.threads_per_client=1"]  # fmt: skip
    other = load_run(start(compose("quickstart", words)), StopRequest()).tuned
    for name, value in load_run(folder, StopRequest()).tuned.items():
        assert torch.equal(other[name], value)


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
    ],
)
def test_where_nothing_can_be_solved_it_is_refused(
    words: list[str], sentence: str, fedlens: Call, tmp_path: Path
) -> None:
    base = [*FEDERATED, "head=ridge", "federated.refit_head=2", "train.trainable=full"]
    code, _, error = fedlens("run", "quickstart", *TINY, *base, *words, f"run.root={tmp_path}")
    assert code == 2
    assert sentence in error
