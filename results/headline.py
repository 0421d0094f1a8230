"""All federated methods of the first study's records as a Markdown table.

Test top-1 in %, mean ± 95 % t-interval over seeds; a number without ± comes from one seed.

    python results/headline.py RECORDS
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fedlens.reporting.study import labels, runs
from fedlens.reporting.study.comparison import chosen, grouped
from fedlens.reporting.study.runs import Method

COLUMNS = ("IID", "Nc=50", "Nc=10", "Nc=5", "Nc=1")
STEPS, DENSITY, CALIBRATION = 4, 0.1, 4  # of the headline; sweeps of them are in the report


def headline(places: Iterable[Path]) -> str:
    """Every federated method of the study, a row each."""
    rows = grouped(sorted(_methods(places), key=_order), _name)
    return _table(COLUMNS, ((_name(row[0]), row) for row in rows))


def _methods(places: Iterable[Path]) -> list[Method]:
    return [m for m in runs.read(places).methods if labels.federated(m) and _shown(m)]


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
    parser = argparse.ArgumentParser(description="The methods of a study's records as a table.")
    parser.add_argument("records", nargs="+", type=Path)
    sys.stdout.write(headline(parser.parse_args().records))


if __name__ == "__main__":
    main()
