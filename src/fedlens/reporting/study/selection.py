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
    usual,
)
from fedlens.reporting.study.runs import Method

Methods = Sequence[Method]


def fedavg(methods: Iterable[Method]) -> list[Method]:
    return [
        m for m in methods
        if labels.federated(m) and labels.trains(m) and labels.algorithm(m) == "FedAvg"
    ]  # fmt: skip


def values(methods: Iterable[Method], axis: Axis) -> int:
    return len({axis.label(method) for method in methods})


def contested(methods: Methods, axis: Axis) -> list[Method]:
    """Without partitions that hold one value along `axis`: they would be columns of one number.

    All of them where no partition holds two.
    """
    alike = grouped(methods, labels.partition)
    return [m for here in alike if values(here, axis) > 1 for m in here] or list(methods)


def one_way(methods: Methods, *axes: Axis) -> list[Method]:
    """Of federated and of central methods the usual family each, along these axes."""
    sides = ([m for m in methods if labels.federated(m) is where] for where in (False, True))
    return [
        m for side in sides
        for m in usual(side, lambda m: family(m, *axes), lambda m: tuple(a.label(m) for a in axes))
    ]  # fmt: skip


def dense_like(like: Method, methods: Methods) -> list[Method]:
    """Methods that train every weight and agree with `like` in all else."""
    same = family(like, MASK, PARTITION)
    return [
        m for m in fedavg(methods)
        if not labels.sparse(m) and family(m, MASK, PARTITION) == same
    ]  # fmt: skip


def most_skewed(methods: Methods) -> str:
    """The partition with both a dense and a sparse model if there is one, else any but IID."""
    skewed = [m for m in methods if labels.partition(m) not in ("central", "IID")]
    kinds: dict[str, set[bool]] = {}
    for method in skewed:
        kinds.setdefault(labels.partition(method), set()).add(labels.sparse(method))
    if not skewed:
        return ""
    return labels.partition(
        max(skewed, key=lambda m: (len(kinds[labels.partition(m)]), labels.evenness(m)))
    )


def calibrated_alike(methods: Methods) -> list[Method]:
    """Of rules that look at sensitivity, those calibrated as most of them were."""
    counts = Counter(told for m in methods if (told := calibration(m)))
    usual = max(counts, key=lambda told: (counts[told], told)) if counts else ""
    return [m for m in methods if calibration(m) in ("", usual)]


def heads_alone(methods: Methods, like: Method) -> list[Method]:
    """The closed-form head that `like` begins from, federated, with nothing trained."""
    if like.get("head.name") != "ridge":
        return []
    return [
        m for m in methods
        if labels.federated(m) and not labels.trains(m) and m.get("head.name") == "ridge"
        and m.get("head.ridge_lambda") == like.get("head.ridge_lambda")
    ]  # fmt: skip
