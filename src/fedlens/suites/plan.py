"""What a suite comes to: its runs, each once, how each stands, and what is left to do."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fedlens.config.identity import essence
from fedlens.config.schema import Config, unit
from fedlens.errors import FedlensError
from fedlens.files import cache_dir
from fedlens.store.run_folder import RunFolder
from fedlens.suites.cost import (
    OVERHEAD,
    PRETRAINED,
    counted_once,
    kind,
    units,
    weigh,
    work_of,
)
from fedlens.suites.eta import Outlook, position
from fedlens.suites.launch import Piece, folder_of
from fedlens.suites.suite import Cell

Pace = Callable[[Config, Collection[str]], Mapping[str, float]]  # task → seconds per image


@dataclass(frozen=True)
class Planned:
    """A cell and the folder of its run; runs that several cells share have one folder."""

    cell: Cell
    folder: RunFolder

    @property
    def label(self) -> str:
        return f"{self.cell.label}, seed {self.cell.config.seed}"

    @property
    def units(self) -> int:
        return units(self.cell.config)

    @property
    def unit(self) -> str:
        return unit(self.cell.config) + ("" if self.units == 1 else "s")

    def state(self) -> str:
        """finished, running, interrupted: 3 of 8, failed: why, or new."""
        if not self.folder.config.exists():
            return "new"
        state = self.folder.state()
        if state == "interrupted":
            return f"{state}: {position(self.folder)} of {self.units}"
        return f"{state}: {self.folder.failure}" if state == "failed" else state

    def piece(self, call: Callable[[Config], object]) -> Piece:
        words = ["run", *self.cell.words]
        return Piece(self.label, words, partial(call, self.cell.config), self.folder)


def planned(cells: Sequence[Cell]) -> list[Planned]:
    """Each cell with its folder; refuses a run.name that would make two different runs one."""
    found = [Planned(cell, folder_of(cell.config)) for cell in cells]
    named: dict[Any, Planned] = {}
    for run in found:
        if run.cell.config.run.name is None:  # then what it is names it
            continue
        first = named.setdefault(run.folder.path, run)
        if essence(first.cell.config) != essence(run.cell.config):
            raise FedlensError(
                f"'{first.label}' and '{run.label}' are two runs with one name: leave run.name out."
            )
    return found


def once(plan: Sequence[Planned]) -> list[Planned]:
    """Every run under the first of the labels it has."""
    first: dict[Any, Planned] = {}
    for run in plan:
        first.setdefault(run.folder.path, run)
    return list(first.values())


def unfinished(plan: Sequence[Planned]) -> list[Planned]:
    return [run for run in once(plan) if run.folder.result is None]


def outlook_of(runs: Sequence[Planned], *, at_once: int) -> Outlook:
    done = [PRETRAINED] if any(cache_dir().glob("weights/vit_pico-*.safetensors")) else []
    images = counted_once((work_of(run.cell.config) for run in runs), done=done)
    weights = {run.label: weigh(count) for run, count in zip(runs, images, strict=True)}
    return Outlook(weights, {run.label: run.units for run in runs}, at_once=at_once)


def estimates(runs: Sequence[Planned], pace: Pace) -> list[float]:
    """Seconds of what is left of each run; `pace` is asked once for a task of a kind of work."""
    known: dict[tuple[Any, ...], dict[str, float]] = {}
    images = counted_once(work_of(run.cell.config) for run in runs)
    found = []
    for run, count in zip(runs, images, strict=True):
        config = run.cell.config
        per_image = known.setdefault(kind(config), {})
        if missing := {task for task, images in count.items() if images} - per_image.keys():
            per_image.update(pace(config, missing))
        left = 1 - min(1.0, position(run.folder) / run.units) if run.units else 1.0
        found.append(OVERHEAD + left * weigh(count, per_image))
    return found
