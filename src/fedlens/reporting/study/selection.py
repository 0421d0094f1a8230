"""Which of a study's methods a question is about."""

from collections import Counter
from collections.abc import Iterable, Sequence

from fedlens.reporting.study import labels
from fedlens.reporting.study.comparison import (
    MASK,
    PARTITION,
    Axis,
    calibration,
    family,
    grouped,
    most_common_group,
)
from fedlens.reporting.study.runs import Method

Methods = Sequence[Method]


def fedavg(methods: Iterable[Method]) -> list[Method]:
    return [m for m in methods if labels.trains(m) and labels.is_fedavg(m)]


def values(methods: Iterable[Method], axis: Axis) -> int:
    """How many different values the methods have along an axis."""
    return len({axis.label(method) for method in methods})


def without_single_values(methods: Methods, axis: Axis) -> list[Method]:
    """Without partitions that have one value along `axis`: their columns would compare nothing.

    All methods if no partition has two values.
    """
    alike = grouped(methods, labels.partition)
    return [m for here in alike if values(here, axis) > 1 for m in here] or list(methods)


def same_training(methods: Methods, *axes: Axis) -> list[Method]:
    """Of federated and of central methods the most common family each, along these axes."""
    sides = ([m for m in methods if labels.federated(m) is where] for where in (False, True))
    return [
        m for side in sides
        for m in most_common_group(
            side, lambda m: family(m, *axes), lambda m: tuple(a.label(m) for a in axes)
        )
    ]  # fmt: skip


def dense_like(like: Method, methods: Methods) -> list[Method]:
    """Methods that train every weight and otherwise agree with `like`."""
    same = family(like, MASK, PARTITION)
    return [
        m for m in fedavg(methods)
        if not labels.sparse(m) and family(m, MASK, PARTITION) == same
    ]  # fmt: skip


def most_skewed(methods: Methods) -> str:
    """The most skewed partition, preferably one with both a dense and a sparse model."""
    skewed = [m for m in methods if labels.federated(m) and not labels.evenly_split(m)]
    kinds: dict[str, set[bool]] = {}
    for method in skewed:
        kinds.setdefault(labels.partition(method), set()).add(labels.sparse(method))
    if not skewed:
        return ""
    return labels.partition(
        max(skewed, key=lambda m: (len(kinds[labels.partition(m)]), labels.partition_order(m)))
    )


def calibrated_alike(methods: Methods) -> list[Method]:
    """Methods without calibration, and of the others those calibrated as most of them were."""
    counts = Counter(settings for m in methods if (settings := calibration(m)))
    usual = max(counts, key=lambda settings: (counts[settings], settings)) if counts else ""
    return [m for m in methods if calibration(m) in ("", usual)]


def head_without_training(methods: Methods, like: Method) -> list[Method]:
    """The fitted head that `like` starts from, federated, with nothing trained."""
    return [
        m for m in methods
        if labels.federated(m) and not labels.trains(m) and _fit(m) == _fit(like)
    ]  # fmt: skip


def _fit(method: Method) -> dict[str, object]:
    """The settings that decide how its head is fitted."""
    without = {"freeze", "dropout"}
    return {key: value for key, value in method.config["head"].items() if key not in without}
