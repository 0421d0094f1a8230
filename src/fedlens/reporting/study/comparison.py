"""Tables of methods that agree in everything but what the table varies.

Learning rate and weight decay are free, because every method needs its own: a cell with several
candidates shows the one with the most seeds, then with the best mean validation accuracy.
"""

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fedlens.registry import head
from fedlens.reporting.study import labels
from fedlens.reporting.study.content import Cell, Contrast, Grid
from fedlens.reporting.study.runs import Method, identity
from fedlens.reporting.study.statistics import difference, holm

Place = tuple[str, str]  # row, column

TUNED = ("train.lr", "train.optimizer.weight_decay")
IGNORED_KEYS = (  # names, what is measured during training, and the budget, compared by its value
    "experiment", "evaluate.every", "evaluate.batch_size", "evaluate.test", "evaluate.test_curve",
    "federated.keep_updates", "federated.diagnostics", "federated.rounds",
    "federated.local_step_budget",
)  # fmt: skip
CALIBRATION = (
    "method", "rounds", "shrink_factor", "labels", "target", "source", "voting", "clients",
    "examples", "passes", "micro_batch",
)  # fmt: skip


@dataclass(frozen=True)
class Axis:
    """What a table's rows or columns are: the config keys that vary, a value's label, the order."""

    name: str
    keys: tuple[str, ...]
    label: Callable[[Method], str]
    order: Callable[[Method], Any]


PARTITION = Axis("partition", ("partition",), labels.partition, labels.partition_order)
STEPS = Axis(
    "local steps", ("federated.local_steps",),
    lambda m: f"J={m.get('federated.local_steps')}",
    lambda m: m.get("federated.local_steps"),
)  # fmt: skip
RULE = Axis(
    "trained weights", ("sparse.rule", *(f"sparse.{key}" for key in CALIBRATION)),
    labels.rule, labels.rule_order,
)  # fmt: skip
MASK = Axis("model", ("sparse",), labels.dense_or_sparse, labels.dense_or_sparse)
DENSITY = Axis(
    "density", ("sparse.density",), labels.density, lambda m: -(m.get("sparse.density") or 2.0)
)
CALIBRATION_ROUNDS = Axis(
    "calibration", ("sparse.rounds",),
    lambda m: labels.counted(m.get("sparse.rounds"), "round"),
    lambda m: m.get("sparse.rounds"),
)  # fmt: skip
SCHEDULE = Axis("schedule", ("train.schedule",), labels.schedule, labels.schedule)
ALGORITHM = Axis("algorithm", ("algorithm",), labels.algorithm, labels.algorithm_order)
TRAINED = Axis(
    "trained", ("train.trainable", "head"), labels.trained,
    lambda m: (labels.trains(m), labels.trained(m)),
)  # fmt: skip
PART = Axis("trained part", ("train.trainable", "sparse"), labels.part, labels.part_order)
READING = tuple(  # what of the backbone it reads
    f"head.{key}" for key in ("layers", "tokens", "random_features", "train_layers")
)
HEAD_TYPE = replace(TRAINED, keys=("head.name", "head.freeze", *READING))


def family(method: Method, *axes: Axis) -> str:
    """Equal for methods that differ only along these axes and in what is tuned."""
    varied = [key for axis in axes for key in axis.keys]
    unused = unused_keys(method, heads_vary="head.name" in varied)
    same = identity(method.config, [*TUNED, *IGNORED_KEYS, *unused, *varied])
    return json.dumps([same, _budget(method)])


def unused_keys(method: Method, *, heads_vary: bool = False) -> list[str]:
    """Keys that have no effect on this method.

    If `heads_vary`, also parameters of its head at their defaults: other heads lack them.
    """
    keys = [] if labels.calibrates(method) else [f"sparse.{key}" for key in CALIBRATION]
    if not labels.sparse(method):
        keys.append("sparse")
    if heads_vary:
        settings = method.config["head"]
        common = {one.name for one in head.common}
        set_ones = labels.changed(settings, head) if settings["name"] in head else {}
        keys += [f"head.{key}" for key in settings if key not in {"name", *common, *set_ones}]
    if not labels.federated(method):
        return [*keys, "federated", "partition", "algorithm"]
    return [*keys, "train.epochs"]


def grouped(methods: Iterable[Method], key: Callable[[Method], Hashable]) -> list[list[Method]]:
    """Methods with the same key together, in the order in which keys first occur."""
    groups: dict[Hashable, list[Method]] = {}
    for method in methods:
        groups.setdefault(key(method), []).append(method)
    return list(groups.values())


def chosen(candidates: Sequence[Method]) -> Method:
    """By the number of seeds, then by validation accuracy; never by test accuracy."""
    return max(candidates, key=lambda m: (len(m.runs), m.validation or 0.0, identity(m.config)))


def most_common_group(
    methods: Iterable[Method],
    key: Callable[[Method], Hashable],
    place: Callable[[Method], Hashable],
) -> list[Method]:
    """Of groups with the same key, the one in most places, then with most runs, then the best.

    It keeps methods out of a table that differ in more than the table says; the best is that with
    the highest validation accuracy.
    """

    def rank(alike: list[Method]) -> tuple[int, int, float, str]:
        runs = sum(len(method.runs) for method in alike)
        best = max(method.validation or 0.0 for method in alike)
        return len(set(map(place, alike))), runs, best, min(identity(m.config) for m in alike)

    return max(grouped(methods, key), key=rank, default=[])


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
        return {place: chosen(methods) for place, methods in self.candidates.items()}


def compare(
    methods: Sequence[Method],
    rows: Axis,
    columns: Axis,
    *,
    title: str = "",
    note: str = "",
    references: Sequence[str] = (),
    column_references: Sequence[str] = (),
    levels: Sequence[str] = (),
    everywhere: Sequence[Method] = (),
    everywhere_label: str = "",
) -> Comparison:
    """A table of methods, with contrasts of every row against each of the reference rows.

    Columns are contrasted with each of the reference columns, within a row. `everywhere` are
    candidates for one more row, which is the same under every column's partition. Without a title
    the table has the question's.
    """
    down = list(dict.fromkeys(rows.label(m) for m in sorted(methods, key=rows.order)))
    across = list(dict.fromkeys(columns.label(m) for m in sorted(methods, key=columns.order)))
    candidates: dict[Place, list[Method]] = {}
    for method in methods:
        candidates.setdefault((rows.label(method), columns.label(method)), []).append(method)
    if everywhere:
        down.insert(0, everywhere_label)
        for label in across:
            own = [method for method in everywhere if columns.label(method) == label]
            candidates[everywhere_label, label] = own or list(everywhere)
    candidates = {place: _without_duplicates(found) for place, found in candidates.items()}
    cells = [
        [cell(candidates[r, c]) if (r, c) in candidates else None for c in across] for r in down
    ]
    grid = Grid(
        name="", question="", title=title, note=note, corner=rows.name, rows=down, columns=across,
        cells=cells, levels=[row for row in down if row in levels],
    )  # fmt: skip
    places = [(r, c) for r in down for c in across if (r, c) in candidates]
    table = Comparison(grid, {place: candidates[place] for place in places})
    turned = {(column, row): method for (row, column), method in table.methods.items()}
    between_rows = _contrasts(table.methods, down, across, references)
    between_columns = _contrasts(turned, across, down, column_references)
    contrasts = [*between_rows, *(replace(c, turned=True) for c in between_columns)]
    return replace(table, grid=replace(grid, contrasts=contrasts))


def _without_duplicates(methods: Sequence[Method]) -> list[Method]:
    """One of each: copies differ only in names and in what was measured, so there is no choice."""
    alike = grouped(methods, lambda m: identity(m.config, IGNORED_KEYS))
    return [max(copies, key=lambda m: (len(m.runs), identity(m.config))) for copies in alike]


def _contrasts(
    methods: Mapping[Place, Method],
    rows: Sequence[str],
    columns: Sequence[str],
    references: Sequence[str],
) -> list[Contrast]:
    """Every row minus each reference, column by column; two references are contrasted once.

    p-values are corrected for their number.
    """
    differences = {
        (row, against, column): delta
        for number, against in enumerate(references)
        for column in columns
        for row in rows
        if row != against and row not in references[:number]
        and (method := methods.get((row, column))) and (base := methods.get((against, column)))
        and (delta := difference(method.by_seed(), base.by_seed()))
    }  # fmt: skip
    corrected = holm({key: delta.p for key, delta in differences.items() if delta.p is not None})
    return [
        Contrast(
            *key,
            mean=delta.estimate.mean,
            half=delta.estimate.half,
            count=delta.estimate.count,
            p=delta.p,
            corrected=corrected.get(key),
        )
        for key, delta in differences.items()
    ]


def calibration(method: Method) -> str:
    """How the mask was calibrated, whatever its rule and density; '' if it was not calibrated."""
    if not labels.calibrates(method):
        return ""
    return json.dumps({key: method.get(f"sparse.{key}") for key in CALIBRATION})


def mask(method: Method) -> str:
    """All settings that decide which weights are trained."""
    settings = method.config["sparse"]
    rule = {key: value for key, value in settings.items() if key not in CALIBRATION}
    return json.dumps([rule, calibration(method)], sort_keys=True)


def _budget(method: Method) -> object:
    """Local steps; None for central training, whose epochs are keys of `train` already."""
    settings = method.config["federated"]
    if settings["clients"] is None or not labels.trains(method):
        return None
    if settings["rounds"] == "auto":
        return settings["local_step_budget"]
    return settings["rounds"] * settings["local_steps"]
