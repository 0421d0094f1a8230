from pathlib import Path
from typing import Any

import pytest

from fedlens.reporting.study import labels
from fedlens.reporting.study.comparison import Comparison
from fedlens.reporting.study.content import About
from fedlens.reporting.study.questions import comparisons
from tests.reporting.run_records import (
    CENTRAL,
    CYCLIC,
    FEDPROX,
    HEAD_ONLY,
    NONIID,
    RIDGE,
    masked,
    methods_of,
    study_of,
    write_run,
)

RULES = (
    "least_sensitive", "most_sensitive", "lowest_magnitude", "highest_magnitude", "random",
)  # fmt: skip
SLIPS = [  # a run that differs in one of these is another experiment
    ("train.batch_size", 7), ("train.optimizer.momentum", 0.5), ("train.optimizer.nesterov", True),
    ("train.label_smoothing", 0.1), ("train.clip_norm", 1.0), ("augment.flip", True),
    ("augment.crop_padding", 4), ("federated.local_step_budget", 16), ("federated.rounds", 5),
    ("federated.clients", 20), ("federated.participation", 0.5), ("federated.dropout", 0.1),
    ("head.dropout", 0.1), ("train.trainable.name", "last_blocks"), ("backbone.freeze_blocks", 1),
    ("evaluate.select", "last"), ("data.validation", 0.2),
]  # fmt: skip


def tables(root: Path, question: str, about: About | None = None) -> list[Comparison]:
    found = [t for m in study_of(root).settings.values() for t in comparisons(m, about)]
    return [table for table in found if table.grid.question == question]


def names(table: Comparison) -> set[str]:
    return {name for row in table.grid.cells for cell in row if cell for name in cell.runs}


def grid_of(root: Path, question: str) -> dict[str, Any]:
    """The setup of one table for each question; slips are told from it by one key."""
    made: dict[str, list[dict[str, Any]]] = {
        "heterogeneity": [{}, NONIID],
        "local_steps": [{}, {"federated.local_steps": 8}],
        "mask_rules": [{}, masked("random"), masked("least_sensitive")],
        "sparsity": [{}, masked(density=0.1), masked(density=0.5)],
        "calibration_rounds": [masked(), {**masked(), "sparse.rounds": 1}],
        "algorithms": [{}, FEDPROX],
        "under_heads": [{}, RIDGE],
        "schedules": [{"train.schedule.name": "cosine"}, {"train.schedule.name": "constant"}],
    }
    for changes in made[question]:
        write_run(root, changes, validation=0.5)
    return made[question][-1]


QUESTIONS = (
    "heterogeneity", "local_steps", "mask_rules", "sparsity", "calibration_rounds", "algorithms",
    "schedules", "under_heads",
)  # fmt: skip


@pytest.mark.parametrize("question", QUESTIONS)
def test_nothing_slips_into_a_table_that_differs_in_more(question: str, tmp_path: Path) -> None:
    """Each slip is better on validation than the run it would replace."""
    last = grid_of(tmp_path, question)
    (table,) = tables(tmp_path, question)
    before = names(table)
    for key, value in SLIPS:
        write_run(tmp_path, {**last, key: value}, validation=0.9)
    (table,) = tables(tmp_path, question)
    assert names(table) == before
    assert all(cell.candidates == 1 for row in table.grid.cells for cell in row if cell)


@pytest.mark.parametrize("question", QUESTIONS)
def test_learning_rates_compete_in_a_cell(question: str, tmp_path: Path) -> None:
    last = grid_of(tmp_path, question)
    better = write_run(tmp_path, {**last, "train.lr": 9.0}, validation=0.9, test=0.1)
    (table,) = tables(tmp_path, question)
    assert better.name in names(table)
    assert sorted(c.candidates for row in table.grid.cells for c in row if c)[-2:] == [1, 2]


@pytest.mark.parametrize(
    ("key", "value"),
    [("sparse.scope", "tensor"), ("sparse.biases", True), ("sparse.norms", True),
     ("sparse.embeddings", True), ("sparse.density", 0.2)],
)  # fmt: skip
def test_masks_over_other_weights_are_in_tables_of_their_own(
    key: str, value: object, tmp_path: Path
) -> None:
    grid_of(tmp_path, "mask_rules")
    for rule in ("random", "least_sensitive"):
        write_run(tmp_path, {**masked(rule), key: value}, validation=0.9)
    first, second = tables(tmp_path, "mask_rules")
    dense = {c.runs[0] for table in (first, second) for c in table.grid.cells[0] if c}
    assert len(dense) == 1
    assert names(first) & names(second) == dense
    assert first.grid.name != second.grid.name


def test_mask_rules_stand_beside_dense_training_and_the_head_alone(tmp_path: Path) -> None:
    for seed in (0, 1):
        for place, rule in enumerate(RULES):
            told = {**RIDGE, **masked(rule)}
            write_run(tmp_path, told, seed=seed, test=0.5 + 0.01 * place)
            write_run(tmp_path, {**told, **NONIID}, seed=seed, test=0.4)
        write_run(tmp_path, RIDGE, seed=seed, test=0.6)
        write_run(tmp_path, HEAD_ONLY, seed=seed, test=0.3, trains=False)
    (table,) = tables(tmp_path, "mask_rules")
    grid = table.grid
    assert grid.title == "Mask rules at density 0.1"
    assert grid.columns == ["IID", "Nc=1"]
    assert grid.rows == [
        "ridge head, no fine-tuning", "dense", "least sensitive", "most sensitive",
        "lowest magnitude", "highest magnitude", "random",
    ]  # fmt: skip
    assert [cell and cell.mean for cell in grid.cells[0]] == pytest.approx([30.0, 30.0])
    assert [cell and cell.mean for cell in grid.cells[1]] == [pytest.approx(60.0), None]
    asked = {(c.row, c.against) for c in grid.contrasts if c.column == "Nc=1"}
    assert asked == {(row, "ridge head, no fine-tuning") for row in grid.rows[2:]}
    asked = {(c.row, c.against) for c in grid.contrasts if c.column == "IID"}
    assert ("ridge head, no fine-tuning", "dense") in asked
    assert ("dense", "ridge head, no fine-tuning") not in asked
    assert len(asked) == 11


@pytest.mark.parametrize("question", ["mask_rules", "sparsity", "algorithms", "under_heads"])
def test_a_partition_with_nothing_to_compare_is_no_column(question: str, tmp_path: Path) -> None:
    grid_of(tmp_path, question)
    before = tables(tmp_path, question)[0].grid.columns
    write_run(tmp_path, {**NONIID, "partition.classes_per_client": 3})
    assert tables(tmp_path, question)[0].grid.columns == before


def test_algorithms_are_held_against_averages_with_a_longer_step_too(tmp_path: Path) -> None:
    longer = {"algorithm.server.lr": 2.0}
    for changes, test in (({}, 0.2), (longer, 0.3), (CYCLIC, 0.25), ({**CYCLIC, **longer}, 0.5)):
        for seed in (0, 1):
            write_run(tmp_path, changes, seed=seed, test=test + seed / 100)
    (table,) = tables(tmp_path, "algorithms")
    told = {(c.row, c.against): round(c.mean, 6) for c in table.grid.contrasts}
    long = "server learning rate 2"
    cyclic = "cyclic client sampling"
    assert told == {
        (f"FedAvg, {long}", "FedAvg"): 10,
        (f"FedAvg, {cyclic}", "FedAvg"): 5,
        (f"FedAvg, {long}, {cyclic}", "FedAvg"): 30,
        (f"FedAvg, {cyclic}", f"FedAvg, {long}"): -5,
        (f"FedAvg, {long}, {cyclic}", f"FedAvg, {long}"): 20,
    }


def test_more_local_steps_are_held_against_the_fewest_within_a_partition(tmp_path: Path) -> None:
    """By hand: seeds differ by 10 and 14 points under IID, so 12 ± t·2 with t = 12.7062."""
    for partition, changes in (("IID", {}), ("Nc=1", NONIID)):
        for seed in (0, 1):
            write_run(tmp_path, changes, seed=seed, test=0.2)
            more = 0.3 + 0.04 * seed if partition == "IID" else 0.1
            write_run(tmp_path, {**changes, "federated.local_steps": 8}, seed=seed, test=more)
    (table,) = tables(tmp_path, "local_steps")
    first, second = (c for c in table.grid.contrasts if c.turned)
    assert (first.row, first.against, first.column) == ("J=8", "J=4", "IID")
    assert (second.row, second.against, second.column) == ("J=8", "J=4", "Nc=1")
    assert (first.mean, first.half) == pytest.approx((12, 12.7062 * 2), rel=1e-4)
    assert second.mean == pytest.approx(-10)
    assert first.places == (("IID", "J=8"), ("IID", "J=4"))
    straight = [c for c in table.grid.contrasts if not c.turned]
    assert {(c.row, c.against) for c in straight} == {("Nc=1", "IID")}
    assert first.corrected == pytest.approx(first.p, rel=1e-6)  # the other has no spread, so no p


@pytest.mark.parametrize("rate", [0.001, 0.5])  # names, and their order, differ
def test_the_backbone_s_local_steps_come_before_those_of_heads(rate: float, tmp_path: Path) -> None:
    for steps in (4, 8):
        told = {"federated.local_steps": steps, "train.lr": rate}
        write_run(tmp_path, told)
        write_run(tmp_path, {**told, "train.trainable.name": "head"})
    first, second = tables(tmp_path, "local_steps")
    assert "full fine-tuning" in first.grid.note.lower()
    assert "backbone frozen" in second.grid.note


def test_heads_under_which_the_backbone_is_trained_stand_beside_the_head_alone(
    tmp_path: Path,
) -> None:
    for changes, test in (({}, 0.2), (NONIID, 0.1), (RIDGE, 0.6), ({**RIDGE, **NONIID}, 0.5)):
        write_run(tmp_path, changes, test=test)
    write_run(tmp_path, HEAD_ONLY, test=0.3, trains=False)
    write_run(tmp_path, {**RIDGE, **masked("random")}, test=0.9)
    (table,) = tables(tmp_path, "under_heads")
    assert table.grid.rows == [
        "ridge head, no fine-tuning", "full fine-tuning, linear head trained jointly",
        "full fine-tuning, ridge head frozen",
    ]  # fmt: skip
    assert table.grid.columns == ["IID", "Nc=1"]
    means = [[cell and round(cell.mean) for cell in row] for row in table.grid.cells]
    assert means == [[30, 30], [20, 10], [60, 50]]


def test_a_head_with_another_lambda_is_not_what_rules_begin_from(tmp_path: Path) -> None:
    for rule in ("random", "least_sensitive"):
        write_run(tmp_path, {**RIDGE, **masked(rule)})
    write_run(tmp_path, {**HEAD_ONLY, "head.l2": 9.0}, trains=False)
    (table,) = tables(tmp_path, "mask_rules")
    assert "ridge head, no fine-tuning" not in table.grid.rows


def test_rules_are_shown_as_most_were_calibrated(tmp_path: Path) -> None:
    for rule in ("least_sensitive", "most_sensitive", "random"):
        write_run(tmp_path, masked(rule))
    odd = write_run(tmp_path, {**masked(), "sparse.rounds": 1}, validation=0.9)
    (table,) = tables(tmp_path, "mask_rules")
    assert odd.name not in names(table)
    assert table.grid.rows == ["least sensitive", "most sensitive", "random"]


def test_one_rule_is_no_comparison(tmp_path: Path) -> None:
    write_run(tmp_path, masked())
    assert tables(tmp_path, "mask_rules") == []


def test_local_steps_have_partitions_down_and_steps_across(tmp_path: Path) -> None:
    for steps in (16, 4, 8):
        for partition in (NONIID, {}):
            told = {"federated.local_steps": steps, "federated.local_step_budget": 16}
            write_run(tmp_path, {**partition, **told})
    (table,) = tables(tmp_path, "local_steps")
    assert table.grid.rows == ["IID", "Nc=1"]
    assert table.grid.columns == ["J=4", "J=8", "J=16"]
    assert tables(tmp_path, "heterogeneity") == []


def test_densities_go_from_dense_down(tmp_path: Path) -> None:
    for density in (0.01, 0.5, 0.1):
        write_run(tmp_path, masked(density=density))
    write_run(tmp_path)
    (table,) = tables(tmp_path, "sparsity")
    assert table.grid.rows == ["dense", "density 0.5", "density 0.1", "density 0.01"]


def test_heads_on_the_frozen_backbone_agree_in_how_they_are_trained(tmp_path: Path) -> None:
    head = {"train.trainable.name": "head"}
    kept = [write_run(tmp_path, {**head, **where}) for where in ({}, NONIID)]
    write_run(tmp_path, {**head, "train.batch_size": 7}, validation=0.9)
    write_run(tmp_path, {**head, "federated.local_steps": 8}, validation=0.9)
    alone = write_run(tmp_path, HEAD_ONLY, trains=False)
    (table,) = tables(tmp_path, "heads")
    assert table.grid.rows == ["ridge head, no fine-tuning", "linear head trained, backbone frozen"]
    assert names(table) == {alone.name, *(run.name for run in kept)}


def test_central_baselines_are_in_one_column(tmp_path: Path) -> None:
    write_run(tmp_path, CENTRAL)
    write_run(tmp_path, {**CENTRAL, **masked()})
    write_run(tmp_path)
    (table,) = tables(tmp_path, "central")
    assert table.grid.rows == [
        "full fine-tuning, linear head trained jointly",
        "full fine-tuning, linear head trained jointly, density 0.1, least sensitive",
    ]  # fmt: skip
    assert table.grid.columns == ["accuracy"]


def write_six(root: Path, **common: Any) -> list[str]:
    return [
        write_run(root, {**where, **kind, **common}).name
        for where in (CENTRAL, {}, NONIID) for kind in ({}, masked())
    ]  # fmt: skip


def test_the_six_models_are_one_table(tmp_path: Path) -> None:
    made = write_six(tmp_path)
    (found,) = tables(tmp_path, "six_models")
    assert found.grid.rows == ["central", "FedAvg, IID", "FedAvg, Nc=1"]
    assert found.grid.columns == ["dense", "sparse"]
    assert [cell.runs[0] for row in found.grid.cells for cell in row if cell] == made


def test_the_six_models_share_federation_and_mask(tmp_path: Path) -> None:
    """Better runs with other steps, batches, masks or heads stand in no cell."""
    made = write_six(tmp_path)
    odd = [
        {"train.batch_size": 7}, {**NONIID, "federated.local_steps": 8}, masked("random"),
        {**NONIID, **masked(density=0.5)}, {**CENTRAL, "train.epochs": 3},
        {"train.trainable.name": "head"}, FEDPROX,
    ]  # fmt: skip
    for changes in odd:
        write_run(tmp_path, changes, validation=0.9)
    (found,) = tables(tmp_path, "six_models")
    assert names(found) == set(made)


def test_the_skewed_row_is_the_one_asked_for_else_the_most_skewed(tmp_path: Path) -> None:
    write_six(tmp_path)
    for kind in ({}, masked()):
        write_run(tmp_path, {**NONIID, **kind, "partition.classes_per_client": 5})
    (found,) = tables(tmp_path, "six_models")
    assert found.grid.rows[-1] == "FedAvg, Nc=1"
    (found,) = tables(tmp_path, "six_models", About(noniid="Nc=5"))
    assert found.grid.rows[-1] == "FedAvg, Nc=5"


def test_without_a_trained_backbone_there_is_no_headline(tmp_path: Path) -> None:
    write_run(tmp_path, {"train.trainable.name": "head"})
    write_run(tmp_path, HEAD_ONLY, trains=False)
    assert tables(tmp_path, "six_models") == []


def test_tables_have_names_of_their_own(tmp_path: Path) -> None:
    for batch in (8, 16):
        for where in ({}, NONIID):
            write_run(tmp_path, {**where, "train.batch_size": batch})
    found = [t.grid.name for t in comparisons(methods_of(tmp_path))]
    assert found == ["six_models", "heterogeneity", "heterogeneity-2"]


def test_the_note_says_what_a_table_shares(tmp_path: Path) -> None:
    grid_of(tmp_path, "heterogeneity")
    (table,) = tables(tmp_path, "heterogeneity")
    shared = (
        "full fine-tuning, linear head trained jointly, FedAvg, J=4; 10 clients, 2 per round; "
        "batch 64."
    )
    assert table.grid.note == shared


def test_a_single_method_is_compared_with_nothing(tmp_path: Path) -> None:
    write_run(tmp_path)
    assert [t.grid.name for t in comparisons(methods_of(tmp_path))] == ["six_models"]
    assert labels.federated(methods_of(tmp_path)[0])
