"""YAML that people write, read with care: no key twice, no alias inside itself, no deep nesting.

YAML's own rules allow what no file of ours means: the second of two equal keys wins silently, and
an alias may contain itself. The events of the parser are checked before anything is made of them.
"""

from collections.abc import Iterator
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

from fedlens.errors import FedlensError, shown

DEEPEST = 50  # levels of nesting; a config has 4
LARGEST = 100_000  # values, each alias counted as what it stands for

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same, in C where PyYAML has it


def read_text(path: Path | Traversable) -> str:
    """The text of a YAML file, as it is."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise FedlensError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise FedlensError(f"{path} is not a YAML file: it is not text in UTF-8.") from error


def read(path: Path | Traversable) -> Any:
    """The content of a YAML file."""
    return parse(read_text(path), str(path))


def parse(text: str, source: str) -> Any:
    """The content of a YAML text; `source` says in errors where it is from."""
    check(text, source)
    try:
        return yaml.load(text, LOADER)
    except (yaml.YAMLError, ValueError) as error:  # a ValueError is of a date or number
        raise FedlensError(_not_yaml(error, source)) from error


def check(text: str, source: str) -> None:
    """Refuses a text that is not YAML, or of which a part cannot be meant."""
    try:
        for fault, mark in _faults(text):
            raise FedlensError(f"{source}, line {mark.line + 1}: {fault}.")
    except (yaml.YAMLError, ValueError) as error:
        raise FedlensError(_not_yaml(error, source)) from error


def _not_yaml(error: Exception, source: str) -> str:
    mark = getattr(error, "problem_mark", None)
    line = f" (line {mark.line + 1})" if mark else ""
    return f"{source} is not a YAML file{line}."


class _Collection:
    """A mapping or a list that the parser is in."""

    def __init__(self, event: Any) -> None:
        self.anchor: str | None = event.anchor
        self.keys: set[str] | None = set() if isinstance(event, yaml.MappingStartEvent) else None
        self.children = 0  # of a mapping: keys and values, in turns
        self.size = 1  # values in it, itself included


def _faults(text: str) -> Iterator[tuple[str, Any]]:
    """What is wrong, and where."""
    within: list[_Collection] = []
    sizes: dict[str, int] = {}  # of what has an anchor
    for event in yaml.parse(text, LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            within.append(_Collection(event))
            if len(within) > DEEPEST:
                yield f"it is nested more than {DEEPEST} levels deep", event.start_mark
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            ended = within.pop()
            anchor, size, key = ended.anchor, ended.size, None
        elif isinstance(event, yaml.AliasEvent):
            if any(one.anchor == event.anchor for one in within):
                yield f"the alias *{event.anchor} stands for what contains it", event.start_mark
            anchor, size, key = None, sizes.get(str(event.anchor), 1), None
        elif isinstance(event, yaml.ScalarEvent):
            anchor, size, key = event.anchor, 1, event.value
        else:
            continue
        if anchor is not None:
            sizes[anchor] = size
        if not within:
            continue
        parent = within[-1]
        if parent.keys is not None and parent.children % 2 == 0 and key is not None:
            if key in parent.keys:
                yield f"the key '{shown(key)}' is there twice, leave one out", event.start_mark
            parent.keys.add(key)
        parent.children += 1
        parent.size += size
        if parent.size > LARGEST:
            yield f"with its aliases it has more than {LARGEST} values", event.start_mark
