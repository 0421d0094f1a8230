"""Which methods may stand in one table: those that agree in all but what the table varies.

Learning rate and weight decay are free, since every method needs its own: where a cell has several
candidates, the one with the most seeds, then the best mean validation accuracy, stands for it.
"""

import json
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fedlens.reporting import words
from fedlens.reporting.content import Cell, Contrast, Grid
from fedlens.reporting.statistics import difference, holm
from fedlens.reporting.study import Method, identity

TUNED = ("train.lr", "train.weight_decay")
INCIDENTAL = (  # names, and what is looked at on the way: they decide nothing that is compared
    "experiment", "evaluate", "federated.keep_updates", "federated.rounds",
    "federated.local_step_budget",
)  # fmt: skip
CALIBRATION = (
    "method", "rounds", "soft", "labels", "target", "source", "voting", "clients", "examples",
    "passes", "micro_batch",
)  # fmt: skip


@dataclass(frozen=True)
class Axis:
    """What a table's rows or columns are: the keys that vary, how to say a value, their order."""

    name: str
    keys: tuple[str, ...]
    label: Callable[[Method], str]
    order: Callable[[Method], Any]


RULES = (
    "dense", "least sensitive", "most sensitive", "lowest magnitude", "highest magnitude", "random",
)  # fmt: skip

PARTITION = Axis("partition", ("partition",), words.partition, words.evenness)
STEPS = Axis(
    "local steps", ("federated.local_steps",),
    lambda m: f"J={m.get('federated.local_steps')}",
    lambda m: m.get("federated.local_steps"),
)  # fmt: skip
RULE = Axis("trained weights", ("sparse",), words.rule, lambda m: RULES.index(words.rule(m)))
DENSITY = Axis(
    "trained share", ("sparse.density",), words.density, lambda m: -(m.get("sparse.density") or 2.0)
)
CALIBRATED = Axis(
    "calibration", ("sparse.rounds",),
    lambda m: _rounds(m.get("sparse.rounds")),
    lambda m: m.get("sparse.rounds"),
)  # fmt: skip
SCHEDULE = Axis("schedule", ("train.schedule",), words.schedule, words.schedule)
ALGORITHM = Axis(
    "algorithm", ("algorithm",), words.algorithm,
    lambda m: (words.algorithm(m) != "FedAvg", words.algorithm(m)),
)  # fmt: skip
TRAINED = Axis(
    "trained",
    ("train.what", "head", "federated.local_steps", "federated.clients", "federated.participation"),
    words.trained,
    lambda m: (words.trains(m), words.trained(m)),
)


def family(method: Method, *axes: Axis) -> str:
    """Equal for methods that differ along these axes alone, and in what is tuned."""
    told = method.config
    idle = [f"sparse.{key}" for key in CALIBRATION] if not _calibrates(method) else []
    if not words.sparse(method):
        idle.append("sparse")
    if not words.federated(method):
        idle += ["federated", "partition", "algorithm"]
    else:
        idle.append("train.epochs")
        relevant = {"classes": "classes_per_client", "dirichlet": "alpha", "quantity": "sigma"}
        kept = relevant.get(told["partition"]["name"])
        idle += [f"partition.{key}" for key in relevant.values() if key != kept]
    varied = [key for axis in axes for key in axis.keys]
    same = json.loads(identity(told, [*TUNED, *INCIDENTAL, *idle, *varied]))
    return json.dumps([same, _budget(method)], sort_keys=True)


def grouped(methods: Iterable[Method], key: Callable[[Method], Hashable]) -> list[list[Method]]:
    """Methods with the same key together, in the order in which keys are met."""
    found: dict[Hashable, list[Method]] = {}
    for method in methods:
        found.setdefault(key(method), []).append(method)
    return list(found.values())


def chosen(candidates: Sequence[Method]) -> Method:
    """By the number of seeds, then on validation; never by test accuracy."""
    return max(candidates, key=lambda m: (len(m.runs), m.validation or 0.0, identity(m.config)))


def cell(candidates: Sequence[Method]) -> Cell:
    method = chosen(candidates)
    sent = [run.megabytes for run in method.runs]
    known = [value for value in sent if value is not None]
    return Cell(
        mean=method.test.mean,
        deviation=method.test.deviation,
        half=method.test.half,
        validation=method.validation,
        seeds=list(method.seeds),
        method=words.described(method),
        lr=method.get("train.lr") if words.trains(method) else None,
        candidates=len(candidates),
        megabytes=sum(known) / len(known) if known else None,
        runs=[run.name for run in method.runs],
    )


@dataclass(frozen=True)
class Comparison:
    """A table and the methods in its cells."""

    grid: Grid
    methods: dict[tuple[str, str], Method]


def compare(
    methods: Sequence[Method],
    rows: Axis,
    columns: Axis,
    *,
    name: str,
    chapter: str,
    title: str,
    note: str,
    references: Sequence[str] = (),
    everywhere: Sequence[Method] = (),
    everywhere_label: str = "",
) -> Comparison:
    """Lays methods out in a table and contrasts every row with each of the reference rows.

    `everywhere` are candidates for one more row that is the same under every column's partition.
    """
    down = list(dict.fromkeys(rows.label(m) for m in sorted(methods, key=rows.order)))
    across = list(dict.fromkeys(columns.label(m) for m in sorted(methods, key=columns.order)))
    candidates: dict[tuple[str, str], list[Method]] = {}
    for method in methods:
        candidates.setdefault((rows.label(method), columns.label(method)), []).append(method)
    if everywhere:
        down.insert(0, everywhere_label)
        for label in across:
            here = [method for method in everywhere if columns.label(method) == label]
            candidates[everywhere_label, label] = here or list(everywhere)
    cells = [
        [cell(found) if (found := candidates.get((r, c))) else None for c in across] for r in down
    ]
    picked = {place: chosen(found) for place, found in candidates.items()}
    contrasts = [
        contrast
        for against in references
        for label in across
        for contrast in _contrasts(picked, down, against, label)
    ]
    grid = Grid(name, chapter, title, note, rows.name, down, across, cells, contrasts)
    return Comparison(grid, picked)


def _contrasts(
    picked: dict[tuple[str, str], Method], rows: Sequence[str], against: str, column: str
) -> list[Contrast]:
    """Every row of a column minus `against`, corrected for how many they are."""
    base = picked.get((against, column))
    if base is None:
        return []
    found = {
        row: delta
        for row in rows
        if row != against and (method := picked.get((row, column)))
        and (delta := difference(method.by_seed(), base.by_seed()))
    }  # fmt: skip
    corrected = holm({row: delta.p for row, delta in found.items() if delta.p is not None})
    return [
        Contrast(
            row=row,
            against=against,
            column=column,
            mean=delta.estimate.mean,
            half=delta.estimate.half,
            count=delta.estimate.count,
            p=delta.p,
            corrected=corrected.get(row),
        )
        for row, delta in found.items()
    ]


def calibration(method: Method) -> str:
    """How the mask was found, but for its rule and density; '' where it was not calibrated."""
    if not _calibrates(method):
        return ""
    return json.dumps({key: method.get(f"sparse.{key}") for key in CALIBRATION})


def _calibrates(method: Method) -> bool:
    return words.sparse(method) and str(method.get("sparse.rule")).endswith("sensitive")


def _budget(method: Method) -> object:
    """As it was told: local steps, or epochs (which stand in `train` already)."""
    told = method.config["federated"]
    if told["clients"] is None or not words.trains(method):
        return None
    if told["rounds"] == "auto":
        return told["local_step_budget"]
    return told["rounds"] * told["local_steps"]


def _rounds(count: int) -> str:
    return f"{count} round{'' if count == 1 else 's'}"
