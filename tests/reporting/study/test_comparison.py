from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlens.config.schema import RUNTIME_KEYS, keys
from fedlens.reporting.study import labels
from fedlens.reporting.study.comparison import (
    CALIBRATION,
    DENSITY,
    IGNORED_KEYS,
    MASK,
    PARTITION,
    RULE,
    STEPS,
    TUNED,
    Axis,
    cell,
    chosen,
    compare,
    family,
    mask,
    most_common_group,
)
from fedlens.reporting.study.runs import Method
from fedlens.reporting.study.statistics import difference, holm
from tests.reporting import run_records
from tests.reporting.run_records import CENTRAL, NONIID, config_of, masked, methods_of, write_run

FREE = (*TUNED, *IGNORED_KEYS, *RUNTIME_KEYS, "seed")
ALL_DECIDES = {**masked(), "partition.name": "classes"}  # federated, calibrated, with an Nc
BUDGET = ("federated.rounds", "federated.local_step_budget")  # compared as what it comes to
IDLE = ("train.epochs",)
LEAVES = run_records.leaves(config_of(ALL_DECIDES))


def within(key: str, others: tuple[str, ...]) -> bool:
    return any(key == other or key.startswith(f"{other}.") for other in others)


def other(value: Any) -> Any:
    """Another value that the code which reads configs can live with."""
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else f"{value or ''}x"


def one(config: dict[str, Any], like: Method) -> Method:
    run = like.runs[0]
    return Method((type(run)(run.folder, config, run.manifest, run.result, run.metrics),))


@pytest.fixture(scope="module")
def usual_one(tmp_path_factory: pytest.TempPathFactory) -> Method:
    root = tmp_path_factory.mktemp("one")
    write_run(root, ALL_DECIDES)
    return methods_of(root)[0]


@pytest.mark.parametrize("key", sorted(set(LEAVES) - {"federated.clients", "federated.rounds"}))
def test_one_other_key_is_enough_to_stay_out_of_a_table(key: str, usual_one: Method) -> None:
    """But for what is tuned, incidental, a circumstance, or idle in this method."""
    changed = config_of(ALL_DECIDES)
    run_records.put(changed, key, other(run_records.value_at(changed, key)))
    free = (within(key, FREE) or key in IDLE) and key not in BUDGET
    assert (family(one(changed, usual_one)) == family(usual_one)) is free


@pytest.mark.parametrize("axis", [PARTITION, STEPS, RULE, DENSITY, MASK])
def test_an_axis_frees_its_own_keys_and_no_other(axis: Axis, usual_one: Method) -> None:
    names = ("partition.name", "sparse.rule.name")  # which decide what else is idle
    for key in set(LEAVES) - {"federated.clients", *BUDGET, *names}:
        changed = config_of(ALL_DECIDES)
        run_records.put(changed, key, other(run_records.value_at(changed, key)))
        freed = within(key, (*axis.keys, *FREE)) or key in IDLE
        assert (family(one(changed, usual_one), axis) == family(usual_one, axis)) is freed, key


def test_equal_budgets_agree_however_they_are_told(usual_one: Method) -> None:
    told = {"federated.rounds": 2, "federated.local_step_budget": 999}
    assert family(one(config_of({**ALL_DECIDES, **told}), usual_one)) == family(usual_one)
    told["federated.rounds"] = 3
    assert family(one(config_of({**ALL_DECIDES, **told}), usual_one)) != family(usual_one)


def test_calibration_is_idle_for_rules_that_do_not_calibrate(usual_one: Method) -> None:
    for rule, idle in (("random", True), ("lowest_magnitude", True), ("most_sensitive", False)):
        plain, told = (
            one(config_of({**masked(rule), **changes}), usual_one)
            for changes in ({}, {"sparse.rounds": 9})
        )
        assert (family(plain) == family(told)) is idle
        assert (mask(plain) == mask(told)) is idle


def test_central_and_federated_methods_are_never_of_a_family(usual_one: Method) -> None:
    pooled = one(config_of({**ALL_DECIDES, **CENTRAL}), usual_one)
    assert family(pooled, PARTITION, STEPS) != family(usual_one, PARTITION, STEPS)


def test_how_parameters_were_selected_must_agree(usual_one: Method) -> None:
    last = one(config_of({**ALL_DECIDES, "evaluate.select": "last"}), usual_one)
    assert family(last) != family(usual_one)


def test_the_choice_is_by_validation_where_test_says_the_opposite(tmp_path: Path) -> None:
    write_run(tmp_path, {"train.lr": 0.1}, validation=0.6, test=0.1)
    write_run(tmp_path, {"train.lr": 0.2}, validation=0.5, test=0.9)
    methods = methods_of(tmp_path)
    for candidates in (methods, methods[::-1]):
        found = cell(candidates)
        assert (found.lr, found.mean, found.candidates) == (0.1, pytest.approx(10.0), 2)
        assert found.validation == pytest.approx(60.0)


def test_more_seeds_go_before_a_better_validation(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(tmp_path, {"train.lr": 0.1}, seed=seed, validation=0.4)
    write_run(tmp_path, {"train.lr": 0.2}, seed=0, validation=0.9)
    assert chosen(methods_of(tmp_path)).get("train.lr") == 0.1


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=4))
def test_test_accuracy_never_moves_the_choice(told: list[tuple[int, int]]) -> None:
    """Whatever methods came to on test, the same one is chosen."""

    def methods(sign: int) -> list[Method]:
        return [
            Method(tuple(
                FakeRun({**CONFIG, "train": {"lr": place}}, seed, 10.0 * score,
                        sign * (place + seed))
                for seed in range(seeds)
            ))  # type: ignore[arg-type]
            for place, (seeds, score) in enumerate(told)
        ]  # fmt: skip

    assert chosen(methods(1)).config == chosen(methods(-1)).config


CONFIG = config_of()


class FakeRun:
    def __init__(self, config: dict[str, Any], seed: int, validation: float, test: float) -> None:
        self.config, self.seed, self.validation, self.test = config, seed, validation, test


def test_a_cell_of_one_seed_has_no_interval(tmp_path: Path) -> None:
    run = write_run(tmp_path, test=0.25)
    found = cell(methods_of(tmp_path))
    assert (found.mean, found.deviation, found.half) == (25.0, None, None)
    assert (found.seeds, found.runs, found.megabytes) == ([0], [run.name], 6.0)


def test_a_head_alone_has_no_learning_rate(tmp_path: Path) -> None:
    write_run(tmp_path, run_records.HEAD_ONLY, trains=False)
    assert cell(methods_of(tmp_path)).lr is None


def steps_table(root: Path) -> Any:
    return compare(
        methods_of(root), PARTITION, STEPS, title="t", references=["IID"],
    )  # fmt: skip


def test_a_table_is_laid_out_in_order_with_gaps(tmp_path: Path) -> None:
    longer = {"federated.local_steps": 8}
    write_run(tmp_path, {**NONIID, **longer}, test=0.3)
    write_run(tmp_path, test=0.5)
    write_run(tmp_path, longer, test=0.4)
    grid = steps_table(tmp_path).grid
    assert (grid.rows, grid.columns) == (["IID", "Nc=1"], ["J=4", "J=8"])
    means = [[found and found.mean for found in row] for row in grid.cells]
    assert means == [[50.0, 40.0], [None, 30.0]]


def test_contrasts_are_over_shared_seeds_only(tmp_path: Path) -> None:
    for seed, test in ((0, 0.5), (1, 0.6), (2, 0.9)):
        write_run(tmp_path, seed=seed, test=test)
    for seed, test in ((0, 0.4), (1, 0.3), (7, 0.1)):
        write_run(tmp_path, NONIID, seed=seed, test=test)
    (found,) = steps_table(tmp_path).grid.contrasts
    assert (found.row, found.against, found.column, found.count) == ("Nc=1", "IID", "J=4", 2)
    assert found.mean == pytest.approx(-20.0)
    assert (
        found.p == found.corrected == pytest.approx(0.295, abs=1e-3)
    )  # t = 2, one degree of freedom


def test_p_values_are_corrected_for_all_that_a_table_asks(tmp_path: Path) -> None:
    """Two columns of one difference each are two questions."""
    for steps in (4, 8):
        for seed in range(3):
            told = {"federated.local_steps": steps}
            write_run(tmp_path, told, seed=seed, test=0.5)
            write_run(tmp_path, {**told, **NONIID}, seed=seed, test=0.4 + 0.01 * seed / steps)
    found = steps_table(tmp_path).grid.contrasts
    assert len(found) == 2
    asked = {contrast.column: contrast.p for contrast in found}
    assert {c.column: c.corrected for c in found} == holm(asked)
    assert min(c.corrected for c in found) == pytest.approx(2 * min(asked.values()))


def test_two_references_are_contrasted_with_each_other_once(tmp_path: Path) -> None:
    for seed in (0, 1):
        for rule, test in (("random", 0.3), ("least_sensitive", 0.4)):
            write_run(tmp_path, masked(rule), seed=seed, test=test + 0.01 * seed)
        write_run(tmp_path, seed=seed, test=0.5)
    table = compare(
        methods_of(tmp_path), RULE, PARTITION, title="t",
        references=["dense", "random"],
    )  # fmt: skip
    assert [(c.row, c.against) for c in table.grid.contrasts] == [
        ("least sensitive", "dense"), ("random", "dense"), ("least sensitive", "random"),
    ]  # fmt: skip
    for found in table.grid.contrasts:
        pair = [table.methods[place, found.column] for place in (found.row, found.against)]
        told = difference(*(method.by_seed() for method in pair))
        assert told is not None
        assert found.mean == told.estimate.mean


def test_a_row_for_all_columns_prefers_runs_of_the_column(tmp_path: Path) -> None:
    for changes, test in (({}, 0.5), (NONIID, 0.4)):
        write_run(tmp_path / "rows", changes, test=test)
    write_run(tmp_path / "all", run_records.HEAD_ONLY, trains=False, test=0.2)
    ends = {}
    for name in ("one", "two"):
        if name == "two":
            write_run(tmp_path / "all", {**run_records.HEAD_ONLY, **NONIID}, trains=False, test=0.3)
        table = compare(
            methods_of(tmp_path / "rows"), MASK, PARTITION, title="t",
            everywhere=methods_of(tmp_path / "all"), everywhere_label="alone",
        )  # fmt: skip
        assert table.grid.rows == ["alone", "dense"]
        ends[name] = [found and found.mean for found in table.grid.cells[0]]
    assert ends == {"one": [20.0, 20.0], "two": [20.0, 30.0]}


def test_the_usual_group_is_that_in_most_places_then_runs_then_validation(tmp_path: Path) -> None:
    def batch(method: Method) -> int:
        return int(method.get("train.batch_size"))

    def among() -> set[int]:
        return {batch(m) for m in most_common_group(methods_of(tmp_path), batch, labels.partition)}

    write_run(tmp_path, {"train.batch_size": 8}, validation=0.6)
    write_run(tmp_path, {"train.batch_size": 16}, validation=0.7)
    assert among() == {16}
    write_run(tmp_path, {"train.batch_size": 8}, validation=0.6, seed=1)
    assert among() == {8}
    write_run(tmp_path, {"train.batch_size": 16, **NONIID}, validation=0.1)
    assert among() == {16}
    assert most_common_group([], batch, labels.partition) == []


def test_every_calibration_key_is_one_of_the_config() -> None:
    assert {f"sparse.{key}" for key in CALIBRATION} <= set(keys())
    assert {*TUNED, *IGNORED_KEYS} <= set(keys())
