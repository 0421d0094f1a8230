"""The contrasts that a suite states before its runs: one family, corrected together.

A suite lists its questions as pairs of cells (`contrasts:` in its YAML). The p-values of all of
them are corrected by one application of Holm's method, and every table of the report quotes these:
any other difference has an interval, but no p-value. A question whose runs are missing counts too,
so that no answer looks more certain while the study is incomplete than it does in the end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fedlens.config.identity import run_name
from fedlens.reporting.study.content import Answer, Grid
from fedlens.reporting.study.runs import Study
from fedlens.reporting.study.statistics import Difference, difference, holm
from fedlens.suites.suite import Suite


@dataclass(frozen=True)
class Asked:
    """A question of a suite: the runs of its two cells, by seed."""

    question: str
    labels: tuple[str, str]
    runs: tuple[Mapping[int, str], Mapping[int, str]]


def asked(suite: Suite, overrides: Sequence[str] = ()) -> list[Asked]:
    """The questions of a suite that is run with these overrides."""
    cells: dict[str, dict[int, str]] = {}
    for cell in suite.cells(overrides):
        cells.setdefault(cell.label, {})[cell.config.seed] = run_name(cell.config)
    return [
        Asked(question, pair, (cells[pair[0]], cells[pair[1]]))
        for question, pair in suite.contrasts.items()
    ]


def answers(questions: Sequence[Asked], study: Study) -> list[Answer]:
    """Each question with its difference over the seeds that both cells have, so far."""
    test = {run.name: run.test for run in study.runs}

    def values(runs: Mapping[int, str]) -> dict[int, float]:
        return {seed: test[name] for seed, name in runs.items() if name in test}

    found = {
        number: delta
        for number, one in enumerate(questions)
        if (delta := difference(values(one.runs[0]), values(one.runs[1])))
    }
    known = {number: delta.p for number, delta in found.items() if delta.p is not None}
    corrected = holm(known, tests=len(questions))
    return [
        _answer(one, found.get(number), corrected.get(number))
        for number, one in enumerate(questions)
    ]


def _answer(one: Asked, delta: Difference | None, corrected: float | None) -> Answer:
    estimate = delta.estimate if delta else None
    return Answer(
        question=one.question,
        first=one.labels[0],
        second=one.labels[1],
        mean=estimate.mean if estimate else None,
        half=estimate.half if estimate else None,
        count=estimate.count if estimate else 0,
        effect=estimate.mean / estimate.deviation if estimate and estimate.deviation else None,
        p=delta.p if delta else None,
        corrected=corrected,
        runs=[sorted(runs.values()) for runs in one.runs],
    )


def quoted(grid: Grid, answered: Sequence[Answer]) -> Grid:
    """The table with the family's p-values where it shows a contrast of the family, else none."""
    by_runs = {frozenset(map(frozenset, answer.runs)): answer.corrected for answer in answered}
    runs = {
        (row, column): cell.runs
        for row, cells in zip(grid.rows, grid.cells, strict=True)
        for column, cell in zip(grid.columns, cells, strict=True)
        if cell is not None
    }
    contrasts = [
        replace(
            one, corrected=by_runs.get(frozenset(frozenset(runs[place]) for place in one.places))
        )
        for one in grid.contrasts
    ]
    return replace(grid, contrasts=contrasts)
