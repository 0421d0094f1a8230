"""What there is to choose from: the groups of the shipped YAML presets, and their options."""

from importlib.resources import files

PRESETS = "fedlens.config.presets"


def header(text: str) -> str:
    """The comments at the head of a YAML file."""
    lines = [line for line in text.splitlines() if line.startswith("#") and "@package" not in line]
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines)


def groups() -> list[str]:
    """The folders one preset is chosen from; a suite is not part of a config."""
    return sorted(
        entry.name
        for entry in files(PRESETS).iterdir()
        if entry.is_dir() and not entry.name.startswith("_") and entry.name != "suite"
    )


def options(group: str) -> list[str]:
    folder = files(PRESETS).joinpath(group)
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in folder.iterdir()
        if entry.name.endswith(".yaml")
    )
