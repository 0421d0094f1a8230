"""Two tables of a study's records as Markdown, and the figure of the README.

Test top-1 in %, mean ± 95 % t-interval over seeds; a number without ± comes from one seed.

    python results/headline.py RECORDS                    all methods
    python results/headline.py RECORDS --short            the rows of the README
    python results/headline.py RECORDS --figure FILE.png  the figure of the README
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import partitions_figure
from fedlens.reporting.study import labels, runs
from fedlens.reporting.study.comparison import chosen, grouped
from fedlens.reporting.study.runs import Method
from partitions_figure import ENDS

COLUMNS = ("IID", "Nc=50", "Nc=10", "Nc=5", "Nc=1")
STEPS, DENSITY, CALIBRATION = 4, 0.1, 4  # of the headline; sweeps of them are in the report

# The README's rows: what differs from full fine-tuning by FedAvg with a frozen ridge head.
SHORT_COLUMNS = ("IID", "Nc=5", "Nc=1")
USUAL = {
    "train.trainable.name": "full",
    "head.name": "ridge",
    "sparse.density": None,
    "algorithm.sampling.name": "uniform",
    "algorithm.aggregator.name": "mean",
    "algorithm.server.lr": 1.0,
}
SHORT: dict[str, dict[str, Any]] = {
    "Ridge head, no fine-tuning": {"train.trainable.name": "head"},
    "Linear head trained, backbone frozen": {
        "train.trainable.name": "head",
        "head.name": "linear",
    },
    "Full fine-tuning, linear head trained jointly": {"head.name": "linear"},
    "Full fine-tuning, ridge head frozen": {},
    "Random 10 % of the weights trained, ridge head frozen": {
        "sparse.density": DENSITY,
        "sparse.rule.name": "random",
    },
    "Least sensitive 10 % of the weights trained (TaLoS), ridge head frozen": {
        "sparse.density": DENSITY,
        "sparse.rule.name": "least_sensitive",
    },
    "Full fine-tuning, ridge head frozen, cyclic client sampling, server learning rate 2": {
        "algorithm.sampling.name": "cyclic",
        "algorithm.server.lr": 2.0,
    },
    "Full fine-tuning, ridge head frozen, cyclic client sampling, TIES merging": {
        "algorithm.sampling.name": "cyclic",
        "algorithm.aggregator.name": "ties",
    },
}


def headline(places: Iterable[Path]) -> str:
    """Every federated method of the study, a row each."""
    rows = grouped(sorted(_methods(places), key=_order), _name)
    return _table(COLUMNS, ((_name(row[0]), row) for row in rows))


def short_headline(places: Iterable[Path]) -> str:
    """The rows of the README."""
    return _table(SHORT_COLUMNS, _short_rows(places).items())


def draw(places: Iterable[Path], target: Path) -> None:
    """The README's rows as a figure."""
    rows = {
        label: {column: method.test for column in ENDS if (method := _at(row, column))}
        for label, row in _short_rows(places).items()
    }
    partitions_figure.draw(rows, target)


def _methods(places: Iterable[Path]) -> list[Method]:
    return [m for m in runs.read(places).methods if labels.federated(m) and _shown(m)]


def _short_rows(places: Iterable[Path]) -> dict[str, list[Method]]:
    methods = _methods(places)
    return {
        label: [
            method
            for method in methods
            if all(method.get(key) == value for key, value in {**USUAL, **changes}.items())
        ]
        for label, changes in SHORT.items()
    }


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


def _order(method: Method) -> tuple[Any, ...]:
    """Frozen backbones first, then full fine-tuning, then masks, then other algorithms."""
    return (
        labels.trains(method),
        method.get("train.trainable.name") != "head",
        method.get("head.name") == "ridge",
        labels.algorithm(method) != "FedAvg",
        labels.sparse(method),
        labels.rule(method),
        labels.algorithm(method),
    )


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, list[Method]]]) -> str:
    lines = [_line(["test top-1 in %", *columns]), _line(["---"] * (1 + len(columns)))]
    lines += [_line([label, *_cells(methods, columns)]) for label, methods in rows]
    return "\n".join(lines) + "\n"


def _cells(row: list[Method], columns: tuple[str, ...]) -> Iterator[str]:
    for column in columns:
        method = _at(row, column)
        yield _number(method) if method else ""


def _at(row: list[Method], column: str) -> Method | None:
    here = [method for method in row if labels.partition(method) == column]
    return chosen(here) if here else None


def _number(method: Method) -> str:
    accuracy = method.test
    half = "" if accuracy.half is None else f" ± {accuracy.half:.2f}"
    return f"{accuracy.mean:.2f}{half}"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="The tables and the figure of a study's records.")
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--short", action="store_true", help="only the rows of the README")
    parser.add_argument("--figure", type=Path, help="draw the rows of the README into this file")
    given = parser.parse_args()
    if given.figure:
        draw(given.records, given.figure)
    sys.stdout.write((short_headline if given.short else headline)(given.records))


if __name__ == "__main__":
    main()
