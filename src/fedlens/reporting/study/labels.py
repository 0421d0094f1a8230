"""What methods are called in tables, figures and prose, from the labels that runs recorded.

A row of the registry is named by its run's record, so a report needs no plugin; the registry, where
it knows the row, gives the order of rows and the parameters that need no mention.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fedlens.config.schema import AlgorithmConfig, Config
from fedlens.registry import (
    RESERVED,
    Registry,
    aggregator,
    mask_rule,
    partitioner,
    server_optimizer,
)
from fedlens.reporting.study.runs import Method
from fedlens.runtime.units import counted as counted

NONE = "–"  # stands for a value that does not exist
DENSE = "dense"
CENTRAL = "central"


def federated(method: Method) -> bool:
    return method.get("federated.clients") is not None


# --- rows of the registry ------------------------------------------------------------------------


def row_order(registry: Registry, name: str) -> tuple[int, str]:
    """The registry's order; rows that it does not know come last, alphabetically."""
    names = registry.names
    return (names.index(name), "") if name in names else (len(names), name)


def changed(settings: Mapping[str, Any], registry: Registry) -> dict[str, Any]:
    """The parameters of a row that are not at their defaults; all of them for an unknown row."""
    name = settings["name"]
    defaults = registry[name].defaults if name in registry else {}
    return {
        key: value
        for key, value in settings.items()
        if key not in RESERVED and (key not in defaults or defaults[key] != value)
    }


def _complete(label: str, settings: Mapping[str, Any], registry: Registry) -> str:
    """The label with the parameters that it leaves out, so that equal labels mean equal rows."""
    name = settings["name"]
    template = registry[name].label if name in registry else ""
    values = {key: _number(value) for key, value in changed(settings, registry).items()}
    missing = [
        f"{key.replace('_', ' ')} {value}"
        for key, value in values.items()
        if (f"{{{key}}}" not in template if template else value not in label)
    ]
    return ", ".join([label, *missing])


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# --- partitions ----------------------------------------------------------------------------------


def partition(method: Method) -> str:
    """'IID', 'Nc=5', …; 'central' for central training."""
    if not federated(method):
        return CENTRAL
    return _complete(method.labels["partition"], method.config["partition"], partitioner)


def evenly_split(method: Method) -> bool:
    """Whether clients hold alike data: the partition is the one that configs have by default."""
    return federated(method) and bool(method.config["partition"]["name"] == Config().partition)


def skew(method: Method) -> float:
    """Mean distance of a client's labels from all labels, as measured when the data were split."""
    record = method.runs[0].partition if federated(method) else None
    return 0.0 if record is None else float(record["statistics"]["summary"]["emd"]["mean"])


def partition_order(method: Method) -> tuple[bool, float, tuple[int, str], str]:
    """Central training first, then partitions from the most even to the most skewed."""
    row = row_order(partitioner, method.config["partition"]["name"])
    return federated(method), round(skew(method), 6), row, partition(method)


# --- masks ---------------------------------------------------------------------------------------


def sparse(method: Method) -> bool:
    return method.get("sparse.density") is not None


def dense_or_sparse(method: Method) -> str:
    return "sparse" if sparse(method) else DENSE


def calibrates(method: Method) -> bool:
    """Whether its mask needs examples; a rule that the registry does not know may need them."""
    name = method.get("sparse.rule.name")
    known = mask_rule[name].traits if name in mask_rule else {}
    return sparse(method) and bool(known.get("sensitivity", True))


def rule(method: Method) -> str:
    if not sparse(method):
        return DENSE
    return _complete(method.labels["mask_rule"], method.config["sparse"]["rule"], mask_rule)


def rule_order(method: Method) -> tuple[bool, tuple[int, str], str]:
    return sparse(method), row_order(mask_rule, method.get("sparse.rule.name")), rule(method)


def density(method: Method) -> str:
    value = method.get("sparse.density")
    return DENSE if value is None else f"density {value:g}"


def mask(method: Method) -> str:
    """A mask by what it depends on: calibration rounds and clients only if it is calibrated."""
    parts = [rule(method), density(method)]
    if calibrates(method):
        parts.append(counted(int(method.get("sparse.rounds")), "round"))
        if method.get("sparse.source") == "clients":
            parts.append(partition(method))
    return ", ".join(parts)


# --- algorithms ----------------------------------------------------------------------------------


def averages(method: Method) -> bool:
    """Whether it is FedAvg, at any server learning rate: all choices are those by default."""
    defaults = asdict(AlgorithmConfig())
    return federated(method) and all(
        (value["name"] if isinstance(value, Mapping) else value) == defaults[key]
        for key, value in method.config["algorithm"].items()
    )


def is_fedavg(method: Method) -> bool:
    return averages(method) and not changed(method.config["algorithm"]["server"], server_optimizer)


def algorithm(method: Method) -> str:
    """'FedAvg', 'TIES, cyclic client sampling', 'FedAvg, server learning rate 2', …"""
    return method.labels["algorithm"]


def algorithm_order(method: Method) -> tuple[bool, tuple[int, str], tuple[int, str], str]:
    chosen = method.config["algorithm"]
    return (
        not is_fedavg(method),
        row_order(aggregator, chosen["aggregator"]["name"]),
        row_order(server_optimizer, chosen["server"]["name"]),
        algorithm(method),
    )


# --- training ------------------------------------------------------------------------------------


def trains(method: Method) -> bool:
    """Whether anything is trained: a fitted head on a frozen backbone is not."""
    return any("train" in record for run in method.runs for record in run.metrics)


def trained(method: Method) -> str:
    """'full fine-tuning, ridge head frozen', 'ridge head, no fine-tuning', …"""
    head = method.labels["head"]
    if not trains(method):
        return f"{head}, no fine-tuning"
    if method.get("train.trainable.name") == "head":
        return f"{head} trained, backbone frozen"
    how = "frozen" if method.get("head.freeze") else "trained jointly"
    return f"{method.labels['trainable']}, {head} {how}"


def part(method: Method) -> str:
    """'LoRA, rank 8 (198 kB)': what of the backbone is trained, and one client's update."""
    name = f"{rule(method)}, {density(method)}" if sparse(method) else method.labels["trainable"]
    size = update_bytes(method)
    return name if size is None else f"{name} ({size / 1000:,.0f} kB)"


def part_order(method: Method) -> tuple[float, str]:
    return -(update_bytes(method) or 0.0), part(method)


def update_bytes(method: Method) -> float | None:
    """The bytes that one client sends in a round."""
    for record in method.runs[0].metrics:
        answered = len(record.get("participants", ())) - len(record.get("dropped", ()))
        if answered and "bytes_up" in record:
            return float(record["bytes_up"]) / answered
    return None


def schedule(method: Method) -> str:
    settings = method.config["train"]["schedule"]
    warmup = f", warm-up {settings['warmup']:g}" if settings["warmup"] else ""
    return f"{settings['name']}{warmup}"


def described(method: Method, *, without: tuple[str, ...] = ()) -> str:
    """A method in one line; `without` leaves out what a table varies."""
    parts: dict[str, str] = {"trained": trained(method)}
    if sparse(method):
        parts |= {"density": density(method), "rule": rule(method)}
    if federated(method):
        parts |= {"algorithm": algorithm(method), "partition": partition(method)}
        if trains(method):
            parts["steps"] = f"J={method.get('federated.local_steps')}"
    else:
        parts["partition"] = CENTRAL
    return ", ".join(text for name, text in parts.items() if name not in without)


def spent(method: Method) -> str:
    """'4 rounds × 5 clients × 4 steps of batch 32', or '2 epochs, 1126 steps of batch 32'."""
    records = [record for record in method.runs[0].metrics if "train" in record]
    batch = f"batch {method.get('train.batch_size')}"
    if not federated(method):
        steps = sum(record.get("steps", 0) for record in records)
        text = f", {steps} steps" if steps else ""
        return f"{counted(len(records), 'epoch')}{text} of {batch}"
    cohort = max(len(record["participants"]) for record in records)
    each = counted(int(method.get("federated.local_steps")), "step")
    return f"{counted(len(records), 'round')} × {counted(cohort, 'client')} × {each} of {batch}"


def percent(metrics: Mapping[str, Any] | None) -> str:
    """Top-1 accuracy as '54.69%'."""
    return f"{metrics['top1']:.2%}" if metrics else NONE


def share(value: float | None) -> str:
    return NONE if value is None else f"{value:.2%}"
