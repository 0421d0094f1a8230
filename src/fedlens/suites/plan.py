"""The runs of a suite: their folders and states, which are unfinished, and how long they take."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedlens.config.compose import plugin_options
from fedlens.config.identity import identity, run_name
from fedlens.config.schema import Config, unit
from fedlens.errors import FedlensError
from fedlens.files import cache_dir
from fedlens.store.run_folder import RunFolder
from fedlens.suites.cost import (
    OVERHEAD_S,
    PRETRAINING,
    count_shared_once,
    speed_key,
    total_cost,
    units,
    work_of,
)
from fedlens.suites.eta import Eta
from fedlens.suites.launch import Job
from fedlens.suites.suite import Cell

Probe = Callable[[Config, Collection[str]], Mapping[str, float]]  # task → seconds per image


@dataclass(frozen=True)
class PlannedRun:
    """A cell and the folder of its run; cells with equal configs share a folder."""

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
            return f"{state}: {self.folder.position()} of {self.units}"
        return f"{state}: {self.folder.failure}" if state == "failed" else state

    def job(self, call: Callable[[Config], object]) -> Job:
        arguments = ["run", *self.cell.arguments, *plugin_options(self.cell.config)]
        return Job(self.label, arguments, partial(call, self.cell.config), self.folder)


def plan(cells: Sequence[Cell]) -> list[PlannedRun]:
    """Each cell with its folder; refuses one run.name for two different configs."""
    runs = [PlannedRun(cell, folder_of(cell.config)) for cell in cells]
    named: dict[Any, PlannedRun] = {}
    for run in runs:
        if run.cell.config.run.name is None:  # the name then contains a hash of the config
            continue
        first = named.setdefault(run.folder.path, run)
        if identity(first.cell.config) != identity(run.cell.config):
            raise FedlensError(
                f"'{first.label}' and '{run.label}' are different runs with the same run.name: "
                "leave run.name out."
            )
    return runs


def folder_of(config: Config) -> RunFolder:
    """The folder of the run, whether it exists or not."""
    if config.backbone.resolution is None:  # timm knows it, or the data
        from fedlens.experiments.build import with_resolution

        config = with_resolution(config)
    return RunFolder(Path(config.run.root) / run_name(config))


def unique_runs(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Each run once, under the first of its labels."""
    first: dict[Any, PlannedRun] = {}
    for run in runs:
        first.setdefault(run.folder.path, run)
    return list(first.values())


def unfinished(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    return [run for run in unique_runs(runs) if run.folder.result is None]


def eta_of(runs: Sequence[PlannedRun], *, jobs: int) -> Eta:
    done = [PRETRAINING] if any(cache_dir().glob("weights/vit_pico-*.safetensors")) else []
    images = count_shared_once((work_of(run.cell.config) for run in runs), done=done)
    costs = {run.label: total_cost(count) for run, count in zip(runs, images, strict=True)}
    return Eta(costs, {run.label: run.units for run in runs}, jobs=jobs)


def estimates(runs: Sequence[PlannedRun], probe: Probe) -> list[float]:
    """Seconds left of each run; `probe` is called once for each task and speed key."""
    known: dict[tuple[Any, ...], dict[str, float]] = {}
    images = count_shared_once(work_of(run.cell.config) for run in runs)
    seconds = []
    for run, count in zip(runs, images, strict=True):
        config = run.cell.config
        per_image = known.setdefault(speed_key(config), {})
        if missing := {task for task, images in count.items() if images} - per_image.keys():
            per_image.update(probe(config, missing))
        left = 1 - min(1.0, run.folder.position() / run.units) if run.units else 1.0
        seconds.append(OVERHEAD_S + left * total_cost(count, per_image))
    return seconds
