"""What a run is, and hence what it is called: the same config finds the same folder. No torch."""

import hashlib
import json
from dataclasses import asdict
from pathlib import PurePath
from typing import Any

from fedlens.config.schema import CIRCUMSTANCES, Config

YOUNGER: dict[str, Any] = {  # keys that runs were named without: at these values they still are
    "train.epoch_steps": None,
    "algorithm.cohorts": "chance",
}


def essence(config: Config) -> dict[str, Any]:
    """The part of the config that decides the result."""
    kept = asdict(config)
    for key in (*CIRCUMSTANCES, *YOUNGER):
        branch, last = _inside(kept, key)
        if key in CIRCUMSTANCES or branch[last] == YOUNGER[key]:
            del branch[last]
    if not config.privacy.on:
        del kept["privacy"]
    if config.backbone.weights:  # the same file may lie elsewhere; the manifest holds its hash
        kept["backbone"]["weights"] = PurePath(config.backbone.weights).name
    return kept


def _inside(tree: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """The branch that holds a dotted key, and the key's last word."""
    *path, last = key.split(".")
    for step in path:
        tree = tree[step]
    return tree, last


def run_name(config: Config) -> str:
    """What the run is, readable, and a short hash of what decides its result."""
    if config.run.name:
        return config.run.name
    text = json.dumps(essence(config), sort_keys=True)
    subset = "-subset" if config.data.train_per_class or config.data.test_per_class else ""
    resolution = f"-{config.backbone.resolution}px" if config.backbone.resolution else ""
    scratch = "" if config.backbone.pretrained else "-scratch"
    parts = [
        config.experiment,
        config.data.name + subset,
        config.backbone.name.replace(":", "-") + resolution + scratch,
        f"{config.head.name}-{config.train.what.replace(':', '')}",
        *_masked(config),
        *_federation(config),
        f"s{config.seed}",
        hashlib.sha256(text.encode()).hexdigest()[:8],
    ]
    return "_".join(parts)


def _masked(config: Config) -> list[str]:
    """The words of a run's name that say which weights it trains."""
    density, rule = config.sparse.density, config.sparse.rule.replace("_", "-")
    return [] if density is None else [f"{rule}-{density:g}"]


def _federation(config: Config) -> list[str]:
    """The words of a run's name that say how it is federated."""
    if config.federated.clients is None:
        return []
    partition = config.partition
    detail = {
        "classes": partition.classes_per_client,
        "dirichlet": partition.alpha,
        "quantity": partition.sigma,
    }.get(partition.name, "")
    return [f"{partition.name}{detail}", f"{config.algorithm.name}-J{config.federated.local_steps}"]
