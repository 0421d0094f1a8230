"""How reports call what a config runs: by the rows it chooses, never by a name it gives itself.

A run copies these labels into its records, so that a report needs none of the rows.
"""

import re

from fedlens.config.compose import getattr_dotted, row_of
from fedlens.config.schema import Config, cohort_size, visits
from fedlens.registry import REGISTRIES, backbone
from fedlens.runtime.units import counted


def labels(config: Config) -> dict[str, str]:
    """What is shown of a run, by topic."""
    shown = {
        "data": _label(config, "data"),
        "backbone": backbone.spelled(config.backbone),
        "head": head(config),
        "trainable": trainable(config),
        "optimizer": _label(config, "train.optimizer"),
    }
    if config.sparse.density is not None:
        shown["mask_rule"] = _label(config, "sparse.rule")
    if config.federated.clients is not None:
        shown |= {"partition": partition(config), "algorithm": algorithm(config)}
    return shown


def head(config: Config) -> str:
    """'ridge head', 'deep ridge head on 6 blocks', …: with what it reads besides the output."""
    chosen = config.head
    parts = [counted(chosen.layers, "block")] if chosen.layers else []
    if chosen.random_features is not None:
        parts.append(f"{chosen.random_features:,} random features")
    tokens = {"class": "", "mean": "mean tokens", "both": "class and mean tokens"}[chosen.tokens]
    if tokens and row_of(config, "head").defaults["tokens"] != chosen.tokens:
        parts.append(tokens)
    label = _label(config, "head") + (f" on {', '.join(parts)}" if parts else "")
    if chosen.train_layers is not None:
        label += f", trained under {chosen.train_layers}"
    every = config.federated.refit_head
    return label if every is None else f"{label}, solved again every {every} rounds"


def partition(config: Config) -> str:
    return _label(config, "partition")


def trainable(config: Config) -> str:
    return ", ".join([_label(config, "train.trainable"), *_unusual(config, "train.trainable")])


def algorithm(config: Config) -> str:
    """The established name of what clients and server do, then what differs from it.

    FedAvg is the mean of all updates applied as it is; every other row adds its own label. The
    learning rate of an adaptive server is tuned for each setting, so it is not part of the name.
    """
    chosen = config.algorithm
    names = []
    if chosen.scaffold:
        names.append("SCAFFOLD")
        if chosen.measure_controls:
            names[-1] += " from measured controls"
    if chosen.correction.name != "none":
        names.append(_label(config, "algorithm.correction"))
    if chosen.proximal:
        towards = " towards the round's start" if chosen.proximal_to == "round" else ""
        names.append(f"FedProx μ={chosen.proximal:g}{towards}")
    if chosen.server.name != "sgd":
        names.append(_label(config, "algorithm.server"))
    if chosen.aggregator.name != "mean" or not names:
        names.append(_label(config, "algorithm.aggregator"))
    details = [
        *_unusual(config, "algorithm.correction"),
        *_unusual(config, "algorithm.aggregator"),
        *_unusual(config, "algorithm.server"),
    ]
    if chosen.server.name == "sgd" and chosen.server.lr != 1:
        details.append(f"server learning rate {chosen.server.lr:g}")
    if chosen.sampling.name != "uniform":
        details.append(sampling(config))
    if chosen.carry_momentum:
        details.append("momentum carried along")
    if chosen.average.name != "none":
        average = [_label(config, "algorithm.average"), *_unusual(config, "algorithm.average")]
        details.append(f"evaluated by the {', '.join(average)}")
    if config.privacy.name != "none":
        details.append(f"{config.privacy.name} differential privacy")
    if config.privacy.secure:
        details.append("secure aggregation")
    return ", ".join([" + ".join(names), *details])


def sampling(config: Config) -> str:
    """'cyclic client sampling', 'chain of 10', '2 chains of 5', …"""
    chosen = config.algorithm.sampling
    if chosen.name != "chain":
        return _label(config, "algorithm.sampling")
    length = cohort_size(config.federated) // chosen.chains
    chains = visits(config) // length
    if chains == 1:
        return f"chain of {length}"
    opposite = " in opposite orders" if chosen.order == "opposite" else ""
    return f"{chains} chains of {length}{opposite}"


def plain(label: str) -> str:
    """A label as part of a folder's name."""
    for letter, name in {"α": "alpha", "μ": "mu", "σ": "sigma"}.items():
        label = label.replace(letter, name)
    return re.sub(r"[^A-Za-z0-9.=]+", "-", label).strip("-").lower()


def _unusual(config: Config, key: str) -> list[str]:
    """The row's parameters that are not at their defaults, nor in its label."""
    row, values = row_of(config, key), getattr_dotted(config, key).parameters
    common = {one.name for one in REGISTRIES[row.kind].common}
    return [
        f"{name.replace('_', ' ')} {value:g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in values.items()
        if value != row.defaults.get(name, ...)
        and name not in common
        and f"{{{name}}}" not in row.label
    ]


def _label(config: Config, key: str) -> str:
    row = row_of(config, key)
    return row.described(row.portable(getattr_dotted(config, key)))
