"""Which methods may stand in one table: those that agree in all but what the table varies.

Learning rate and weight decay are free, since every method needs its own: where a cell has several
candidates, the one with the most seeds, then the best mean validation accuracy, stands for it.
Differences are corrected for all that a table asks.
"""

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fedlens.reporting.study import labels
from fedlens.reporting.study.content import Cell, Contrast, Grid
from fedlens.reporting.study.runs import Method, identity
from fedlens.reporting.study.statistics import difference, holm

Place = tuple[str, str]  # row, column

TUNED = ("train.lr", "train.weight_decay")
INCIDENTAL = (  # names, what is looked at on the way, and the budget, which is compared as such
    "experiment", "evaluate.every", "evaluate.batch_size", "evaluate.test", "evaluate.test_curve",
    "federated.keep_updates", "federated.rounds", "federated.local_step_budget",
)  # fmt: skip
RELEVANT = {"classes": "classes_per_client", "dirichlet": "alpha", "quantity": "sigma"}
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

PARTITION = Axis("partition", ("partition",), labels.partition, labels.evenness)
STEPS = Axis(
    "local steps", ("federated.local_steps",),
    lambda m: f"J={m.get('federated.local_steps')}",
    lambda m: m.get("federated.local_steps"),
)  # fmt: skip
RULE = Axis(
    "trained weights", ("sparse.rule", *(f"sparse.{key}" for key in CALIBRATION)),
    labels.rule, lambda m: RULES.index(labels.rule(m)),
)  # fmt: skip
MASK = Axis("model", ("sparse",), labels.kind, labels.kind)
DENSITY = Axis(
    "trained share",
    ("sparse.density",),
    labels.density,
    lambda m: -(m.get("sparse.density") or 2.0),
)
CALIBRATED = Axis(
    "calibration", ("sparse.rounds",),
    lambda m: _rounds(m.get("sparse.rounds")),
    lambda m: m.get("sparse.rounds"),
)  # fmt: skip
SCHEDULE = Axis("schedule", ("train.schedule",), labels.schedule, labels.schedule)
ALGORITHM = Axis(
    "algorithm", ("algorithm",), labels.algorithm,
    lambda m: (labels.algorithm(m) != "FedAvg", labels.algorithm(m)),
)  # fmt: skip
TRAINED = Axis(
    "trained", ("train.what", "head"), labels.trained,
    lambda m: (labels.trains(m), labels.trained(m)),
)  # fmt: skip
UNDER = replace(TRAINED, keys=("head.name", "head.freeze"))


def family(method: Method, *axes: Axis) -> str:
    """Equal for methods that differ along these axes alone, and in what is tuned."""
    varied = [key for axis in axes for key in axis.keys]
    same = identity(method.config, [*TUNED, *INCIDENTAL, *_idle(method), *varied])
    return json.dumps([same, _budget(method)])


def _idle(method: Method) -> list[str]:
    """Keys that say nothing of this method."""
    found = [] if labels.calibrates(method) else [f"sparse.{key}" for key in CALIBRATION]
    if not labels.sparse(method):
        found.append("sparse")
    if not labels.federated(method):
        return [*found, "federated", "partition", "algorithm"]
    kept = RELEVANT.get(method.get("partition.name"))
    return [*found, "train.epochs", *(f"partition.{k}" for k in RELEVANT.values() if k != kept)]


def grouped(methods: Iterable[Method], key: Callable[[Method], Hashable]) -> list[list[Method]]:
    """Methods with the same key together, in the order in which keys are met."""
    found: dict[Hashable, list[Method]] = {}
    for method in methods:
        found.setdefault(key(method), []).append(method)
    return list(found.values())


def chosen(candidates: Sequence[Method]) -> Method:
    """By the number of seeds, then on validation; never by test accuracy."""
    return max(candidates, key=lambda m: (len(m.runs), m.validation or 0.0, identity(m.config)))


def usual(
    methods: Iterable[Method],
    key: Callable[[Method], Hashable],
    place: Callable[[Method], Hashable],
) -> list[Method]:
    """Of groups with the same key the one in most places, then in most runs, then the best.

    So what differs in more than a table says stays out of it; 'best' is on validation.
    """

    def weight(alike: list[Method]) -> tuple[int, int, float, str]:
        runs = sum(len(method.runs) for method in alike)
        best = max(method.validation or 0.0 for method in alike)
        return len(set(map(place, alike))), runs, best, min(identity(m.config) for m in alike)

    return max(grouped(methods, key), key=weight, default=[])


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
        method=labels.described(method),
        lr=method.get("train.lr") if labels.trains(method) else None,
        candidates=len(candidates),
        megabytes=sum(known) / len(known) if known else None,
        runs=[run.name for run in method.runs],
        untrained=sum(labels.trains(method) and run.chosen_unit == 0 for run in method.runs),
    )


@dataclass(frozen=True)
class Comparison:
    """A table, and by row and column the methods that each cell was chosen among."""

    grid: Grid
    candidates: Mapping[Place, Sequence[Method]]

    @cached_property
    def methods(self) -> dict[Place, Method]:
        return {place: chosen(found) for place, found in self.candidates.items()}


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
    column_references: Sequence[str] = (),
    everywhere: Sequence[Method] = (),
    everywhere_label: str = "",
) -> Comparison:
    """Lays methods out in a table and contrasts every row with each of the reference rows.

    And every column with each of the reference columns, within a row.
    `everywhere` are candidates for one more row that is the same under every column's partition.
    """
    down = list(dict.fromkeys(rows.label(m) for m in sorted(methods, key=rows.order)))
    across = list(dict.fromkeys(columns.label(m) for m in sorted(methods, key=columns.order)))
    candidates: dict[Place, list[Method]] = {}
    for method in methods:
        candidates.setdefault((rows.label(method), columns.label(method)), []).append(method)
    if everywhere:
        down.insert(0, everywhere_label)
        for label in across:
            here = [method for method in everywhere if columns.label(method) == label]
            candidates[everywhere_label, label] = here or list(everywhere)
    candidates = {place: _apart(found) for place, found in candidates.items()}
    cells = [
        [cell(found) if (found := candidates.get((r, c))) else None for c in across] for r in down
    ]
    grid = Grid(name, chapter, title, note, rows.name, down, across, cells)
    places = [(r, c) for r in down for c in across if (r, c) in candidates]
    table = Comparison(grid, {place: candidates[place] for place in places})
    turned = {(column, row): method for (row, column), method in table.methods.items()}
    between_rows = _contrasts(table.methods, down, across, references)
    between_columns = _contrasts(turned, across, down, column_references)
    contrasts = [*between_rows, *(replace(c, turned=True) for c in between_columns)]
    return replace(table, grid=replace(grid, contrasts=contrasts))


def _apart(methods: Sequence[Method]) -> list[Method]:
    """Without second copies, which differ in names and in what was kept: no choice among those."""
    alike = grouped(methods, lambda m: identity(m.config, INCIDENTAL))
    return [max(copies, key=lambda m: (len(m.runs), identity(m.config))) for copies in alike]


def _contrasts(
    methods: Mapping[Place, Method],
    rows: Sequence[str],
    columns: Sequence[str],
    references: Sequence[str],
) -> list[Contrast]:
    """Every row minus each reference, column by column; of two references only the second's.

    They answer one question, and p is corrected for how many they are.
    """
    found = {
        (row, against, column): delta
        for number, against in enumerate(references)
        for column in columns
        for row in rows
        if row != against and row not in references[:number]
        and (method := methods.get((row, column))) and (base := methods.get((against, column)))
        and (delta := difference(method.by_seed(), base.by_seed()))
    }  # fmt: skip
    corrected = holm({asked: delta.p for asked, delta in found.items() if delta.p is not None})
    return [
        Contrast(
            *asked,
            mean=delta.estimate.mean,
            half=delta.estimate.half,
            count=delta.estimate.count,
            p=delta.p,
            corrected=corrected.get(asked),
        )
        for asked, delta in found.items()
    ]


def calibration(method: Method) -> str:
    """How the mask was found, but for its rule and density; '' where it was not calibrated."""
    if not labels.calibrates(method):
        return ""
    return json.dumps({key: method.get(f"sparse.{key}") for key in CALIBRATION})


def mask(method: Method) -> str:
    """All that decides which weights are trained."""
    told = method.config["sparse"]
    apart = {key: value for key, value in told.items() if key not in CALIBRATION}
    return json.dumps([apart, calibration(method)], sort_keys=True)


def _budget(method: Method) -> object:
    """As it was told: local steps, or epochs (which stand in `train` already)."""
    told = method.config["federated"]
    if told["clients"] is None or not labels.trains(method):
        return None
    if told["rounds"] == "auto":
        return told["local_step_budget"]
    return told["rounds"] * told["local_steps"]


def _rounds(count: int) -> str:
    return f"{count} round{'' if count == 1 else 's'}"
