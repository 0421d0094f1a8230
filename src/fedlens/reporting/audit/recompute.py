"""A check of the audit: every number of a report, computed again from the files on disk."""

from collections.abc import Sequence
from math import isclose

from fedlens.reporting.audit import consistency
from fedlens.reporting.study import labels
from fedlens.reporting.study.comparison import Comparison
from fedlens.reporting.study.content import Check
from fedlens.reporting.study.runs import Method, Run
from fedlens.reporting.study.statistics import difference, estimate
from fedlens.store.records import read_record


def numbers_have_runs(tables: Sequence[Comparison], runs: Sequence[Run]) -> Check:
    """Every mean, interval and difference is computed again from result.json."""
    violations, remarks, numbers = [], [], 0
    for table in tables:
        grid = table.grid
        accuracy = {place: _read_again(method) for place, method in table.methods.items()}
        for row, cells in zip(grid.rows, grid.cells, strict=True):
            for column, cell in zip(grid.columns, cells, strict=True):
                if cell is None:
                    continue
                numbers += 1
                where = f"{grid.title}, {row}, {column}"
                again = estimate(list(accuracy[row, column].values()))
                if not (_close(again.mean, cell.mean) and _close(again.half, cell.half)):
                    violations.append(f"{where}: {cell.mean} is not the mean of its runs")
                if cell.untrained:
                    remarks.append(
                        f"{where}: the parameters before any training were the best on validation "
                        f"in {cell.untrained} of {labels.counted(len(cell.seeds), 'seed')}"
                    )
        for contrast in grid.contrasts:
            numbers += 1
            first, second = (accuracy[place] for place in contrast.places)
            delta = difference(first, second)
            if not (
                delta
                and _close(delta.estimate.mean, contrast.mean)
                and _close(delta.estimate.half, contrast.half)
                and _close(delta.p, contrast.p)
            ):
                violations.append(f"{grid.title}: {contrast.row} − {contrast.against} differs")
    for run in runs:
        violations += [f"{run.name}: {problem}" for problem in consistency.of_result(run)]
        violations += [f"{run.name}: {problem}" for problem in consistency.of_name(run)]
    return Check(
        "Every number comes from a run",
        f"{labels.counted(numbers, 'number')} recomputed from "
        f"{labels.counted(len(runs), 'result')}",
        violations,
        remarks,
    )


def _read_again(method: Method) -> dict[int, float]:
    """Seed → test accuracy, from the disk."""
    results = {run.seed: read_record(run.folder.path / "result.json") for run in method.runs}
    return {seed: 100 * result["test"]["top1"] for seed, result in results.items()}


def _close(first: float | None, second: float | None) -> bool:
    if first is None or second is None:
        return first is second
    return isclose(first, second, rel_tol=1e-9, abs_tol=1e-12)
