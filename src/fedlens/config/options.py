"""What there is to choose from: the groups of the shipped YAML presets, and their options."""

from functools import cache
from importlib.resources import files

PRESETS = "fedlens.config.presets"


def header(text: str) -> str:
    """The comments at the head of a YAML file."""
    lines = [line for line in text.splitlines() if line.startswith("#") and "@package" not in line]
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines)


@cache
def groups() -> tuple[str, ...]:
    """The folders one preset is chosen from; a suite is not part of a config."""
    folders = (entry.name for entry in files(PRESETS).iterdir() if entry.is_dir())
    return tuple(sorted(name for name in folders if not name.startswith("_") and name != "suite"))


@cache
def options(group: str) -> tuple[str, ...]:
    names = (entry.name for entry in files(PRESETS).joinpath(group).iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))
