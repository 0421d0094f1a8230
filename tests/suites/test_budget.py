"""A study in a given time: equal settings for all, three seeds for the headline, then the rest."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fedlens.config.compose import compose
from fedlens.errors import FedlensError
from fedlens.suites import plan_file
from fedlens.suites.budget import (
    RESERVE,
    BudgetPlan,
    Phase,
    RunCost,
    Timer,
    durations,
    in_order,
    make,
)
from fedlens.suites.budget_rules import BudgetRules, Level
from fedlens.suites.eta import makespan
from fedlens.suites.plan_file import Request, StoredPlan
from fedlens.suites.suite import Cell

CONFIG = compose("federated_ridge", [])
RULES = BudgetRules(
    headline=("models",),
    priority=("models", "rules"),
    levels=(Level(), Level(resolution=160), Level(resolution=112)),
)
COST = {None: 100.0, 160: 10.0, 112: 1.0}  # seconds of a run at each level


def study(seeds: int = 3) -> list[Cell]:
    return [
        Cell(section, row, "", replace(CONFIG, seed=seed), ["federated_ridge"], [])
        for seed in range(seeds)
        for section, row in [("other", "z"), ("rules", "a"), ("rules", "b"), ("models", "m")]
    ]


def at_level(cells: Sequence[Cell], level: Level) -> list[Cell]:
    backbone = CONFIG.backbone.but(resolution=level.resolution)
    return [replace(cell, config=replace(cell.config, backbone=backbone)) for cell in cells]


def timer(cells: Sequence[Cell]) -> list[RunCost]:
    return [RunCost(COST[cell.config.backbone.resolution]) for cell in cells]


def planned(
    time: float,
    *,
    at_once: int = 1,
    levels: Sequence[Level] = RULES.levels,
    timer: Timer = timer,
) -> BudgetPlan:
    return make(
        in_order(study(), RULES), levels, time, at_once=at_once, at_level=at_level, timer=timer,
        rough_timer=timer,
    )  # fmt: skip


def seeds(plan: BudgetPlan) -> Counter[str]:
    return Counter(cell.row for cell in plan.cells)


def test_headline_first_then_first_seeds_by_priority_then_further_ones() -> None:
    ordered = [(phase.name, c.row, c.config.seed) for phase, c in in_order(study(), RULES)]
    assert ordered == [
        ("HEADLINE", "m", 0), ("HEADLINE", "m", 1), ("HEADLINE", "m", 2),
        ("FIRST", "a", 0), ("FIRST", "b", 0), ("FIRST", "z", 0),
        ("FURTHER", "a", 1), ("FURTHER", "b", 1), ("FURTHER", "z", 1),
        ("FURTHER", "a", 2), ("FURTHER", "b", 2), ("FURTHER", "z", 2),
    ]  # fmt: skip


def test_the_first_section_is_the_headline_of_a_suite_that_names_none() -> None:
    phases = {cell.row: phase for phase, cell in in_order(study(1), BudgetRules())}
    assert phases == {"z": Phase.HEADLINE, "a": Phase.FIRST, "b": Phase.FIRST, "m": Phase.FIRST}


def test_the_best_level_at_which_the_headline_and_all_first_seeds_fit() -> None:
    # Six runs are needed: 600 s, 60 s or 6 s.
    assert planned(600 / (1 - RESERVE) + 1).level == RULES.levels[0]
    tight = planned(100)
    assert tight.level == RULES.levels[1]
    assert tight.skipped == [(RULES.levels[0], 600.0)]
    assert seeds(tight) == {"m": 3, "a": 2, "b": 2, "z": 2}
    assert tight.total(1) == 90
    assert len(tight.left_out) == 3


def test_two_at_a_time_do_twice_as_much() -> None:
    assert planned(301 / (1 - RESERVE), at_once=2).level == RULES.levels[0]


def test_where_nothing_fits_whole_the_last_in_order_are_left_out() -> None:
    plan = planned(4 / (1 - RESERVE))
    assert plan.level == RULES.levels[-1]
    assert [cell.row for cell in plan.cells] == ["m", "m", "m", "a"]
    assert {cell.row for cell in plan.left_out} == {"a", "b", "z"}
    assert plan.passed_over == 0


def test_where_nothing_fits_no_training_is_given_up_for_next_to_nothing() -> None:
    """Runs of 100, 12 and 10 s: the second level is at most a quarter longer than the last."""
    cost = {None: 100.0, 160: 12.0, 112: 10.0}

    def evaluating(cells: Sequence[Cell]) -> list[RunCost]:
        return [RunCost(cost[cell.config.backbone.resolution]) for cell in cells]

    plan = planned(40 / (1 - RESERVE), timer=evaluating)
    assert plan.level == RULES.levels[1]
    assert plan.skipped == [(RULES.levels[0], 600.0)]
    assert seeds(plan) == {"m": 3}


def test_others_get_no_second_seed_before_the_headline_has_three() -> None:
    def unequal(cells: Sequence[Cell]) -> list[RunCost]:
        return [RunCost(10.0 if cell.row == "m" else 1.0) for cell in cells]

    plan = planned(28 / (1 - RESERVE), levels=[Level()], timer=unequal)
    assert seeds(plan) == {"m": 2, "a": 1, "b": 1, "z": 1}
    assert plan.headline_left_out == 1
    assert plan.passed_over == 1


def test_shared_work_counts_with_the_first_run_that_is_planned() -> None:
    def sharing(cells: Sequence[Cell]) -> list[RunCost]:
        return [RunCost(10.0 if cell.row == "m" else 1.0, {"features": 5.0}) for cell in cells]

    # The headline does not fit, so the next run pays for the features: 5 + 1, then 1 and 1.
    plan = planned(8.5 / (1 - RESERVE), levels=[Level()], timer=sharing)
    assert plan.seconds == [6.0, 1.0, 1.0]
    assert durations(sharing(study(1))) == [6.0, 1.0, 1.0, 10.0]


def test_a_rough_estimate_is_confirmed_before_a_level_is_chosen() -> None:
    def optimistic(cells: Sequence[Cell]) -> list[RunCost]:
        return [RunCost(cost.own / 10) for cost in timer(cells)]

    plan = make(
        in_order(study(), RULES), RULES.levels, 100, at_once=1, at_level=at_level, timer=timer,
        rough_timer=optimistic,
    )  # fmt: skip
    assert plan.skipped == [(RULES.levels[0], 600.0)]
    assert plan.level == RULES.levels[1]


def test_too_short_a_time_is_refused_with_what_is_needed() -> None:
    with pytest.raises(FedlensError, match=r"too short.*shortest takes about 1 s"):
        planned(0.5)


@given(st.floats(1.5, 5000), st.integers(1, 3))
def test_a_plan_is_within_its_time_has_one_level_and_loses_no_run(
    time: float, at_once: int
) -> None:
    plan = planned(time, at_once=at_once)
    assert plan.total(at_once) <= time
    assert len({cell.config.backbone.resolution for cell in plan.cells}) == 1
    assert len(plan.cells) + len(plan.left_out) == len(study())
    count = seeds(plan)
    if any(count[row] > 1 for row in "abz"):
        assert count["m"] == 3


def test_the_span_of_jobs_is_at_least_the_longest() -> None:
    assert makespan([5, 1, 1], 2) == 5
    assert makespan([2, 2, 2, 2], 2) == 4
    assert makespan([], 2) == 0


PLAN = StoredPlan(Level(resolution=112), 60.0, ("models / m, seed 0",), ("other / z, seed 1",), 5.0)


def test_a_plan_is_stored_and_read(tmp_path: Path) -> None:
    request = Request("paper", ("train.lr=0.1",))
    path = request.path(tmp_path)
    PLAN.write(path, request)
    assert plan_file.read(path) == PLAN
    assert plan_file.read(path.with_name("other.yaml")) is None
    assert PLAN.seconds_left == 55
    assert PLAN.used(99).seconds_left == 0


def test_another_request_has_another_plan(tmp_path: Path) -> None:
    requests = [
        Request("paper"), Request("paper", ("a=1",)), Request("paper", (), ("a=1",)),
        Request("paper", seeds=3), Request("full"), Request("dir/paper.yaml"),
    ]  # fmt: skip
    assert len({request.path(tmp_path) for request in requests}) == len(requests)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("runs", 7), ("runs", [1]), ("left_out", None), ("level", {"steps": 7}),
        ("budget_seconds", "soon"), ("budget_seconds", -1), ("budget_seconds", float("nan")),
        ("used_seconds", float("inf")), ("used_seconds", None),
    ],
)  # fmt: skip
def test_a_damaged_plan_is_refused(tmp_path: Path, key: str, value: object) -> None:
    request = Request("paper")
    path = request.path(tmp_path)
    PLAN.write(path, request)
    content = yaml.safe_load(path.read_text())
    for damaged in ({**content, key: value}, {k: v for k, v in content.items() if k != key}):
        path.write_text(yaml.safe_dump(damaged))
        with pytest.raises(FedlensError, match="damaged: delete it"):
            plan_file.read(path)
    for text in ("", "[", "7", "\x00", "runs"):
        path.write_text(text)
        with pytest.raises(FedlensError, match="damaged: delete it"):
            plan_file.read(path)


def test_a_plan_of_a_changed_suite_is_refused(tmp_path: Path) -> None:
    known = [plan_file.named(cell) for cell in study()]
    names = ["models / m, seed 1", "rules / a, seed 0"]
    assert plan_file.checked(names, known, tmp_path) == names
    with pytest.raises(FedlensError, match="has changed since"):
        plan_file.checked(["models / gone, seed 0"], known, tmp_path)
