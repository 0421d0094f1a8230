"""Masks as tables in a terminal: where they come from, what they train, how much they share."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

NONE = "—"  # a layer has no weights of that kind

PROVENANCE = {  # a line of the page → the keys it tells, where they are there
    "mask": ("rule", "density", "scope"),
    "calibration": ("method", "rounds", "soft", "labels", "target", "passes"),
    "examples": ("source", "examples", "clients", "of_clients", "voting"),
    "seed": ("seed",),
}


def mask_labels(provenances: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """Rule and density if they tell all masks apart, else the names, which must."""
    if all("rule" in told and "density" in told for told in provenances):
        short = [f"{_words(told['rule'])} {100 * told['density']:.4g}%" for told in provenances]
        if len(set(short)) == len(short):
            return short
    return list(names)


def mask_page(record: Mapping[str, Any]) -> RenderableType:
    """Of {"label", "path", "provenance"} and the record of densities: all one wants to know."""
    facts = Table.grid(padding=(0, 2))
    facts.add_row("file", Text(record["path"], overflow="fold"))
    for line, keys in PROVENANCE.items():
        if said := _said(line, keys, record["provenance"]):
            facts.add_row(line, Text(said))
    whole = record["all"]
    facts.add_row("trained", f"{whole['trained']:,} of {whole['total']:,} weights")
    return Group(Text(record["label"], style="bold"), facts, Text(), density_table(record))


def density_table(record: Mapping[str, Any]) -> Table:
    """Density in % by layer and kind, with totals over whole layers and whole kinds."""
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
    """Jaccard of every two masks, and what two random masks of their densities would have."""
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
    """Two decimals; what is trained a little is never shown as nothing."""
    if not tally["trained"]:
        return "0"
    return f"{100 * tally['density']:.2f}" if tally["density"] >= 5e-5 else "<0.01"


def _said(line: str, keys: Sequence[str], told: Mapping[str, Any]) -> str:
    """`rule least sensitive, density 0.1`: a key that is the line's own name is not repeated."""
    found = {key: told[key] for key in keys if told.get(key) is not None}
    return ", ".join(
        _words(value) if key == line else f"{_words(key)} {_words(value)}"
        for key, value in found.items()
    )


def _words(value: object) -> str:
    return str(value).replace("_", " ")
