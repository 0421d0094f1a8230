"""Masks as tables in a terminal: origin, density by layer and kind, overlap."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedlens.reporting.study.labels import NONE

PROVENANCE = {  # a line of the page → the keys that it shows, if they exist
    "mask": ("rule", "density", "scope"),
    "calibration": ("method", "rounds", "shrink_factor", "labels", "target", "passes"),
    "examples": ("source", "examples", "clients", "of_clients", "voting"),
    "seed": ("seed",),
}


def mask_labels(provenances: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """Rule and density if they distinguish all masks, else the names."""
    if all("rule" in one and "density" in one for one in provenances):
        short = [f"{_words(one['rule'])} {100 * one['density']:.4g}%" for one in provenances]
        if len(set(short)) == len(short):
            return short
    return list(names)


def mask_page(record: Mapping[str, Any]) -> RenderableType:
    """One mask, from {"label", "path", "provenance"} and the record of its densities."""
    facts = Table.grid(padding=(0, 2))
    facts.add_row("file", Text(record["path"], overflow="fold"))
    for line, keys in PROVENANCE.items():
        if text := _line(line, keys, record["provenance"]):
            facts.add_row(line, Text(text))
    whole = record["all"]
    facts.add_row("trained", f"{whole['trained']:,} of {whole['total']:,} weights")
    return Group(Text(record["label"], style="bold"), facts, Text(), density_table(record))


def density_table(record: Mapping[str, Any]) -> Table:
    """Density in % by layer and kind, with totals by layer and by kind."""
    kinds = list(record["kinds"])
    table = Table(box=None, pad_edge=False)
    table.add_column("density in %")
    for column in [*kinds, "all"]:
        table.add_column(column, justify="right", no_wrap=True)
    for layer, cells in record["table"].items():
        shown = [percent(cells[kind]) if kind in cells else NONE for kind in kinds]
        table.add_row(Text(layer), *shown, percent(record["layers"][layer]))
    totals = [percent(record["kinds"][kind]) for kind in kinds]
    table.add_row("all", *totals, percent(record["all"]), style="bold")
    return table


def overlap_table(record: Mapping[str, Any]) -> Table:
    """Jaccard index of every two masks, and that of two random masks of their densities."""
    table = Table(box=None, pad_edge=False)
    table.add_column()
    table.add_column("Jaccard overlap", overflow="fold")
    for number in range(1, len(record["labels"]) + 1):
        table.add_column(str(number), justify="right")
    rows = zip(record["labels"], record["jaccard"], record["by_chance"], strict=True)
    for number, (label, shared, chance) in enumerate(rows, start=1):
        cells = [f"{a:.3f} ({b:.3f} by chance)" for a, b in zip(shared, chance, strict=True)]
        cells[number - 1] = "1"  # a mask and itself
        table.add_row(str(number), Text(label), *cells)
    return table


def percent(tally: Mapping[str, Any]) -> str:
    """Two decimals; a density above zero is never shown as zero."""
    if not tally["trained"]:
        return "0"
    return f"{100 * tally['density']:.2f}" if tally["density"] >= 5e-5 else "<0.01"


def _line(line: str, keys: Sequence[str], provenance: Mapping[str, Any]) -> str:
    """`rule least sensitive, density 0.1`: a key that is the line's own name is not repeated."""
    values = {key: provenance[key] for key in keys if provenance.get(key) is not None}
    return ", ".join(
        _words(value) if key == line else f"{_words(key)} {_words(value)}"
        for key, value in values.items()
    )


def _words(value: object) -> str:
    return str(value).replace("_", " ")
