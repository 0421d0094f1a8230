"""Title and authors of a report, from a small YAML file.

title: …
authors: [{name: …, id: …, affiliation: …}]
Optional: date, abstract, and noniid (the label of the skewed partition among the six models).
"""

from dataclasses import fields
from pathlib import Path

from fedlens import yaml_reader
from fedlens.errors import FedlensError, suggest
from fedlens.reporting.study.content import About, Author


def read(path: Path) -> About:
    entries = _entries(yaml_reader.read(path), About, path)
    authors = entries.pop("authors", [])
    if not isinstance(authors, list):
        raise FedlensError(f"{path}: authors must be a list of {{name, id, affiliation}}.")
    return About(
        **_texts(entries, path),
        authors=[Author(**_texts(_author(one, path), path)) for one in authors],
    )


def _author(author: object, path: Path) -> dict[str, object]:
    entries = _entries({"name": author} if isinstance(author, str) else author, Author, path)
    if "name" not in entries:
        raise FedlensError(f"{path}: an author has no name.")
    return entries


def _entries(document: object, schema: type, path: Path) -> dict[str, object]:
    known = [entry.name for entry in fields(schema)]
    if not isinstance(document, dict):
        raise FedlensError(f"{path} must have the keys {', '.join(known)} (or some of them).")
    for key in document:
        if key not in known:
            raise FedlensError(f"{path}: unknown key '{key}': {suggest(str(key), known)}")
    return dict(document)


def _texts(entries: dict[str, object], path: Path) -> dict[str, str]:
    for key, value in entries.items():
        if isinstance(value, dict | list):
            raise FedlensError(f"{path}: {key} must be a line of text.")
    return {key: "" if value is None else str(value) for key, value in entries.items()}
