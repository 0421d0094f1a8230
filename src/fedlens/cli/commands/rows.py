"""`fedlens config rows`: everything that can be chosen by name, as the registry describes it."""

from collections.abc import Iterator

from rich.padding import Padding
from rich.text import Text

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
        _print_indented(", ".join(registry.names) or "–", 2)
    out.print("\nParameters and papers: fedlens config rows KIND", **PLAIN)


def print_rows(kind: str) -> None:
    """All rows of a kind, which may also be given by its config key."""
    for row in _registry(kind):
        out.print(f"[bold]{row.name}[/bold]  ({row.label})", highlight=False)
        for line, indent in _details(row):
            _print_indented(line, indent)
        if row.paper:
            out.print(f"  paper: {row.paper}", **PLAIN)  # an address stays on one line
        out.print()


def _print_indented(text: str, indent: int) -> None:
    """Print text with all of its lines indented, where it is longer than the terminal is wide."""
    out.print(Padding(Text(text), (0, 0, 0, indent)))


def _registry(kind: str) -> Registry:
    kind = ROW_KEYS.get(kind, kind)
    if kind not in REGISTRIES:
        raise FedlensError(f"There is no kind '{kind}': {suggest(kind, REGISTRIES)}")
    return REGISTRIES[kind]


def _details(row: Row) -> Iterator[tuple[str, int]]:
    """Lines and how far they are indented."""
    if row.doc:
        yield row.doc, 2
    if row.parameters:
        yield "parameters:", 2
        yield from ((_parameter(one), 4) for one in row.parameters)
    if not row.source.startswith("fedlens."):
        yield f"from: {row.source}", 2


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
