"""Title and authors of a report, from a small YAML file.

title: …
authors: [{name: …, id: …, affiliation: …}]
date, abstract and noniid (the partition that stands for 'non-IID', such as Nc=1) may be told too.
"""

from dataclasses import fields
from pathlib import Path

import yaml

from fedlens.errors import FedlensError, suggest
from fedlens.reporting.study.content import About, Author


def read(path: Path) -> About:
    try:
        told = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FedlensError(f"{path} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise FedlensError(f"{path} is not YAML: {str(error).splitlines()[0]}.") from error
    found = _words(told, About, path)
    authors = found.pop("authors", [])
    if not isinstance(authors, list):
        raise FedlensError(f"{path}: authors is a list of {{name, id, affiliation}}.")
    return About(
        **_texts(found, path),
        authors=[Author(**_texts(_author(one, path), path)) for one in authors],
    )


def _author(told: object, path: Path) -> dict[str, object]:
    found = _words({"name": told} if isinstance(told, str) else told, Author, path)
    if "name" not in found:
        raise FedlensError(f"{path}: an author has no name.")
    return found


def _words(told: object, schema: type, path: Path) -> dict[str, object]:
    known = [entry.name for entry in fields(schema)]
    if not isinstance(told, dict):
        raise FedlensError(f"{path} does not map {', '.join(known)} to what they are.")
    for key in told:
        if key not in known:
            raise FedlensError(f"{path}: unknown key '{key}': {suggest(str(key), known)}")
    return dict(told)


def _texts(told: dict[str, object], path: Path) -> dict[str, str]:
    for key, value in told.items():
        if isinstance(value, dict | list):
            raise FedlensError(f"{path}: {key} is a line of text.")
    return {key: "" if value is None else str(value) for key, value in told.items()}
