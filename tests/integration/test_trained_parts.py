"""Runs that train a part of the model: what they record, how they are loaded, what is refused."""

import re
from pathlib import Path

import pytest
import torch

from fedlens.errors import FedlensError
from fedlens.experiments.loaded_run import load_run
from fedlens.experiments.run import start
from fedlens.reporting import report
from fedlens.reporting.study.content import About
from fedlens.runtime.stop import StopRequest
from fedlens.store.run_folder import RunFolder
from tests.integration.conftest import FEDERATED, TINY, Call, Tiny

COMMON = [*FEDERATED, "head=ridge", "federated.keep_updates=1", "evaluate.select=last"]
PARTS = {
    "full": [],
    "lora": ["train.trainable=lora", "train.trainable.rank=2"],
    "exact": ["train.trainable=lora", "train.trainable.average=products"],
    "linearised": ["train.trainable=linearised"],
    "biases": ["train.trainable=biases_and_norms"],
    "mask": ["sparse.density=0.03", "sparse.rule=random"],
}
TINY_RESNET = [
    "backbone=timm:test_resnet", "backbone.resolution=32", "backbone.pretrained=false",
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunFolder]:
    from fedlens.config.compose import compose

    root = tmp_path_factory.mktemp("parts")
    return {
        name: start(
            compose("quickstart", [*TINY, *COMMON, *words, f"run.root={root}", f"run.name={name}"])
        )
        for name, words in PARTS.items()
    }


@pytest.mark.parametrize("name", PARTS)
def test_a_run_records_what_it_trains_and_what_an_update_weighs(
    name: str, runs: dict[str, RunFolder]
) -> None:
    folder = runs[name]
    assert folder.result is not None
    facts = folder.result["facts"]
    last = folder.journal("metrics").read()[-1]
    assert last["bytes_up"] == len(last["participants"]) * facts["update_bytes"]
    assert facts["update_bytes"] >= 4 * facts["trained_parameters"] > 0
    if name == "exact":
        assert last["bytes_down"] > 5 * last["bytes_up"]
    else:
        assert last["bytes_down"] == last["bytes_up"]


@pytest.mark.parametrize("name", ["lora", "exact", "linearised"])
def test_a_finished_run_is_loaded_with_the_names_of_the_plain_model(
    name: str, runs: dict[str, RunFolder]
) -> None:
    plain = load_run(runs["full"], StopRequest())
    run = load_run(runs[name], StopRequest())
    assert run.tuned.keys() == run.start.keys() == plain.start.keys()
    for key, value in plain.start.items():
        assert torch.equal(run.start[key], value)
    assert any(not torch.equal(run.tuned[key], run.start[key]) for key in run.start)
    result = runs[name].result
    assert result is not None
    assert run.validate(run.tuned).top1 == result["validation"]["top1"]


def test_methods_that_merge_whole_weights_refuse_factors(
    runs: dict[str, RunFolder], fedlens: Call
) -> None:
    root = str(runs["lora"].path.parent)
    code, _, error = fedlens("arithmetic", "merge", "lora", "--runs", root)
    assert code == 2
    assert "sent LoRA's factors" in error
    assert "Traceback" not in error
    assert fedlens("arithmetic", "merge", "lora", "--runs", root, "--method", "ties")[0] == 0
    code, _, error = fedlens("arithmetic", "merge", "exact", "--runs", root, "--method", "ties")
    assert code == 2
    assert "a client's factors alone are not its model" in error


def test_a_linearised_run_is_not_exported(
    runs: dict[str, RunFolder], fedlens: Call, tmp_path: Path
) -> None:
    root = str(runs["linearised"].path.parent)
    code, _, error = fedlens("export", "linearised", "--runs", root, "--out", str(tmp_path / "out"))
    assert code == 2
    assert "first-order expansion" in error
    assert not (tmp_path / "out").exists()


def test_the_report_compares_parts_by_the_bytes_of_an_update(
    runs: dict[str, RunFolder], tmp_path: Path, unsaved_figures: None
) -> None:
    report.write([runs["full"].path.parent], tmp_path / "report", About())
    tables = (tmp_path / "report" / "tables" / "tables.md").read_text(encoding="utf-8")
    part = tables.partition("Which part of the model to train")[2].partition("\n## ")[0]
    sizes = [float(text.replace(",", "")) for text in re.findall(r"\(([\d,]+) kB\)", part)]
    assert len(sizes) >= len(PARTS)
    rows = sizes[: len(PARTS)]
    assert rows == sorted(rows, reverse=True)
    for label in ("LoRA, rank 2", "biases and norms", "linearised fine-tuning", "random"):
        assert label in part


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train.trainable=lora", "sparse.density=0.1"], "trains another part"),
        (["train.trainable=lora", "train.trainable.rank=0"], "rank=0 must be in"),
        (["train.trainable=lora", "algorithm=regmean"], "merges a model's own weights"),
        (["train.trainable=linearised", "algorithm=iso_c"], "merges a model's own weights"),
        (["train.trainable=lora", "train.trainable.average=products", "algorithm=ties"],
         "is an exact mean"),
        (["train.trainable=linearised", "backbone.batch_norm=averaged"], "batch_norm=frozen"),
        (["backbone.batch_norm=local", "algorithm=scaffold"], "choose one"),
        (["backbone.batch_norm=local", "engine=flower_simulation"], "cannot be used"),
        (["backbone.batch_norm=sometimes"], "backbone.batch_norm=sometimes is unknown"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(words: list[str], sentence: str, tiny: Tiny) -> None:
    with pytest.raises(FedlensError, match=re.escape(sentence)) as caught:
        tiny(*FEDERATED, *words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "clients update the statistics and the server averages them"),
        (["backbone.batch_norm=frozen"], "their statistics stay as they are"),
        (["backbone.batch_norm=local"], "every client keeps its own"),
    ],
)
def test_the_log_says_what_happens_to_batch_norm(
    words: list[str], sentence: str, tiny: Tiny
) -> None:
    folder = start(tiny(*FEDERATED, *TINY_RESNET, *words, "federated.rounds=1"))
    assert sentence in folder.log.read_text(encoding="utf-8")


def test_a_network_from_scratch_learns_its_statistics_unless_they_are_frozen(tiny: Tiny) -> None:
    names = {}
    for mode in ("auto", "frozen"):
        folder = start(
            tiny(*TINY_RESNET, f"backbone.batch_norm={mode}", "train.epochs=1", root=mode)
        )
        run = load_run(folder, StopRequest())
        buffers = dict(run.experiment.backbone.named_buffers())
        names[mode] = {
            name for name, value in buffers.items()
            if name.endswith("running_mean") and value.count_nonzero()
        }  # fmt: skip
    assert names["auto"]
    assert not names["frozen"]
