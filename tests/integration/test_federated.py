"""Federated runs from end to end: their records, their engines, and the faults they survive."""

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console, RenderableType
from safetensors.torch import load_file, save

from fedlens.config.compose import load
from fedlens.errors import FedlensError
from fedlens.experiments.run import resume, start
from fedlens.federated.client import Trainer
from fedlens.federated.engines import rows
from fedlens.federated.tasks import ClientTask, ClientUpdate
from fedlens.params import Params
from fedlens.reporting.terminal.runs import run_page, runs_table
from fedlens.store.checkpoints import TENSORS
from fedlens.store.run_folder import RunFolder, runs
from tests.integration.conftest import (
    FEDERATED,
    ON_FEATURES,
    Tiny,
    empty_cache,
    facts,
    interrupted_at,
)

RIDGE = ["head=ridge", "train.trainable=head", "augment=none"]
MODES = {
    "full": [],
    "last block": ["train.trainable=last_blocks:1"],
    "frozen blocks": ["backbone.freeze_blocks=2"],
    "head on features": ON_FEATURES,
    "head on images": ["train=head", "augment=standard"],
    "ridge alone": RIDGE,
    "ridge alone, on images": [
        "head=ridge",
        "train.trainable=head",
        "augment=standard",
        "engine=auto",
    ],
    "class means alone": ["head=class_means", "train.trainable=head", "augment=none"],
    "ridge, then full": ["head=ridge"],
    "class means, then last block": ["head=class_means", "train.trainable=last_blocks:1"],
    "ridge, then trained": [*RIDGE, "head.freeze=false"],
}
WORKERS = ["engine=parallel", "engine.workers=2", "engine.threads_per_client=1"]


def shown(page: RenderableType) -> str:
    console = Console(width=250)
    with console.capture() as capture:
        console.print(page)
    return capture.get()


def records(folder: RunFolder) -> list[dict[str, Any]]:
    return folder.journal("metrics").read()


def outcome(folder: RunFolder) -> dict[str, Any]:
    assert folder.result is not None
    return folder.result


def serialised(folder: RunFolder) -> int:
    """Bytes of the trained parameters, as safetensors."""
    tensors = load_file(max(folder.checkpoints.iterdir()) / TENSORS)
    return len(save({n[6:]: value for n, value in tensors.items() if n.startswith("model/")}))


MERGING = {
    "regmean": ["algorithm=regmean"],
    "fisher_average": ["algorithm=fisher_average", "algorithm.statistics_examples=8"],
    "tsv_merge": ["algorithm=tsv_merge"],
    "iso_c": ["algorithm=iso_c"],
    "regmean of heads": ["algorithm=regmean", *ON_FEATURES],
}


@pytest.mark.parametrize("name", MERGING)
def test_updates_are_merged_and_an_interrupted_run_ends_with_the_same_bits(
    name: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*FEDERATED, *MERGING[name], "checkpoint.every=1"]
    whole = start(tiny(*words, root="whole"))
    cut = tiny(*words, root="cut")
    assert interrupted_at(cut, 6, monkeypatch)
    assert facts(start(cut)) == facts(whole)
    traffic = {
        (line["bytes_up"], line["bytes_down"]) for line in records(whole) if "clients" in line
    }
    ((up, down),) = traffic
    assert (up > down) == (MERGING[name][0] in ("algorithm=regmean", "algorithm=fisher_average"))


@pytest.mark.parametrize("mode", MODES)
def test_every_central_mode_has_a_federated_counterpart(mode: str, tiny: Tiny) -> None:
    folder = start(tiny(*FEDERATED, *MODES[mode], "federated.rounds=2"))
    result = outcome(folder)
    trained = 0 if "alone" in mode else 2
    assert (result["unit"], result["units"], result["clients"]) == ("round", trained, 5)
    first = (
        0 if "ridge" in mode or "means" in mode else 1
    )  # a fitted head is evaluated before the rounds
    assert [record["round"] for record in records(folder)] == list(range(first, trained + 1))
    assert set(result["per_client"]) == {"mean", "worst_decile"}
    assert result["facts"].keys() >= (
        {"temperature", "statistics_bytes_up"} if not first else set()
    )
    row = shown(runs_table([folder]))
    assert "1 run, finished" in row
    assert "FedAvg, 5 clients, 2 local steps, partition IID" in shown(run_page(folder))


def test_a_federated_ridge_head_is_the_central_one_under_every_partition(tiny: Tiny) -> None:
    pooled = outcome(start(tiny(*RIDGE, "run.name=central")))
    for name in ("iid", "classes", "dirichlet", "quantity"):
        options = ["partition.classes_per_client=40"] if name == "classes" else []
        partition = [f"partition={name}", *options, f"run.name={name}"]
        federated = outcome(start(tiny(*FEDERATED, *RIDGE, *partition)))
        assert federated["facts"]["l2"] == pooled["facts"]["l2"]
        assert federated["test"]["per_class"] == pooled["test"]["per_class"]
        assert federated["test"]["loss"] == pytest.approx(pooled["test"]["loss"], rel=1e-4)


def test_cyclic_sampling_draws_all_clients_before_one_is_drawn_again(tiny: Tiny) -> None:
    six = [*FEDERATED, "federated.clients=6", "federated.participation=0.5", "federated.rounds=4"]
    cohorts = [line["participants"] for line in records(start(tiny(*six, "algorithm=cyclic")))]
    assert sorted(cohorts[0] + cohorts[1]) == sorted(cohorts[2] + cohorts[3]) == list(range(6))


def test_cached_features_and_an_unchanged_backbone_give_the_same_accuracy(tiny: Tiny) -> None:
    """The learning rate is too small to change a parameter's last bit."""
    options = [*FEDERATED, "head=ridge", "federated.rounds=1", "train.lr=1e-30"]
    before, after = records(start(tiny(*options)))
    assert (before["round"], after["round"]) == (0, 1)
    assert before["validation"]["top1"] == after["validation"]["top1"] > 0
    assert before["validation"]["loss"] == pytest.approx(after["validation"]["loss"], rel=1e-5)


def test_drift_does_not_depend_on_how_updates_are_aggregated(tiny: Tiny) -> None:
    options = [*FEDERATED, "federated.rounds=1", "threads=1"]
    averaged, merged = (
        records(start(tiny(*options, f"algorithm={algorithm}", f"run.name={algorithm}")))[0]
        for algorithm in ("fedavg", "ties")
    )
    assert merged["update_norms"] == averaged["update_norms"]
    assert merged["drift"] == averaged["drift"] > 0


def test_the_record_of_a_round(tiny: Tiny) -> None:
    options = ["federated.rounds=5", "evaluate.every=2", "train.schedule.name=linear"]
    config = tiny(*FEDERATED, *options, "partition=classes", "partition.classes_per_client=30")
    folder = start(config)
    lines = records(folder)
    assert [line["round"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["round"] for line in lines if "validation" in line] == [2, 4, 5]
    common = {
        "round", "lr", "participants", "clients", "train", "client_losses", "update_norms",
        "drift", "cosine", "sign_agreement", "bytes_down", "bytes_up",
    }  # fmt: skip
    weight = serialised(folder)
    for line in lines:
        evaluated = {"validation", "per_client"} if "validation" in line else set()
        assert line.keys() == common | evaluated
        assert line["clients"] == line["participants"] == sorted(set(line["participants"]))
        assert len(line["clients"]) == len(line["client_losses"]) == len(line["update_norms"]) == 3
        assert line["lr"] == 0.05 * config.train.schedule.factor(line["round"] - 1, 5)
        assert line["train"].keys() == {"loss", "accuracy"}
        assert min(line["client_losses"]) <= line["train"]["loss"] <= max(line["client_losses"])
        assert 0 < line["drift"] <= max(line["update_norms"])
        assert -1 <= line["cosine"] <= 1
        assert 0 <= line["sign_agreement"] <= 1
        assert line["bytes_down"] == line["bytes_up"] == 3 * weight
        if evaluated:
            per_client = line["per_client"]
            assert 0 <= per_client["worst_decile"] <= per_client["mean"] <= 1
    assert len({tuple(line["participants"]) for line in lines}) > 1
    assert "seconds" not in folder.journal("metrics").path.read_text()

    timings = folder.journal("timings").read()
    assert [timing["round"] for timing in timings] == [1, 2, 3, 4, 5]
    for timing in timings:
        phases = {"prepare_seconds", "train_seconds", "aggregate_seconds", "evaluate_seconds"}
        assert timing.keys() == {"round", "images_per_second", *phases}
        assert all(timing[phase] >= 0 for phase in phases)


def test_the_partition_is_recorded(tiny: Tiny) -> None:
    skew = ["partition=classes", "partition.classes_per_client=30"]
    folder = start(tiny(*FEDERATED, *RIDGE, *skew))
    partition = folder.partition
    assert partition is not None
    assert (partition["name"], partition["classes_per_client"]) == ("classes", 30)
    histogram, numbers = torch.tensor(partition["histogram"]), partition["statistics"]
    assert histogram.shape == (5, 100)
    assert numbers["sizes"] == histogram.sum(1).tolist()
    assert numbers["classes_per_client"] == (histogram > 0).sum(1).tolist() == [30] * 5
    assert numbers["samples"] == int(histogram.sum())
    assert len(numbers["label_entropy"]) == len(numbers["emd"]) == 5
    assert numbers["summary"].keys() == {"sizes", "classes_per_client", "label_entropy", "emd"}
    assert all(0 <= distance <= 1 for distance in numbers["emd"])


def test_the_budget_of_local_steps_decides_the_rounds(tiny: Tiny) -> None:
    options = ["federated.rounds=auto", "federated.local_step_budget=9"]
    folder = start(tiny(*FEDERATED, *ON_FEATURES, *options, "federated.local_steps=4"))
    assert [record["round"] for record in records(folder)] == [1, 2, 3]
    factors = [record["lr"] / 0.05 for record in records(folder)]
    assert factors == sorted(factors, reverse=True)  # the schedule knows how many there are


def test_a_run_of_no_rounds_evaluates_the_initial_model(tiny: Tiny) -> None:
    folder = start(tiny(*FEDERATED, *ON_FEATURES, "federated.rounds=0"))
    assert [record["round"] for record in records(folder)] == [0]
    assert outcome(folder)["units"] == 0


def test_early_stopping_and_selection_on_validation(tiny: Tiny) -> None:
    still = [*FEDERATED, *ON_FEATURES, "federated.rounds=30", "train.lr=1e-12"]
    folder = start(tiny(*still, "train.early_stopping=2", "evaluate.every=2"))
    assert outcome(folder)["units"] == 6  # no round was better than the second
    assert outcome(folder)["choice"] | {"parameters": ""} == {
        "parameters": "", "chosen_on": "validation", "unit": 2,
    }  # fmt: skip

    learning = [*FEDERATED, *ON_FEATURES, "federated.rounds=6", "train.lr=0.3"]
    best = start(tiny(*learning, "evaluate.select=best", "checkpoint.every=4"))
    last = start(tiny(*learning, "evaluate.select=last"))
    assert facts(best)["metrics"] == facts(last)["metrics"]
    accuracies = [record["validation"]["top1"] for record in records(best)]
    assert outcome(best)["choice"]["unit"] == 1 + accuracies.index(max(accuracies))
    assert outcome(best)["validation"]["top1"] == max(accuracies)
    assert outcome(last)["choice"] | {"parameters": ""} == {
        "parameters": "", "chosen_on": "last", "unit": 6,
    }  # fmt: skip


SAME_BITS = {
    "head on augmented images": [
        "train=head",
        "augment=strong",
        "head.dropout=0.2",
        "federated.rounds=2",
    ],
    "scaffold, near the global model, stragglers": [
        "train.trainable=last_blocks:1",
        "algorithm=scaffold", "algorithm.proximal=0.1", "federated.min_local_steps=1",
    ],
    "head on features": [*ON_FEATURES, "algorithm=median"],
}  # fmt: skip


@pytest.mark.parametrize("mode", SAME_BITS)
def test_workers_give_the_bits_of_one_process(mode: str, tiny: Tiny) -> None:
    common = [*FEDERATED, *SAME_BITS[mode], "engine.threads_per_client=1"]
    one_process = ["engine=serial", "engine.vectorise=false"]
    serial = start(tiny(*common, *one_process, root="serial"))
    parallel = start(tiny(*common, *WORKERS, root="parallel"))
    assert facts(parallel) == facts(serial)


@pytest.mark.parametrize("faster", [True, False])
def test_auto_logs_its_choice_and_keeps_it(
    faster: bool, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(faster: bool) -> None:
        """By this, worker processes and shortcuts are both faster, or neither."""
        monkeypatch.setattr(rows, "MIN_SPEEDUP", 0.0 if faster else 1e9)
        monkeypatch.setattr(rows, "MIN_SHORTCUT", 0.0 if faster else 1e9)
        empty_cache(monkeypatch, tmp_path / f"cache {faster}")

    common = [*FEDERATED, *ON_FEATURES, "engine.vectorise=false"]
    expected = facts(start(tiny(*common, f"engine.shortcuts={faster}", root="whole")))
    measured(faster)
    config = tiny(*common, "engine=auto", "engine.workers=2")
    assert interrupted_at(config, 6, monkeypatch)
    (folder,) = runs(Path(config.run.root))
    chosen = "parallel" if faster else "serial"
    assert f"as one process with 1: {chosen}" in folder.log.read_text()
    assert load(folder.config).engine.name == chosen
    measured(not faster)  # now the probe would choose the other
    assert facts(start(config)) == expected  # the probe did not change the model
    kept = load(folder.config).engine
    assert (kept.name, kept.shortcuts) == (chosen, faster)
    assert folder.log.read_text().count("engine=auto") == 2  # workers, and shortcuts


def changed(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[ClientTask, ClientUpdate], ClientUpdate]
) -> None:
    """Clients answer with `change(task, update)`."""
    real = Trainer.train

    def train(self: Trainer, task: ClientTask, parameters: Params) -> ClientUpdate:
        return change(task, real(self, task, parameters))

    monkeypatch.setattr(Trainer, "train", train)


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked with the patch in them")
def test_a_worker_that_dies_does_not_change_the_result(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    common = [*FEDERATED, *ON_FEATURES, "algorithm=scaffold"]
    expected = facts(start(tiny(*common, "engine.vectorise=false", root="whole")))
    main, died = os.getpid(), tmp_path / "died"

    def dying(task: ClientTask, update: ClientUpdate) -> ClientUpdate:
        if task.round == 2 and os.getpid() != main and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return update

    changed(monkeypatch, dying)
    folder = start(tiny(*common, *WORKERS, root="cut"))
    assert died.exists()
    assert facts(folder) == expected
    both_ways = 3 * 2 * serialised(folder)  # with SCAFFOLD, controls travel beside parameters
    assert all(line["bytes_down"] == line["bytes_up"] == both_ways for line in records(folder))
    assert "died (exit code -9); a new one trains the client again" in folder.log.read_text()


@pytest.mark.parametrize(
    "options",
    [
        ["partition=quantity", "partition.min_size=1"],
        ["algorithm=scaffold", "head.dropout=0.2", "train.label_smoothing=0.1"],
        ["algorithm=ghbm", "federated.min_local_steps=1"],
        ["algorithm=fedcm", "algorithm.correction.alpha=0.5"],
        ["algorithm=feddyn", "algorithm.correction.alpha=0.1"],
        [
            "algorithm=fedprox",
            "train.optimizer.nesterov=true",
            "train.clip_norm=0.5",
            "algorithm.proximal=1",
        ],
        ["algorithm=fednova", "federated.min_local_steps=1", "federated.local_steps=5"],
    ],
)
def test_a_vectorised_cohort_learns_what_single_clients_do(options: list[str], tiny: Tiny) -> None:
    common = [*FEDERATED, *ON_FEATURES, *options, "federated.rounds=5", "train.lr=0.3"]
    fast = start(tiny(*common, root="fast"))
    slow = start(tiny(*common, "engine.vectorise=false", root="slow"))
    sample = 1 / outcome(slow)["test"]["count"]
    assert outcome(fast)["test"]["top1"] == pytest.approx(outcome(slow)["test"]["top1"], abs=sample)
    validation_images = 40
    for one, other in zip(records(fast), records(slow), strict=True):
        assert one["participants"] == other["participants"]
        assert one["train"]["loss"] == pytest.approx(other["train"]["loss"], rel=1e-4)
        assert one["client_losses"] == pytest.approx(other["client_losses"], rel=1e-4)
        assert one["update_norms"] == pytest.approx(other["update_norms"], rel=1e-3)
        assert one["validation"]["loss"] == pytest.approx(other["validation"]["loss"], rel=1e-4)
        assert one["validation"]["top1"] == pytest.approx(
            other["validation"]["top1"], abs=1.001 / validation_images
        )


def test_a_round_without_any_update_keeps_the_model(tiny: Tiny) -> None:
    options = ["federated.dropout=0.7", "federated.rounds=8", "algorithm=fedavgm"]
    folder = start(tiny(*FEDERATED, *ON_FEATURES, *options))
    lines = records(folder)
    silent = [line for line in lines if not line["clients"]]
    assert 0 < len(silent) < 8
    for line in lines:
        assert set(line["dropped"]) == set(line["participants"]) - set(line["clients"])
        assert line["bytes_up"] * 3 == line["bytes_down"] * len(line["clients"])
        before = lines[line["round"] - 2]["validation"]
        if not line["clients"]:
            assert "train" not in line
            assert line["round"] == 1 or line["validation"] == before
        else:
            assert line["validation"] != before
    assert "–" in shown(run_page(folder))


def nan(update: ClientUpdate) -> ClientUpdate:
    return replace(update, parameters={n: v * torch.nan for n, v in update.parameters.items()})


def infinite(update: ClientUpdate) -> ClientUpdate:
    spoiled = {name: value.clone() for name, value in update.parameters.items()}
    spoiled["head.bias"][0] = torch.inf
    return replace(update, parameters=spoiled)


def misshapen(update: ClientUpdate) -> ClientUpdate:
    return replace(update, parameters={**update.parameters, "head.bias": torch.zeros(3)})


def incomplete(update: ClientUpdate) -> ClientUpdate:
    return replace(update, parameters={"head.bias": update.parameters["head.bias"]})


@pytest.mark.parametrize(
    ("spoil", "reason", "algorithm"),
    [
        (nan, "not finite", "scaffold"),
        (infinite, "not finite", "median"),
        (misshapen, "head.bias has shape (3,) instead of (100,)", "scaffold"),
        (incomplete, "missing head.weight", "fedadam"),
    ],
)
def test_bad_updates_are_left_out_recorded_and_logged(
    spoil: Callable[[ClientUpdate], ClientUpdate],
    reason: str,
    algorithm: str,
    tiny: Tiny,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changed(monkeypatch, lambda task, update: spoil(update) if task.client == 0 else update)
    common = [*FEDERATED, *ON_FEATURES, "engine.vectorise=false", f"algorithm={algorithm}"]
    folder = start(tiny(*common))
    rejections = 0
    for line in records(folder):
        assert line["clients"] == [client for client in line["participants"] if client]
        assert len(line["update_norms"]) == len(line["clients"])
        if 0 in line["participants"]:
            rejections += 1
            assert line["rejected"].keys() == {"0"}
            assert reason in line["rejected"]["0"]
        else:
            assert "rejected" not in line
    assert rejections
    assert folder.log.read_text().count("The update of client 0 in round") == rejections
    assert "client-0-" not in " ".join(p.name for p in folder.path.glob("clients/*"))

    with pytest.raises(FedlensError, match=r"set federated\.fail_on_bad_update=false") as caught:
        start(tiny(*common, "federated.fail_on_bad_update=true", "run.name=strict"))
    assert "\n" not in str(caught.value)
    strict = RunFolder(folder.path.parent / "strict")
    assert strict.state() == "failed"
    assert "client 0" in shown(run_page(strict))


@pytest.mark.parametrize("engine", [[], ["engine.vectorise=false"], WORKERS])
def test_when_all_updates_are_bad_the_model_is_kept(engine: list[str], tiny: Tiny) -> None:
    """The learning rate makes every client diverge."""
    folder = start(
        tiny(*FEDERATED, *ON_FEATURES, *engine, "train.lr=1e38", "train.optimizer.momentum=0")
    )
    lines = records(folder)
    assert [line["clients"] for line in lines] == [[]] * 3
    assert all(len(line["rejected"]) == 3 for line in lines)
    assert len({json.dumps(line["validation"]) for line in lines}) == 1
    assert outcome(folder)["units"] == 3


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (
            ["partition=classes", "partition.classes_per_client=101"],
            "more classes than the 100 present",
        ),
        (["partition=classes", "partition.classes_per_client=19"], "95 places for 100 classes"),
        (["federated.clients=500"], "clients=500 is more than the 360"),
        (["partition=dirichlet", "partition.min_size=100"], "min_size=100"),
    ],
)
def test_an_impossible_partition_is_refused_in_one_sentence(
    options: list[str], complaint: str, tiny: Tiny
) -> None:
    with pytest.raises(FedlensError, match=complaint) as caught:
        start(tiny(*FEDERATED, *options))
    assert "\n" not in str(caught.value)
    assert "choose" in str(caught.value)


def test_central_federated_and_interrupted_runs_are_listed_side_by_side(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tiny(*ON_FEATURES, "run.name=central"))
    start(tiny(*FEDERATED, *ON_FEATURES, "run.name=federated"))
    skewed = ["partition=dirichlet", "partition.alpha=0.5", "partition.min_size=1"]
    config = tiny(*FEDERATED, *ON_FEATURES, *skewed, "algorithm=scaffold", "run.name=stopped")
    assert interrupted_at(config, 7, monkeypatch)
    early = tiny(*FEDERATED, *ON_FEATURES, "train.lr=0.04", "run.name=early")
    assert interrupted_at(early, 1, monkeypatch)
    folders = runs(Path(config.run.root))
    listed = {line.split()[0]: line for line in shown(runs_table(folders)).splitlines()[2:]}
    for name, words in {
        "central": ["finished", "central"],
        "federated": ["finished", "IID"],
        "stopped": ["interrupted", "1 round"],
        "early": ["interrupted", "0 rounds"],
    }.items():
        assert all(word in listed[name] for word in words), listed[name]
    pages = {folder.name: shown(run_page(folder)) for folder in folders}
    assert "federation" not in pages["central"]
    assert "client accuracy" in pages["federated"]
    assert "SCAFFOLD, 5 clients, 2 local steps, partition Dirichlet α=0.5" in pages["stopped"]
    assert "fedlens resume" in pages["stopped"]
    (stopped,) = (folder for folder in folders if folder.name == "stopped")
    assert "finished" in shown(run_page(resume(stopped)))


def test_the_folders_name_describes_the_federation(tiny: Tiny) -> None:
    folder = start(tiny(*FEDERATED, *RIDGE, "partition=dirichlet", "partition.min_size=1"))
    assert "_dirichlet-alpha=0.3_fedavg-J2_s0_" in folder.name
    assert folder.manifest is not None
    assert folder.manifest["partition"] == dict(load(folder.config).partition)
