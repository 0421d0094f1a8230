"""An average of global models is evaluated, selected and kept; training does not notice it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlens.experiments.loaded_run import load_run
from fedlens.experiments.run import start
from fedlens.runtime.stop import StopRequest
from fedlens.store.checkpoints import Checkpoints
from fedlens.store.run_folder import RunFolder
from tests.integration.conftest import FEDERATED, ON_FEATURES, Tiny

MODEL, RAW = "model/", "raw/model/"
KEEP = ["checkpoint.keep_last=10", "checkpoint.keep_best=10"]
SPARSE = ["head=ridge", "sparse.density=0.1", "sparse.rule=random"]
RESNET = ["backbone=timm:test_resnet", "backbone.resolution=32", "backbone.pretrained=false"]


def tensors(folder: RunFolder, round_: int, prefix: str = MODEL) -> dict[str, torch.Tensor]:
    loaded = Checkpoints(folder.checkpoints).load(f"round-{round_:06d}").tensors
    return {n.removeprefix(prefix): v for n, v in loaded.items() if n.startswith(prefix)}


def training(folder: RunFolder) -> list[dict[str, Any]]:
    """The records without what evaluation adds."""
    lines = map(json.loads, folder.journal("metrics").path.read_text().splitlines())
    evaluated = ("validation", "per_client")
    return [{key: line[key] for key in line if key not in evaluated} for line in lines]


@pytest.mark.parametrize(
    "options", [ON_FEATURES, SPARSE, RESNET], ids=["head", "sparse", "BatchNorm"]
)
def test_the_mean_of_the_last_rounds_is_evaluated(options: list[str], tiny: Tiny) -> None:
    common = [*FEDERATED, *options, *KEEP, "evaluate.select=last"]
    plain = start(tiny(*common, root="plain"))
    last = ["algorithm.average=last", "algorithm.average.rounds=2"]
    folder = start(tiny(*common, *last, root="averaged"))
    assert training(folder) == training(plain)
    for round_ in (1, 2, 3):
        now = tensors(plain, round_)
        before = tensors(plain, max(1, round_ - 1))
        for name, value in tensors(folder, round_).items():
            expected = ((now[name].double() + before[name].double()) / 2).to(value.dtype)
            assert torch.equal(value, expected), name
        for name, value in tensors(folder, round_, RAW).items():
            if value.shape == now[name].shape:  # of a masked tensor, only what is trained
                assert torch.equal(value, now[name])
    result = folder.result
    assert result is not None
    assert result["choice"]["unit"] == 3
    assert result["algorithm"].endswith("evaluated by the mean of the last models, rounds 2")


@pytest.mark.parametrize("select", ["best", "last"])
def test_an_average_without_earlier_rounds_changes_no_number(select: str, tiny: Tiny) -> None:
    common = [*FEDERATED, *ON_FEATURES, f"evaluate.select={select}", "evaluate.test_curve=true"]
    plain = start(tiny(*common, root="plain"))
    now = ["algorithm.average=exponential", "algorithm.average.decay=0"]
    folder = start(tiny(*common, *now, root="averaged"))
    for name in ("metrics", "test_curve"):
        assert folder.journal(name).path.read_bytes() == plain.journal(name).path.read_bytes()
    assert (folder.result or {})["choice"] == (plain.result or {})["choice"]


def test_the_chosen_parameters_are_those_of_the_average(tiny: Tiny) -> None:
    average = ["algorithm.average=exponential", "algorithm.average.decay=0.5"]
    folder = start(tiny(*FEDERATED, *ON_FEATURES, *KEEP, *average))
    run = load_run(RunFolder(Path(folder.path)), StopRequest())
    chosen = tensors(folder, (folder.result or {})["choice"]["unit"])
    assert all(torch.equal(run.tuned[name], value) for name, value in chosen.items())
    assert not run.adds_updates
