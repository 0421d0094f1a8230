"""What a run is, and hence its name: the same config finds the same folder. No torch.

Only keys that differ from their defaults count, so a new key renames no run.
"""

import hashlib
import json
import re
from dataclasses import asdict
from functools import cache
from pathlib import PurePath
from typing import Any

from fedlens.config import labels
from fedlens.config.compose import getattr_dotted, leaves, row_of, within
from fedlens.config.schema import ROW_KEYS, RUNTIME_KEYS, Config
from fedlens.registry import backbone, dataset, diagnostic, trainable


def identity(config: Config) -> dict[str, Any]:
    """The part of the config that decides the result, key by key."""
    defaults = dict(_defaults())
    for key in ROW_KEYS:
        row = row_of(config, key)
        defaults |= {f"{key}.{name}": value for name, value in row.defaults.items()}
    values = {
        key: value
        for key, value in leaves(asdict(config))
        if not within(key, RUNTIME_KEYS) and value != defaults.get(key, ...)
    }
    if not config.privacy.on:
        values = {key: value for key, value in values.items() if not within(key, ["privacy"])}
    if config.backbone.resolution:  # named even where it is the backbone's own
        values["backbone.resolution"] = config.backbone.resolution
    for key in ROW_KEYS:  # files and folders may lie elsewhere; the manifest holds their hashes
        row, chosen = row_of(config, key), getattr_dotted(config, key)
        portable = row.portable(chosen)
        paths = {*row.traits.get("paths", ()), row.traits.get("path_or_name")} & chosen.keys()
        values |= {f"{key}.{name}": portable[name] for name in paths if chosen[name] is not None}
    if config.backbone.weights:  # the same file may lie elsewhere; the manifest holds its hash
        values["backbone.weights"] = PurePath(config.backbone.weights).name
    for name in config.federated.diagnostics:  # other rows have their plugin in the config
        if (plugin := diagnostic[name].plugin) is not None:
            values[f"federated.diagnostics.{name}"] = plugin.word
    return values


@cache
def _defaults() -> dict[str, Any]:
    """Of all keys but rows' parameters, which the chosen row knows."""
    values = dict(leaves(asdict(Config())))
    return values | {f"{key}.name": values[key] for key in ROW_KEYS}


def run_name(config: Config) -> str:
    """What the run is, readable, and a short hash of what decides its result."""
    if config.run.name:
        return config.run.name
    text = json.dumps(identity(config), sort_keys=True)
    subset = "-subset" if config.data.train_per_class or config.data.test_per_class else ""
    resolution = f"-{config.backbone.resolution}px" if config.backbone.resolution else ""
    scratch = "" if config.backbone.pretrained else "-scratch"
    parts = [
        config.experiment,
        _data(config) + subset,
        _backbone(config) + resolution + scratch,
        f"{config.head.name}-{trainable.spelled(config.train.trainable).replace(':', '')}",
        *_masks(config),
        *_federation(config),
        f"s{config.seed}",
        hashlib.sha256(text.encode()).hexdigest()[:8],
    ]
    return "_".join(parts)


def _backbone(config: Config) -> str:
    return backbone.spelled(config.backbone).replace(":", "-")


def _data(config: Config) -> str:
    """The word of a run's name for its dataset, with its argument or the name of its folder."""
    row = row_of(config, "data")
    portable = row.portable(config.data)
    folder = [portable["root"]] if "root" in row.traits.get("paths", ()) else []
    return re.sub(r"[^\w.=-]+", "-", "-".join([dataset.spelled(portable), *folder]))


def _masks(config: Config) -> list[str]:
    """The words of a run's name for which weights it trains."""
    density, rule = config.sparse.density, config.sparse.rule.name.replace("_", "-")
    return [] if density is None else [f"{rule}-{density:g}"]


def _federation(config: Config) -> list[str]:
    """The words of a run's name for how it is federated."""
    if config.federated.clients is None:
        return []
    partition, algorithm = labels.partition(config), labels.algorithm(config)
    return [labels.plain(partition), f"{labels.plain(algorithm)}-J{config.federated.local_steps}"]
