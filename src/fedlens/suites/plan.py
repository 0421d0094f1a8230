"""The runs of a suite: their folders and states, which are unfinished, and how long they take."""

import math
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from fedlens.config.compose import plugin_options
from fedlens.config.identity import identity, run_name
from fedlens.config.schema import Config, unit
from fedlens.errors import FedlensError
from fedlens.registry import backbone
from fedlens.store.run_folder import RunFolder
from fedlens.suites.budget import RunCost
from fedlens.suites.estimates.cost import (
    CLOSED_FORM,
    OVERHEAD_S,
    analysis_work,
    count_shared_once,
    relative_cost,
    speed_key,
    units,
    work_at_the_end,
    work_at_the_start,
    work_of,
)
from fedlens.suites.estimates.machines import Machine, ThisMachine, Wanted
from fedlens.suites.eta import Eta, Parts
from fedlens.suites.launch import Job
from fedlens.suites.suite import Cell

Probe = Callable[[Config, Collection[str]], Mapping[str, float]]  # task → seconds per image
ConfigWork = tuple[Config, Mapping[str, int]]  # and task → images


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
        return unit(self.cell.config)

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
    config = replace(config, backbone=config.backbone.but(resolution=own_resolution(config)))
    return RunFolder(Path(config.run.root) / run_name(config))


def own_resolution(config: Config) -> int:
    """The resolution of the run's images: as the config says, else as the backbone or the data."""
    if config.backbone.resolution is not None:
        return int(config.backbone.resolution)
    traits = backbone[config.backbone.name].traits
    if "resolution" in traits:
        return int(traits["resolution"])
    from fedlens.experiments.build import with_resolution  # timm knows it, or the data

    return int(with_resolution(config).backbone.resolution)


def unique_runs(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Each run once, under the first of its labels."""
    first: dict[Any, PlannedRun] = {}
    for run in runs:
        first.setdefault(run.folder.path, run)
    return list(first.values())


def unfinished(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    return [run for run in unique_runs(runs) if not run.folder.finished]


@dataclass(frozen=True)
class PlannedAnalysis:
    """A `fedlens arithmetic` command for a run, once the run has finished."""

    run: PlannedRun
    command: str

    @property
    def label(self) -> str:
        return f"{self.command}: {self.run.label}"

    @property
    def words(self) -> list[str]:
        """Of the command line, behind `fedlens arithmetic`."""
        name, *options = shlex.split(self.command)
        return [name, str(self.run.folder.path), *options]

    @property
    def done(self) -> bool:
        """Whether the run has a record of such an analysis."""
        name = shlex.split(self.command)[0]
        return any(self.run.folder.path.glob(f"arithmetic/{name}*/record.json"))


def analyses_of(runs: Sequence[PlannedRun]) -> list[PlannedAnalysis]:
    """Each analysis once, where several cells request it."""
    found: dict[tuple[str, ...], PlannedAnalysis] = {}
    for run in runs:
        for command in run.cell.analyses:
            one = PlannedAnalysis(run, command)
            found.setdefault(tuple(one.words), one)
    return list(found.values())


def eta_of(
    runs: Sequence[PlannedRun],
    analyses: Sequence[PlannedAnalysis] = (),
    *,
    jobs: int,
    machine: ThisMachine | None = None,
) -> Eta:
    """The time left of runs and then analyses.

    Where `machine` has timed all kinds of steps before, costs are in seconds. Else they are rough,
    and the time left is not known until something was measured.
    """
    if machine is not None and not machine.knows(_wanted(_whole(runs), _of_analyses(analyses))):
        machine = None
    parts = {
        run.label: _parts(run.cell.config, work, machine)
        for run, work in zip(runs, _works(runs), strict=True)
    }
    for analysis in analyses:
        config = analysis.run.cell.config
        own = {} if analysis.done else analysis_work(analysis.command, config)
        parts[analysis.label] = _parts(config, (own, {}), machine)
    totals = {run.label: run.units for run in runs}
    return Eta(parts, totals, jobs=jobs, in_seconds=machine is not None)


def _parts(
    config: Config, work: tuple[Mapping[str, int], Mapping[str, int]], machine: Machine | None
) -> Parts:
    """Costs by kind of step: of a run's own work, of what comes before it, and of what comes after.

    What comes before is partly for other runs too.
    """

    def costs(images: Mapping[str, int], *, shared: bool = False) -> dict[Any, float]:
        tasks = [task for task, count in images.items() if count]
        each = machine(config, tasks) if machine is not None else {}
        return {
            (shared, *_kind(config, task)): images[task]
            * each.get(task, relative_cost(config, task))
            for task in tasks
        }

    own, shared = work
    begins, ends = work_at_the_start(config), work_at_the_end(config)
    first = {task: min(own.get(task, 0), images) for task, images in begins.items()}
    rest = {task: images - first.get(task, 0) for task, images in own.items()}
    last = {task: min(rest.get(task, 0), images) for task, images in ends.items()}
    during = {task: images - last.get(task, 0) for task, images in rest.items()}
    # While a run does shared work, others wait for it, so it is faster than the same in turns.
    before = {**costs(shared, shared=True), **costs(first)}
    return Parts(costs(during), before, costs(last))


def _kind(config: Config, task: str) -> tuple[Any, ...]:
    """Steps of one kind take about as long as predicted, or all longer, or all shorter."""
    if task == "head" or task in CLOSED_FORM:
        return (task,)
    model = config.backbone
    return (task, model.name, model.resolution, config.sparse.density is not None)


def _works(
    runs: Sequence[PlannedRun],
) -> list[tuple[Mapping[str, int], Mapping[str, int]]]:
    """Task → images of each run's own work, and of the shared work that it is the first to need."""
    works = [work_of(run.cell.config) for run in runs]
    whole = count_shared_once(works)
    return [
        (work.images, {t: n - work.images.get(t, 0) for t, n in images.items()})
        for work, images in zip(works, whole, strict=True)
    ]


def estimates(runs: Sequence[PlannedRun], probe: Probe) -> list[float]:
    """Seconds left of each run; shared work counts with the first run that needs it.

    A `Machine` receives all work before it is asked for the first speed.
    """
    seconds = _seconds(_whole(runs), probe)
    for place, run in enumerate(runs):
        seconds[place] *= 1 - _progress(run)
    return [OVERHEAD_S + one for one in seconds]


def analysis_estimates(analyses: Sequence[PlannedAnalysis], probe: Probe) -> list[float]:
    """Seconds of each analysis."""
    return [OVERHEAD_S + one for one in _seconds(_of_analyses(analyses), probe)]


def run_costs(cells: Sequence[Cell], machine: Machine) -> list[RunCost]:
    """What each cell takes from its start, with its analyses; no folder is looked at."""
    works = [work_of(cell.config) for cell in cells]
    analyses = [
        (cell.config, analysis_work(command, cell.config))
        for cell in cells
        for command in cell.analyses
    ]
    own = [(cell.config, work.images) for cell, work in zip(cells, works, strict=True)]
    shared = [
        (cell.config, {part.task: part.images})
        for cell, work in zip(cells, works, strict=True)
        for part in work.shared
    ]
    seconds = iter(_seconds([*own, *analyses, *shared], machine))
    own_seconds = [OVERHEAD_S + next(seconds) for _ in cells]
    analysis_seconds = [sum(OVERHEAD_S + next(seconds) for _ in cell.analyses) for cell in cells]
    return [
        RunCost(training + analysing, {part.key: next(seconds) for part in work.shared})
        for training, analysing, work in zip(own_seconds, analysis_seconds, works, strict=True)
    ]


def remaining_costs(cells: Sequence[Cell], machine: Machine) -> list[RunCost]:
    """As `run_costs`, without what has been done: nothing is left of a finished run."""
    return [
        cost if not (done := _progress(run)) else RunCost(cost.own * (1 - done))
        for run, cost in zip(plan(cells), run_costs(cells, machine), strict=True)
    ]


def _progress(run: PlannedRun) -> float:
    """The share of the run that is done."""
    if run.folder.finished:
        return 1.0
    return min(1.0, run.folder.position() / run.units) if run.units else 0.0


def _whole(runs: Sequence[PlannedRun]) -> list[ConfigWork]:
    """Each run's own work and the shared work that it is the first to need, together."""
    return [
        (run.cell.config, {task: own.get(task, 0) + shared[task] for task in shared})
        for run, (own, shared) in zip(runs, _works(runs), strict=True)
    ]


def _of_analyses(analyses: Sequence[PlannedAnalysis]) -> list[ConfigWork]:
    configs = [(one.command, one.run.cell.config) for one in analyses]
    return [(config, analysis_work(command, config)) for command, config in configs]


def _wanted(*works: Sequence[ConfigWork]) -> list[Wanted]:
    return [
        Wanted(config, task, count * relative_cost(config, task))
        for config, images in chain(*works)
        for task, count in images.items()
        if count
    ]


def _seconds(works: Sequence[ConfigWork], probe: Probe) -> list[float]:
    wanted = _wanted(works)
    if (prepare := getattr(probe, "prepare", None)) is not None:  # it is a `Machine`
        prepare(wanted)
    known: dict[str, float] = {}
    for config, task, _ in wanted:
        key = f"{config.threads} {speed_key(config, task)}"
        if key not in known:
            known[key] = probe(config, [task])[task]
    return [
        math.fsum(
            count * known[f"{config.threads} {speed_key(config, task)}"]
            for task, count in images.items()
            if count
        )
        for config, images in works
    ]
