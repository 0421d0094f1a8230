"""Levels of a study: all its runs cut down alike, so that what is compared keeps equal budgets.

A level may lower the resolution, the share of training steps, the share of the batch size and the
number of evaluations. J × rounds stays equal across runs that had it equal before, for every J.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from fedlens.config.checks import check
from fedlens.config.schema import Config, rounds
from fedlens.registry import RowSettings, backbone
from fedlens.suites.budget_rules import Level
from fedlens.suites.estimates.cost import steps_per_epoch, units
from fedlens.suites.plan import own_resolution
from fedlens.suites.suite import Cell, with_overrides

LEAST_BATCH = 8  # images: below, learning rates no longer fit, and a step costs as much


class Cutter:
    """Cuts runs of a study down to a level; keys in `fixed` stay as they are.

    How J × rounds is rounded depends on the whole study, so that any part of it is cut alike.
    """

    def __init__(self, study: Sequence[Cell], fixed: Collection[str] = ()) -> None:
        self.fixed = fixed
        self._multiples = _multiples(study)

    def __call__(self, cells: Sequence[Cell], level: Level) -> list[Cell]:
        return [self._cut(cell, level) for cell in cells]

    def _cut(self, cell: Cell, level: Level) -> Cell:
        multiple = self._multiples[_step_budget(cell.config)]
        values = _values(cell.config, level, multiple)
        changed = {key: value for key, value in values.items() if key not in self.fixed}
        return _with_values(cell, changed) if changed else cell


def setting_text(cells: Sequence[Cell]) -> str:
    """What all runs have: resolutions, J × rounds, batch sizes; several values are a range."""
    configs = [cell.config for cell in cells]
    budgets = [_step_budget(config) for config in configs if config.federated.clients]
    parts = [
        f"{_range(own_resolution(config) for config in configs)} px",
        f"J × rounds = {_range(budgets)}" if budgets else "",
        f"batch size {_range(config.train.batch_size for config in configs)}",
    ]
    return ", ".join(filter(None, parts))


def _values(config: Config, level: Level, multiple: int) -> dict[str, Any]:
    """The keys that the level changes, and their values."""
    values: dict[str, Any] = {}
    own = own_resolution(config)
    if level.resolution and level.resolution < own:
        values["backbone.resolution"] = _whole_patches(config, level.resolution)
    size = max(LEAST_BATCH, round(config.train.batch_size * level.batch))
    if size < config.train.batch_size:
        values["train.batch_size"] = size
    federated = config.federated
    if level.steps != 1 and federated.clients is not None:
        before = _step_budget(config)
        budget = min(before, max(1, round(before * level.steps / multiple)) * multiple)
        if isinstance(federated.rounds, int):
            values["federated.rounds"] = max(1, budget // federated.local_steps)
        else:
            values["federated.local_step_budget"] = budget
    elif level.steps != 1:
        values |= _central(config, level.steps, size)
    if level.evaluations:
        total = units(_replaced(config, values))
        every = max(config.evaluate.every, -(-total // level.evaluations))
        if every != config.evaluate.every:
            values["evaluate.every"] = every
    return values


def _central(config: Config, share: Fraction, batch_size: int) -> dict[str, Any]:
    """Epochs and steps of central training; an epoch has at most as many steps as the data give."""
    epochs = config.train.epochs
    total = max(1, round(epochs * steps_per_epoch(config) * share))
    largest = steps_per_epoch(
        _replaced(config, {"train.batch_size": batch_size, "train.steps_per_epoch": None})
    )
    fewer = max(1, round(epochs * share), math.ceil(total / largest))
    return {"train.epochs": fewer, "train.steps_per_epoch": math.ceil(total / fewer)}


def _step_budget(config: Config) -> int:
    """J × rounds of a federated run; 0 of a central one."""
    if config.federated.clients is None:
        return 0
    if isinstance(config.federated.rounds, int):
        return config.federated.local_steps * rounds(config)
    return config.federated.local_step_budget


def _multiples(cells: Sequence[Cell]) -> Mapping[int, int]:
    """J × rounds before → the least common multiple of all J that share it."""
    steps: defaultdict[int, int] = defaultdict(lambda: 1)
    for cell in cells:
        budget = _step_budget(cell.config)
        steps[budget] = math.lcm(steps[budget], cell.config.federated.local_steps)
    return steps


def _whole_patches(config: Config, resolution: int) -> int:
    traits = backbone[config.backbone.name].traits
    if "patch" in traits or "resolution" in traits:
        patch = int(traits.get("patch", 1))
    else:
        from fedlens.models.architectures import backbones  # timm knows it

        patch = backbones.find(config.backbone).patch
    return max(patch, resolution // patch * patch)


def _with_values(cell: Cell, values: Mapping[str, Any]) -> Cell:
    config = _replaced(cell.config, values)
    check(config)
    words = [f"{key}={value}" for key, value in values.items()]
    return with_overrides(cell, config, words)


def _replaced(config: Config, values: Mapping[str, Any]) -> Config:
    for key, value in values.items():
        config = _set(config, key.split("."), value)
    return config


def _set(tree: Any, path: list[str], value: Any) -> Any:
    first, *rest = path
    if rest:
        value = _set(getattr(tree, first), rest, value)
    if isinstance(tree, RowSettings):
        return tree.but(**{first: value})
    return replace(tree, **{first: value})


def _range(values: Any) -> str:
    found = sorted(set(values))
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"
