"""The files of a search: trials.json and trials.csv with every trial, and best.yaml.

best.yaml is an experiment for `fedlens run`: the tuned one, with its overrides and the best values.
"""

import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from fedlens.config import compose
from fedlens.config.schema import ROW_KEYS, Config
from fedlens.files import replacing, write_json

Record = dict[str, Any]


def write(folder: Path, record: Record, best: Callable[[Record], Config]) -> None:
    """`best` returns the config of given parameter values."""
    write_json(folder / "trials.json", record)
    _write_table(folder / "trials.csv", record)
    if chosen := best_trial(record):
        text = experiment_text(record, best(chosen["params"]), folder / "best.yaml")
        with replacing(folder / "best.yaml") as temporary:
            temporary.write_text(text, encoding="utf-8")


def best_trial(record: Record) -> Record | None:
    """The trial with the highest validation accuracy, if any is complete."""
    number = record["best"]
    return None if number is None else dict(record["trials"][number - 1])


def experiment_text(record: Record, config: Config, path: Path) -> str:
    """The YAML of a config; its header documents the search."""
    chosen = best_trial(record)
    assert chosen is not None
    states = [trial["state"] for trial in record["trials"]]
    lines = [
        f"{config.experiment}, tuned: the best trial of a search. The test split was not opened.",
        "",
        f"command: fedlens run {path}",
        f"cost:    as {config.experiment} (see `fedlens config {config.experiment}`)",
        "expect:  not yet tested",
        f"found:   by {record['command']}",
        f"         as trial {chosen['number']} of {len(states)} ({states.count('pruned')} stopped "
        f"early, {states.count('failed')} failed), with {percent(chosen['value'])} on validation",
        *(f"         {key} in {dimension['text']}" for key, dimension in record["space"].items()),
    ]
    comments = "\n".join(f"# {line}".rstrip() for line in lines)
    values = _nested(compose.differences(config))
    if files := compose.plugin_options(config)[1::2]:
        values["plugins"] = files
    text = yaml.safe_dump(values, sort_keys=False) if values else ""
    return (
        f"# @package _global_\n{comments}\ndefaults:\n  - /experiment/{config.experiment}\n{text}"
    )


def parameters_text(params: Mapping[str, Any]) -> str:
    """The parameters on one line, to four digits."""
    return ", ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={compose.word(value)}"
        for key, value in sorted(params.items())
    )


def percent(value: float) -> str:
    return f"{value:.2%}"


def _nested(flat: Mapping[str, Any]) -> Record:
    """{'train.lr': 1, 'head': 'ridge'} → {'train': {'lr': 1}, 'head': {'name': 'ridge'}}"""
    tree: Record = {}
    for key, value in flat.items():
        *path, last = (f"{key}.name" if key in ROW_KEYS else key).split(".")
        branch = tree
        for step in path:
            branch = branch.setdefault(step, {})
        branch[last] = value
    return tree


def _write_table(path: Path, record: Record) -> None:
    keys = list(record["space"])
    columns = ["number", "state", "value", *keys, "run", "failure"]
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as stream:
        table = csv.DictWriter(stream, columns, restval="", extrasaction="ignore")
        table.writeheader()
        for trial in record["trials"]:
            table.writerow({**trial, **trial["params"]})
