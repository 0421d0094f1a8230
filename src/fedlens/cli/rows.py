"""`fedlens config rows`: everything that can be chosen by name, as the registry describes it."""

from collections.abc import Iterator

from fedlens.cli.shared import PLAIN, out
from fedlens.config.schema import ROW_KEYS
from fedlens.errors import FedlensError, suggest
from fedlens.registry import REGISTRIES, REQUIRED, Parameter, Registry, Row


def print_kinds() -> None:
    """Every kind, the config key that chooses its rows, and their names."""
    keys = {kind: key for key, kind in ROW_KEYS.items()}
    for kind, registry in REGISTRIES.items():
        key = f"  {keys[kind]}=NAME" if kind in keys else ""
        out.print(f"[bold]{kind}[/bold]{key}", highlight=False)
        out.print(f"  {', '.join(registry.names) or '–'}", **PLAIN)
    out.print("\nDetails: fedlens config rows KIND", **PLAIN)


def print_rows(kind: str) -> None:
    """All rows of a kind, which may also be given by its config key."""
    for row in _registry(kind):
        out.print(f"[bold]{row.name}[/bold]  ({row.label})", highlight=False)
        for line in _details(row):
            out.print(f"  {line}", **PLAIN)
        out.print()


def _registry(kind: str) -> Registry:
    kind = ROW_KEYS.get(kind, kind)
    if kind not in REGISTRIES:
        raise FedlensError(f"'{kind}' is not a kind of row: {suggest(kind, REGISTRIES)}")
    return REGISTRIES[kind]


def _details(row: Row) -> Iterator[str]:
    if row.doc:
        yield row.doc
    if row.parameters:
        yield "parameters:"
        yield from (f"  {_parameter(one)}" for one in row.parameters)
    if row.paper:
        yield f"paper: {row.paper}"
    if not row.source.startswith("fedlens."):
        yield f"from: {row.source}"


def _parameter(one: Parameter) -> str:
    """`density: float = 0.2, in (0, 1]: fraction of the entries kept`"""
    default = "" if one.default is REQUIRED else f" = {_value(one.default)}"
    allowed = f", {one.range}" if one.range else ""
    explanation = f": {one.help}" if one.help else ""
    return f"{one.name}: {one.type_name}{default}{allowed}{explanation}"


def _value(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
