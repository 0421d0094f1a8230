"""The headline table of a study's records, as Markdown: ways of training × partitions.

Test top-1 in %, mean ± 95 % t-interval over seeds; a number without ± is one seed. Run:
python results/headline.py results/cifar100_cpu/runs.tar.xz
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from fedlens.reporting.study import labels, runs
from fedlens.reporting.study.comparison import chosen, grouped
from fedlens.reporting.study.runs import Method

COLUMNS = ("IID", "Nc=50", "Nc=10", "Nc=5", "Nc=1")
STEPS, DENSITY, CALIBRATION = 4, 0.1, 4  # of the headline; sweeps of them are in the report
ORDER = (  # of the rows, by what is trained
    "ridge head, no fine-tuning",
    "class-mean head, no fine-tuning",
    "linear head trained, backbone frozen",
    "full fine-tuning, linear head trained jointly",
    "full fine-tuning, ridge head frozen",
)


def headline(places: Iterable[Path]) -> str:
    methods = [m for m in runs.read(places).methods if labels.federated(m) and _shown(m)]
    rows = grouped(sorted(methods, key=_order), _name)
    lines = [_line(["test top-1 in %", *COLUMNS]), _line(["---"] * (1 + len(COLUMNS)))]
    return "\n".join([*lines, *(_line([_name(row[0]), *_cells(row)]) for row in rows)]) + "\n"


def _shown(method: Method) -> bool:
    if not labels.trains(method):
        return True
    return method.get("federated.local_steps") == STEPS and (
        not labels.sparse(method)
        or (method.get("sparse.density"), method.get("sparse.rounds")) == (DENSITY, CALIBRATION)
    )


def _name(method: Method) -> str:
    name = labels.trained(method)
    if labels.sparse(method):
        name = f"{labels.rule(method)} {DENSITY:.0%} of the weights, ridge head frozen"
    algorithm = labels.algorithm(method)
    return name if algorithm == "FedAvg" else f"{name}, {algorithm}"


def _order(method: Method) -> tuple[int, bool, bool, str, str]:
    kind, algorithm = ORDER.index(labels.trained(method)), labels.algorithm(method)
    return kind, algorithm != "FedAvg", labels.sparse(method), labels.rule(method), algorithm


def _cells(row: list[Method]) -> list[str]:
    cells = []
    for column in COLUMNS:
        here = [method for method in row if labels.partition(method) == column]
        cells.append(_number(chosen(here)) if here else "")
    return cells


def _number(method: Method) -> str:
    accuracy = method.test
    half = "" if accuracy.half is None else f" ± {accuracy.half:.2f}"
    return f"{accuracy.mean:.2f}{half}"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.stdout.write(headline([Path(place) for place in sys.argv[1:]]))
