"""The suite colab: the assignment on a free T4, at equal budgets, in three days of 4 hours."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache

import pytest

from fedlens.config.schema import Config, rounds
from fedlens.registry import mask_rule
from fedlens.suites.budget import RESERVE, Phase, in_order
from fedlens.suites.budget_rules import Level
from fedlens.suites.estimates.cost import count_shared_once, work_of
from fedlens.suites.estimates.machines import KNOWN
from fedlens.suites.plan import plan, unique_runs
from fedlens.suites.suite import Cell, find

FORWARD_FLOP = 9.2e9  # of ViT-S/16 at 224 px: 4.6 G multiplications and additions
T4_FLOPS = KNOWN["t4"].half * KNOWN["t4"].half_utilisation
SECONDS = {  # an image takes; masks are computed in float32
    "train": 3 * FORWARD_FLOP / T4_FLOPS,
    "evaluate": FORWARD_FLOP / T4_FLOPS,
    "calibrate": 6 * FORWARD_FLOP / (KNOWN["t4"].single * KNOWN["t4"].utilisation),
    "visit": 2 * 5 * 4 * 21.7e6 / KNOWN["t4"].bandwidth,  # twice a step's passes over the weights
    "head": 0.0,
    "sums": 0.0,  # of 384 features: seconds for all images
    "solve": 0.0,
}
START_S = 5.0  # of a run
DAY_S = 4 * 3600.0


@cache
def colab() -> tuple[Cell, ...]:
    return tuple(find("colab").cells())


def seconds(cells: Sequence[Cell]) -> list[float]:
    counts = count_shared_once(work_of(cell.config) for cell in cells)
    return [
        START_S + math.fsum(images * SECONDS[task] for task, images in count.items())
        for count in counts
    ]


def test_every_federated_run_has_the_same_budget_of_local_steps_and_images() -> None:
    federated = [cell.config for cell in colab() if cell.config.federated.clients]
    assert {config.federated.local_steps for config in federated} == {4, 8, 16}
    assert {c.federated.local_steps * rounds(c) for c in federated} == {512}
    assert {config.train.batch_size for config in federated} == {32}
    assert {rounds(config) / config.evaluate.every for config in federated} == {4}


def test_central_training_sees_as_many_images_as_a_federated_run() -> None:
    trained = {
        cell.section: work_of(cell.config).images["train"]
        for cell in colab()
        if cell.config.federated.local_steps == 4 and "train" in work_of(cell.config).images
    }
    assert trained.pop("central fine-tuning") == 512 * 10 * 32
    assert set(trained.values()) == {512 * 10 * 32}


def test_the_assignment_is_whole() -> None:
    def of(section: str) -> list[Config]:
        return [cell.config for cell in colab() if cell.section.startswith(section)]

    assert {config.sparse.density for config in of("central fine-tuning")} == {None, 0.1}
    grid = {
        (config.federated.local_steps, config.partition.get("classes_per_client"))
        for config in of("full fine-tuning")
    }
    assert grid == {(J, Nc) for J in (4, 8, 16) for Nc in (1, 5, 10, 50, None)}
    assert {config.sparse.rule.name for config in of("mask rules")} == set(mask_rule.names)
    scaled = {cell.config.sparse.density for cell in colab() if cell.analyses}
    assert scaled == {None, 0.1}  # α of dense and of sparse task vectors
    backbones = {(c.config.backbone.name, c.config.backbone.resolution) for c in colab()}
    assert backbones == {("dino_vits16", 224)}
    tuned = [cell.config for cell in colab() if not cell.section.startswith("heads only")]
    assert {config.train.precision for config in tuned} == {"amp"}


def test_what_the_study_concludes_from_has_three_seeds() -> None:
    seeds = Counter(cell.label for cell in colab())
    for cell in colab():
        compared = cell.section.startswith(
            ("heads only", "central", "full fine-tuning / Nc=1", "mask rules")
        )
        assert seeds[cell.label] == (3 if compared else 1), cell.label


def test_its_cost_is_what_the_file_says() -> None:
    text = " ".join(find("colab").documentation.split())
    runs = unique_runs(plan(colab()))
    images = sum(work_of(run.cell.config).images.get("train", 0) for run in runs)
    assert f"{len(runs)} runs, {images / 1e6:.1f} M training images" in text
    assert f"trains on {1 / SECONDS['train']:.0f} images/s" in text
    stated = [float(hours) for hours in re.findall(r": ([\d.]+) hours, and ([\d.]+)", text)[0]]
    assert images * SECONDS["train"] / 3600 == pytest.approx(stated[0], abs=0.05)
    assert sum(seconds([run.cell for run in runs])) / 3600 == pytest.approx(sum(stated), abs=0.1)


def test_it_fits_three_days_whatever_run_each_of_them_ends_with() -> None:
    took = seconds([run.cell for run in unique_runs(plan(colab()))])
    day = DAY_S * (1 - RESERVE) - max(took)
    assert sum(took) <= 3 * day


def test_a_short_day_does_less_of_the_study_and_not_another_study() -> None:
    rules = find("colab").budget
    assert rules.levels == (Level(),)
    phases = {cell.label: phase for phase, cell in in_order(colab(), rules)}
    seeds = Counter(cell.label for cell in colab())
    for label, phase in phases.items():
        assert (phase is Phase.HEADLINE) == (seeds[label] == 3), label
