"""Mean cosine of two clients' updates in a round, from a study's records, by partition.

Over all pairs of a round, then rounds, then seeds; FedAvg at J = 4, what is trained by rows. Run:
python results/interference.py results/cifar100_cpu/runs.tar.xz
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

from fedlens.reporting.study import labels, runs
from fedlens.reporting.study.comparison import grouped
from fedlens.reporting.study.runs import Method

STEPS, DENSITIES, CALIBRATIONS = 4, (None, 0.1), (None, 4)


def cosines(places: Iterable[Path]) -> dict[tuple[str, str], float]:
    """(what is trained, partition) → mean cosine."""
    shown = [method for method in runs.read(places).methods if _shown(method)]
    return {
        place: fmean(_cosine(method) for method in alike)
        for alike in grouped(shown, _place)
        for place in [_place(alike[0])]
    }


def _shown(method: Method) -> bool:
    return (
        labels.federated(method)
        and labels.trained(method) == "full fine-tuning, ridge head frozen"
        and labels.algorithm(method) == "FedAvg"
        and method.get("federated.local_steps") == STEPS
        and method.get("sparse.density") in DENSITIES
        and (not labels.sparse(method) or method.get("sparse.rounds") in CALIBRATIONS)
    )


def _place(method: Method) -> tuple[str, str]:
    return labels.rule(method), labels.partition(method)


def _cosine(method: Method) -> float:
    return fmean(
        fmean(line["cosine"] for line in run.metrics if line.get("cosine") is not None)
        for run in method.runs
    )


if __name__ == "__main__":
    for (rule, partition), value in sorted(cosines(map(Path, sys.argv[1:])).items()):
        print(f"{rule:18} {partition:6} {value:7.4f}")
