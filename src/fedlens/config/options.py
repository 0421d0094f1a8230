"""What there is to choose from: the groups of the shipped YAML files, and their options."""

from importlib.resources import files

CONFIGS = "fedlens.config.presets"


def header(text: str) -> str:
    """What the comments at the head of a YAML file say."""
    lines = [line for line in text.splitlines() if line.startswith("#") and "@package" not in line]
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines)


def groups() -> list[str]:
    """The folders one option is chosen from; a suite is not part of a config."""
    return sorted(
        entry.name
        for entry in files(CONFIGS).iterdir()
        if entry.is_dir() and not entry.name.startswith("_") and entry.name != "suite"
    )


def options(group: str) -> list[str]:
    folder = files(CONFIGS).joinpath(group)
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in folder.iterdir()
        if entry.name.endswith(".yaml")
    )
