"""Levels cut all runs of a study down alike; what had equal budgets keeps them equal."""

from dataclasses import asdict
from fractions import Fraction
from pathlib import Path

import pytest

from fedlens.config.compose import compose
from fedlens.config.schema import rounds
from fedlens.errors import FedlensError
from fedlens.suites.budget_rules import LEVELS, Level, parse, parse_level
from fedlens.suites.estimates.cost import steps_per_epoch, units
from fedlens.suites.levels import Cutter, setting_text
from fedlens.suites.suite import Cell, find

STUDY = """
rows:
  IID: fedavg_iid
  fixed rounds: fedavg_iid federated.rounds=100
  central: centralized
columns:
  J=4: federated.local_steps=4
  J=8: federated.local_steps=8
  J=16: federated.local_steps=16
"""


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[Cell]:
    path = tmp_path_factory.mktemp("suite") / "study.yaml"
    path.write_text(STUDY)
    return find(str(path)).cells()


def spent(cell: Cell) -> int:
    return cell.config.federated.local_steps * rounds(cell.config)


@pytest.mark.parametrize("share", ["1/2", "1/3", "1/7", "1/8", "3/50", "1/1000"])
def test_local_steps_times_rounds_stay_equal_for_every_j(cells: list[Cell], share: str) -> None:
    changed = Cutter(cells)(cells, Level(steps=Fraction(share)))
    budgets = {spent(cell) for cell in changed if cell.row == "IID"}
    assert len(budgets) == 1
    expected = 2000 * Fraction(share)
    assert abs(budgets.pop() - expected) <= 16


def test_a_part_of_a_study_is_cut_as_in_the_whole(cells: list[Cell]) -> None:
    level = Level(steps=Fraction(1, 7))
    cut = Cutter(cells)
    assert [cut([cell], level)[0] for cell in cells] == cut(cells, level)


def test_explicit_rounds_are_cut_too(cells: list[Cell]) -> None:
    changed = Cutter(cells)(cells, Level(steps=Fraction(1, 4)))
    fixed = {c.column: rounds(c.config) for c in changed if c.row == "fixed rounds"}
    assert fixed == {"J=4": 25, "J=8": 25, "J=16": 25}


def test_central_training_takes_the_same_share_of_its_steps(cells: list[Cell]) -> None:
    central = [cell for cell in cells if cell.row == "central"][:1]
    before = central[0].config
    for share, batch in [("1/2", "1"), ("1/4", "1/2"), ("1/32", "1/8")]:
        after = Cutter(central)(central, Level(steps=Fraction(share), batch=Fraction(batch)))[
            0
        ].config
        wanted = before.train.epochs * steps_per_epoch(before) * Fraction(share)
        steps = after.train.epochs * (after.train.steps_per_epoch or 0)
        assert wanted <= steps < wanted + after.train.epochs
        assert after.train.batch_size == 64 * Fraction(batch)


def test_no_batch_becomes_smaller_than_eight_images_or_larger_than_it_was() -> None:
    level = Level(batch=Fraction(1, 8))
    sizes = {1: 1, 8: 8, 16: 8, 64: 8, 128: 16}
    for before, after in sizes.items():
        words = ["centralized", f"train.batch_size={before}"]
        cells = [Cell("", "", "", compose(words[0], words[1:]), words, [])]
        assert Cutter(cells)(cells, level)[0].config.train.batch_size == after


def test_resolution_is_a_limit_in_whole_patches(cells: list[Cell]) -> None:
    assert Cutter(cells)(cells, Level(resolution=100))[0].config.backbone.resolution == 96
    assert Cutter(cells)(cells, Level(resolution=500))[0] is cells[0]
    small = Cell("", "r", "", compose("quickstart", []), ["quickstart"], [])
    assert Cutter([small])([small], Level(resolution=64))[0] is small


def test_evaluations_are_spaced_out_but_never_made_denser(cells: list[Cell]) -> None:
    for level in LEVELS:
        for cell, changed in zip(cells, Cutter(cells)(cells, level), strict=True):
            every, total = changed.config.evaluate.every, units(changed.config)
            assert every >= cell.config.evaluate.every
            if level.evaluations:
                assert -(-total // every) <= level.evaluations


@pytest.mark.parametrize("level", LEVELS)
def test_the_arguments_of_a_changed_cell_compose_to_its_config(
    cells: list[Cell], level: Level
) -> None:
    for cell in Cutter(cells)(cells, level)[::4]:
        experiment, *overrides = cell.arguments
        assert asdict(compose(experiment, overrides)) == asdict(cell.config)


def test_what_the_user_has_set_stays(cells: list[Cell]) -> None:
    level = LEVELS[-1]
    fixed = {"backbone.resolution", "federated.local_step_budget", "train.batch_size"}
    changed = Cutter(cells, fixed)(cells, level)[0].config
    assert changed.backbone.resolution == cells[0].config.backbone.resolution
    assert changed.federated.local_step_budget == 2000
    assert changed.train.batch_size == 64


def test_levels_go_from_best_to_cheapest(cells: list[Cell]) -> None:
    def images(level: Level) -> float:
        config = Cutter(cells)(cells, level)[0].config
        pixels = (config.backbone.resolution or 224) ** 2
        return pixels * config.train.batch_size * config.federated.local_step_budget

    costs = [images(level) for level in LEVELS]
    assert costs == sorted(costs, reverse=True)
    assert len(set(costs)) == len(costs)


def test_settings_in_words(cells: list[Cell]) -> None:
    assert setting_text(cells[:3]) == "224 px, J × rounds = 2000, batch size 64"
    assert "J × rounds = 400 to 2000" in setting_text(cells)


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_survives_its_yaml(level: Level) -> None:
    assert parse_level(level.plain()) == level


@pytest.mark.parametrize(
    "content",
    [
        7,
        [],
        {"when": 1},
        {"time": "soon"},
        {"headline": "all"},
        {"headline": [1]},
        {"levels": []},
        {"levels": [7]},
        {"levels": [{"px": 1}]},
        {"levels": [{"steps": 0}]},
        {"levels": [{"steps": "1/0"}]},
        {"levels": [{"steps": 2}]},
        {"levels": [{"resolution": 0}]},
        {"levels": [{"resolution": True}]},
        {"levels": [{"evaluations": 1.5}]},
    ],
)
def test_bad_budgets_are_refused(content: object, tmp_path: Path) -> None:
    with pytest.raises(FedlensError):
        parse(content)
