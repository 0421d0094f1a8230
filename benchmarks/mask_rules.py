"""The mask rules in the embedded world over seeds: means, intervals and paired differences.

Reads the finished runs of `fedlens suite quickstart_rules seed=N`; trains nothing. Intervals are
Student's, 95 %; the p-values of a column's differences are corrected by Holm's method.
Run: python benchmarks/mask_rules.py runs [MORE_FOLDERS]
"""

import math
import sys
from pathlib import Path

from scipy import stats

from fedlens.experiments.build import resolved
from fedlens.experiments.config import run_name
from fedlens.experiments.records import RunFolder
from fedlens.experiments.suite import find
from side_by_side import print_table

SEEDS = range(3)
RIDGE, DENSE = "ridge head alone", "dense"


def accuracies(roots: list[Path]) -> dict[str, list[float]]:
    """Row of the suite → test accuracy in % for every seed; rows without all seeds are left out."""
    found: dict[str, list[float]] = {}
    for seed in SEEDS:
        for cell in find("quickstart_rules").cells([f"seed={seed}"]):
            name = run_name(resolved(cell.config))
            results = [RunFolder(root / name).result for root in roots]
            for result in filter(None, results):
                found.setdefault(cell.row, []).append(100 * result["test"]["top1"])
                break
    return {row: values for row, values in found.items() if len(values) == len(SEEDS)}


def interval(values: list[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % interval."""
    count, mean = len(values), math.fsum(values) / len(values)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    return mean, float(stats.t.ppf(0.975, count - 1)) * spread / math.sqrt(count)


def holm(p_values: dict[str, float]) -> dict[str, float]:
    """Holm, 1979: the k-th smallest of n times n − k, never below the one before, at most 1."""
    corrected, before = {}, 0.0
    for place, (row, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        before = max(before, min(1.0, p * (len(p_values) - place)))
        corrected[row] = before
    return corrected


def differences(found: dict[str, list[float]], rows: list[str], base: str) -> dict[str, str]:
    """Of each row to `base`, seed by seed: mean ± interval, and its corrected p-value."""
    deltas = {
        row: [a - b for a, b in zip(found[row], found[base], strict=True)]
        for row in rows
        if row != base
    }
    tests = {row: float(stats.ttest_1samp(delta, 0).pvalue) for row, delta in deltas.items()}
    corrected = holm(tests)
    return {
        row: "{:+.2f} ± {:.2f}".format(*interval(delta)) + f" (p {corrected[row]:.3f})"
        for row, delta in deltas.items()
    }


def main() -> None:
    found = accuracies([Path(word) for word in sys.argv[1:]] or [Path("runs")])
    if RIDGE not in found:
        sys.exit("Run `fedlens suite quickstart_rules seed=0`, then seed=1 and seed=2, first.")
    for partition in ("IID", "Nc=1"):
        rows = [row for row in found if row.startswith(f"{partition}, ")]
        to_ridge = differences(found, rows, RIDGE)
        to_dense = differences(found, rows, f"{partition}, {DENSE}")
        print(f"{partition}: test top-1 in % over {len(SEEDS)} seeds; p-values by Holm")
        print_table(
            ["trained", "accuracy", "minus ridge head", "minus dense"],
            [
                [
                    row,
                    "{:.2f} ± {:.2f}".format(*interval(found[row])),
                    to_ridge.get(row, ""),
                    to_dense.get(row, ""),
                ]
                for row in [RIDGE, *rows]
            ],
        )


if __name__ == "__main__":
    main()
