"""Analyses of finished models as tables in a terminal, from their records alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedlens.reporting.study.analyses import (
    EQUATIONS,
    SYMBOLS,
    analysis_results,
    analysis_settings,
)
from fedlens.reporting.study.labels import NONE, percent, share

LISTED = 12  # more clients than this make a matrix wider than a terminal


def analysis_page(record: Mapping[str, Any]) -> RenderableType:
    """The analysis, every candidate on validation, and the test of the chosen one."""
    facts = Table.grid(padding=(0, 2))
    facts.add_row("run", Text(record["run"], overflow="fold"))
    facts.add_row("model", EQUATIONS[record["kind"]])
    for name, value in analysis_settings(record):
        facts.add_row(name, Text(value, overflow="fold"))
    if record["kind"] == "interference":
        return Group(facts, Text(), *_interference(record))
    ends = Table.grid(padding=(0, 2))
    for name, value in analysis_results(record):
        ends.add_row(name, value)
    return Group(facts, Text(), candidates_table(record), Text(), ends)


def candidates_table(record: Mapping[str, Any]) -> Table:
    """A line per candidate; the chosen one is marked."""
    rows = record["candidates"]
    settings = [key for key in ("method", "edit", "alpha", "scale") if key in rows[0]]
    shares = [key for key in ("target", "control") if key in rows[0]]
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for key in settings:
        table.add_column(SYMBOLS.get(key, key), justify="right" if key in SYMBOLS else "left")
    for column in ("val. loss", "val. acc.", *shares):
        table.add_column(column, justify="right")
    for place, row in enumerate(rows):
        chosen = place == record["chosen"]
        table.add_row(
            "→" if chosen else "",
            *(_value(row[key]) for key in settings),
            f"{row['validation']['loss']:.4f}",
            percent(row["validation"]),
            *(share(row[key]) for key in shares),
            style="bold" if chosen else None,
        )
    return table


def _interference(record: Mapping[str, Any]) -> list[RenderableType]:
    clients, (first, second) = record["clients"], record["pair"]
    matrices: list[RenderableType] = []
    if len(clients) <= LISTED:
        for title, key in (("cosine", "cosine"), ("sign conflict", "sign_conflict")):
            matrices += [_matrix(title, clients, record[key], clients, "{:.3f}"), Text()]
    accuracies = Table(f"clients {first} and {second}", str(first), str(second), box=None)
    for name, key in (("alone", "accuracy_alone"), ("merged", "accuracy_merged")):
        accuracies.add_row(f"accuracy, {name}", *map(share, record[key]))
    accuracies.add_row("merged / alone", *map(share, record["accuracy_normalised"]))
    errors, alphas = record["disentanglement_error"], [f"{a:g}" for a in record["alphas"]]
    title = f"disentanglement error: α of {first} (rows) and {second} (columns)"
    summary = Table.grid(padding=(0, 2))
    for row in analysis_results(record):
        summary.add_row(*row)
    return [
        *matrices,
        accuracies,
        Text(),
        _matrix(title, alphas, errors, alphas, "{:.1%}"),
        Text(),
        summary,
    ]


def _matrix(
    title: str,
    down: Sequence[object],
    values: Sequence[Sequence[float | None]],
    across: Sequence[object],
    form: str,
) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(title, justify="right")
    for name in across:
        table.add_column(str(name), justify="right")
    for name, row in zip(down, values, strict=True):
        table.add_row(str(name), *(NONE if v is None else form.format(v) for v in row))
    return table


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
