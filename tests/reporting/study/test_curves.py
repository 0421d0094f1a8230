from pathlib import Path

import pytest

from fedlens.reporting.study.comparison import PARTITION, STEPS, compare
from fedlens.reporting.study.curves import POINTS, curve, curve_set, observation
from fedlens.reporting.study.questions import comparisons
from fedlens.reporting.study.statistics import estimate
from tests.reporting import run_records
from tests.reporting.run_records import CENTRAL, HEAD_ONLY, NONIID, RIDGE, methods_of, write_run

FOUR = {"federated.local_step_budget": 16}  # rounds of four local steps


def test_a_curve_by_hand(tmp_path: Path) -> None:
    write_run(tmp_path, FOUR, seed=0, validation=[0.1, 0.2, 0.3, 0.4])
    write_run(tmp_path, FOUR, seed=1, validation=[0.3, 0.4, 0.5, 0.4])
    found = curve("it", methods_of(tmp_path)[0])
    assert found.unit == [1, 2, 3, 4]
    assert found.steps == [4, 8, 12, 16]
    assert found.megabytes == [3.0, 6.0, 9.0, 12.0]
    assert found.mean == pytest.approx([20.0, 30.0, 40.0, 40.0])
    half = estimate([10.0, 30.0]).half
    assert found.half == pytest.approx([half, half, half, 0.0])


def test_one_seed_has_no_band(tmp_path: Path) -> None:
    write_run(tmp_path)
    assert curve("it", methods_of(tmp_path)[0]).half == [None, None]


def test_only_rounds_that_every_seed_measured_are_averaged(tmp_path: Path) -> None:
    """One seed was measured in every second round, the other stopped after three."""
    sparse = write_run(tmp_path, FOUR, seed=0, validation=[0.1, 0.2, 0.3, 0.4])
    early = write_run(tmp_path, FOUR, seed=1, validation=[0.1, 0.6, 0.3, 0.4])
    records = run_records.journal(sparse)
    for record in records[::2]:
        del record["validation"]
    run_records.write_journal(sparse, records)
    run_records.write_journal(early, run_records.journal(early)[:3])
    found = curve("it", methods_of(tmp_path)[0])
    assert (found.unit, found.steps, found.megabytes) == ([2], [8], [6.0])
    assert found.mean == pytest.approx([40.0])


def test_megabytes_are_those_of_all_seeds_and_of_what_came_before(tmp_path: Path) -> None:
    """5 MB of statistics; one seed sends 3 MB a round, the other 5 MB in its second."""
    write_run(tmp_path, RIDGE, seed=0)
    other = write_run(tmp_path, RIDGE, seed=1)
    records = run_records.journal(other)
    records[1]["bytes_up"] = 3 * run_records.MEGABYTE
    run_records.write_journal(other, records)
    assert curve("it", methods_of(tmp_path)[0]).megabytes == [8.0, 12.0]


def test_central_training_counts_epochs_and_their_steps(tmp_path: Path) -> None:
    run = write_run(tmp_path, CENTRAL)
    found = curve("it", methods_of(tmp_path)[0])
    assert (found.unit, found.steps, found.megabytes) == ([1, 2], [7, 14], [])
    records = run_records.journal(run)
    for record in records:
        del record["steps"]  # as older runs have none
    run_records.write_journal(run, records)
    assert curve("it", methods_of(tmp_path)[0]).steps == []


def test_a_long_curve_keeps_its_ends_and_few_points(tmp_path: Path) -> None:
    write_run(tmp_path, {"federated.rounds": 1000}, validation=0.9 + 9.0)
    found = curve("it", methods_of(tmp_path)[0])
    assert (found.unit[0], found.unit[-1], len(found.unit)) == (1, 1000, POINTS)
    assert found.unit == sorted(set(found.unit))
    assert max(b - a for a, b in zip(found.unit, found.unit[1:], strict=False)) <= 7


def test_what_clients_did_is_averaged_where_every_seed_knows_it(tmp_path: Path) -> None:
    write_run(tmp_path, seed=0)
    other = write_run(tmp_path, seed=1)
    records = run_records.journal(other)
    records[0]["drift"], records[1]["cosine"] = 4.0, None
    run_records.write_journal(other, records)
    found = observation("it", methods_of(tmp_path)[0])
    assert found.round == [1, 2]
    assert found.drift == [2.5, 2.0]
    assert found.cosine == [0.5, None]
    assert found.sign_agreement == [None, None]


def test_curves_are_named_by_what_tells_cells_apart(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "a", NONIID)
    _, table = comparisons(methods_of(tmp_path / "a"))
    found = curve_set(table)
    assert found is not None
    assert (found.name, found.unit) == ("heterogeneity", "round")
    assert [one.label for one in found.curves] == ["IID", "Nc=1"]
    assert [one.label for one in found.observations] == ["IID", "Nc=1"]
    for where in ({}, NONIID):
        write_run(tmp_path / "a", {**where, "federated.local_steps": 8})
    _, table = comparisons(methods_of(tmp_path / "a"))
    found = curve_set(table)
    assert found is not None
    labels = {one.label for one in found.curves}
    assert labels == {"IID, J=4", "IID, J=8", "Nc=1, J=4", "Nc=1, J=8"}


def test_without_training_there_is_no_curve(tmp_path: Path) -> None:
    write_run(tmp_path, HEAD_ONLY, trains=False)
    table = compare(methods_of(tmp_path), PARTITION, STEPS)
    assert curve_set(table) is None


def test_central_curves_are_over_epochs_and_observe_no_clients(tmp_path: Path) -> None:
    write_run(tmp_path, CENTRAL)
    _, table = comparisons(methods_of(tmp_path))
    found = curve_set(table)
    assert found is not None
    assert (found.unit, found.observations) == ("epoch", [])
