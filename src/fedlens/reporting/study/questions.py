"""The questions of a study, as rows of the registry: each finds the methods that answer it.

A question is a function of a setting's methods that returns tables, none if there is nothing to
compare; its traits are the fields of `content.Question`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Annotated

from fedlens.errors import FedlensError, suggest
from fedlens.registry import Row, question
from fedlens.reporting.study import labels
from fedlens.reporting.study.comparison import (
    ALGORITHM,
    CALIBRATION_ROUNDS,
    DENSITY,
    HEAD_TYPE,
    MASK,
    PART,
    PARTITION,
    RULE,
    SCHEDULE,
    STEPS,
    TRAINED,
    Axis,
    Comparison,
    calibration,
    compare,
    family,
    grouped,
    mask,
    most_common_group,
)
from fedlens.reporting.study.content import About, Question
from fedlens.reporting.study.runs import Method
from fedlens.reporting.study.selection import (
    Methods,
    calibrated_alike,
    dense_like,
    fedavg,
    head_without_training,
    most_skewed,
    same_training,
    values,
    without_single_values,
)

ACCURACY = Axis("", (), lambda m: "accuracy", lambda m: 0)  # a single column
MODEL = Axis(
    "", (),
    lambda m: f"{m.labels['algorithm']}, {labels.partition(m)}" if labels.federated(m)
    else labels.CENTRAL,
    labels.partition_order,
)  # fmt: skip
EVENNESS = Axis(
    "", ("partition",), lambda m: str(labels.evenly_split(m)), labels.partition_order
)  # fmt: skip


def questions() -> list[Question]:
    """All questions in order, those added from outside the package included."""
    return sorted((_described(row) for row in question), key=lambda one: one.order)


def _described(row: Row) -> Question:
    traits = {one.name for one in fields(Question)} - {"name", "label"}
    for key in row.traits:
        if key not in traits:
            raise FedlensError(
                f"The question '{row.name}' has an unknown trait '{key}': "
                f"{suggest(key, sorted(traits))}"
            )
    return Question(row.name, row.label, **row.traits)


def comparisons(methods: Methods, about: About | None = None) -> list[Comparison]:
    """All tables of a setting, question by question; their names are unique."""
    options = {"noniid": (about or About()).noniid}
    counts: Counter[str] = Counter()
    named = []
    for one in questions():
        row = question[one.name]
        known = {parameter.name for parameter in row.parameters}
        for table in row.make(methods, **{k: v for k, v in options.items() if k in known}):
            counts[one.name] += 1
            number = counts[one.name]
            grid = replace(
                table.grid,
                name=one.name if number == 1 else f"{one.name}-{number}",
                question=one.name,
                title=table.grid.title or one.label,
            )
            named.append(replace(table, grid=grid))
    return named


@question(
    label="Central and federated training, dense and sparse",
    asks="How far is federated training from central training, dense and sparse?",
    order=0, suite="models", headline=True, panels="rows",
    panels_over_steps="rows", audit=("density", "tuning"),
)  # fmt: skip
def six_models(
    methods: Methods,
    *,
    noniid: Annotated[str, "label of the skewed partition; empty: the most skewed"] = "",
) -> list[Comparison]:
    """Central training, FedAvg on IID data and FedAvg on non-IID data, each dense and sparse.

    The federated models share their settings, so do the central ones, and all share one mask.
    """
    backbone = [
        m for m in methods
        if labels.trains(m) and m.get("train.trainable.name") != "head"
        and (not labels.federated(m) or labels.is_fedavg(m))
        and (not noniid or not labels.federated(m) or labels.evenly_split(m)
             or labels.partition(m) == noniid)
    ]  # fmt: skip
    alike = same_training(backbone, MASK, EVENNESS)
    skewed = noniid or most_skewed(alike)
    here = [
        m for m in alike
        if not labels.federated(m) or labels.evenly_split(m) or labels.partition(m) == skewed
    ]  # fmt: skip
    masked = most_common_group([m for m in here if labels.sparse(m)], mask, labels.partition)
    dense = [m for m in here if not labels.sparse(m)]
    if not here:
        return []
    return [
        compare(
            [*dense, *masked], MODEL, MASK,
            note="All federated models in this table use the same settings, all central models use "
                 "the same settings, and all sparse models use the same mask. If several settings "
                 "were run, the table shows the one that most of its cells have in common; ties "
                 f"are broken by validation accuracy. {_budgets([*dense, *masked])}",
        )
    ]  # fmt: skip


@question(
    label="Central baselines", asks="How accurate is central training?",
    order=1, suite="centralized", audit=(),
)  # fmt: skip
def central(methods: Methods) -> list[Comparison]:
    """All ways of central training, each with the best schedule, batch size and epochs."""
    here = [m for m in methods if not labels.federated(m)]
    if not here:
        return []
    training = Axis(
        "trained", (), _central_label, lambda m: (labels.trains(m), _central_label(m))
    )  # fmt: skip
    return [
        compare(
            here, training, ACCURACY,
            note="All training images in one place. Each row shows the method with the best "
                 "validation accuracy, at any schedule, batch size and number of epochs.",
        )
    ]  # fmt: skip


@question(
    label="Learning-rate schedules", asks="Which learning-rate schedule works best?",
    order=2, suite="schedulers",
)  # fmt: skip
def schedules(methods: Methods) -> list[Comparison]:
    """One training method under several schedules of the learning rate."""
    return by_partition([m for m in methods if labels.trains(m)], SCHEDULE)


@question(
    label="Heads on the frozen backbone", asks="How accurate is a head on the frozen backbone?",
    order=3, suite="centralized", audit=(),
)  # fmt: skip
def heads(methods: Methods) -> list[Comparison]:
    """Everything that keeps the backbone as it was pretrained."""
    here = [m for m in methods if m.get("train.trainable.name") == "head" or not labels.trains(m)]
    here = [m for m in here if not labels.federated(m) or labels.is_fedavg(m)]
    learned = same_training([m for m in here if labels.trains(m)], TRAINED, PARTITION)
    here = [*(m for m in here if not labels.trains(m)), *learned]
    if values(here, TRAINED) < 2:
        return []
    return [
        compare(
            here, TRAINED, PARTITION,
            note="The backbone stays as pretrained; a head in closed form needs no training step. "
                 f"{_budgets(learned)}",
        )
    ]  # fmt: skip


@question(
    label="Fine-tuning the backbone with different heads",
    asks="Is fine-tuning better than the head alone?",
    order=4, suite="paper",
)  # fmt: skip
def under_heads(methods: Methods) -> list[Comparison]:
    """The backbone fine-tuned with several types of head, beside the fitted head alone."""
    here = [
        m
        for m in fedavg(methods)
        if m.get("train.trainable.name") != "head" and not labels.sparse(m)
    ]
    return [
        _with_start(
            alike, alike, HEAD_TYPE, methods, references=(), varied=("partition", "trained")
        )
        for alike in grouped(here, lambda m: family(m, HEAD_TYPE, PARTITION))
        if values(alike, HEAD_TYPE) > 1
    ]  # fmt: skip


@question(
    label="Heterogeneity and local steps",
    asks="How much accuracy do heterogeneity and local steps cost?",
    order=5, suite="local_steps", figure="lines",
    x="columns", x_label="local steps J", x_base=2, panels_over_steps="rows", heatmap=True,
)  # fmt: skip
def local_steps(methods: Methods) -> list[Comparison]:
    """Partitions × J at a constant number of local steps; fine-tuning before training a head."""
    heads_last = sorted(fedavg(methods), key=lambda m: m.get("train.trainable.name") == "head")
    return [
        compare(
            alike, PARTITION, STEPS, note=shared_settings(alike, "partition", "steps"),
            references=_even(alike), column_references=[STEPS.label(min(alike, key=STEPS.order))],
        )
        for alike in grouped(heads_last, lambda m: family(m, PARTITION, STEPS))
        if values(alike, STEPS) > 1
    ]  # fmt: skip


@question(
    label="Heterogeneity", asks="How much accuracy does heterogeneity cost?",
    order=6, suite="heterogeneity", figure="partitions", heatmap=True
)  # fmt: skip
def heterogeneity(methods: Methods) -> list[Comparison]:
    """Partitions at one number of local steps, where no other number was tried."""
    heads_last = sorted(fedavg(methods), key=lambda m: m.get("train.trainable.name") == "head")
    return [
        compare(
            alike, PARTITION, STEPS, note=shared_settings(alike, "partition"),
            references=_even(alike),
        )
        for alike in grouped(heads_last, lambda m: family(m, PARTITION, STEPS))
        if values(alike, STEPS) == 1 and values(alike, PARTITION) > 1
        and not labels.sparse(alike[0])
    ]  # fmt: skip


@question(
    label="Mask rules", asks="Which weights should be trained?",
    order=7, suite="mask_rules", figure="panels",
    audit=("density", "budget", "tuning"),
)  # fmt: skip
def mask_rules(methods: Methods) -> list[Comparison]:
    """Rules at one density, beside dense training and the fitted head that all start from."""
    tables = []
    masked = [m for m in fedavg(methods) if labels.sparse(m)]
    for alike in grouped(masked, lambda m: family(m, RULE, PARTITION)):
        here = calibrated_alike(alike)
        if values(here, RULE) < 2:
            continue
        dense = dense_like(here[0], methods)
        tables.append(
            _with_start(
                [*dense, *here], here, RULE, methods,
                title=f"Mask rules at {labels.density(here[0])}",
                references=[labels.DENSE] if dense else [], varied=("partition", "rule"),
            )
        )  # fmt: skip
    return sorted(tables, key=lambda table: table.grid.title)


@question(
    label="Which part of the model to train, sorted by update size",
    asks="Which part of the model should be trained?",
    order=7.5,
          suite="trainable_parts", audit=("budget", "tuning"))  # fmt: skip
def trained_parts(methods: Methods) -> list[Comparison]:
    """LoRA, biases and norms, last blocks and linearised fine-tuning, beside masks and all weights.

    Rows are sorted by the bytes that a client sends; the frozen head is the same for all.
    """
    here = [
        m
        for m in fedavg(methods)
        if labels.trains(m) and m.get("train.trainable.name") != "head" and m.get("head.freeze")
    ]
    return [
        compare(
            alike, PART, PARTITION,
            note=f"With the same frozen head, sorted by the bytes of one update. {_budgets(alike)}",
        )
        for alike in grouped(here, lambda m: family(m, PART, PARTITION))
        if any(m.get("train.trainable.name") != "full" for m in alike) and values(alike, PART) > 1
    ]  # fmt: skip


@question(
    label="How many weights need training", asks="How many weights need training?",
    order=8, suite="sparsity", figure="lines",
    x="rows", x_label="density (fraction trained)", x_base=10,
)  # fmt: skip
def sparsity(methods: Methods) -> list[Comparison]:
    """One rule at several densities, beside dense training."""
    tables = []
    masked = [m for m in fedavg(methods) if labels.sparse(m)]
    for alike in grouped(masked, lambda m: family(m, DENSITY, PARTITION)):
        if values(alike, DENSITY) < 2:
            continue
        dense = dense_like(alike[0], methods)
        tables.append(
            compare(
                without_single_values([*dense, *alike], DENSITY), DENSITY, PARTITION,
                note=shared_settings(alike, "partition", "density"),
                references=[labels.DENSE] if dense else [], levels=[labels.DENSE],
            )
        )  # fmt: skip
    return tables


@question(
    label="Number of calibration rounds", asks="How many calibration rounds does a mask need?",
    order=9, suite="calibration_rounds", figure="lines",
    x="rows", x_label="rounds of calibration", x_base=2, audit=("density", "budget", "tuning"),
)  # fmt: skip
def calibration_rounds(methods: Methods) -> list[Comparison]:
    """One calibrated mask rule, with its mask found in several numbers of rounds."""
    here = [m for m in fedavg(methods) if calibration(m)]
    return by_partition(here, CALIBRATION_ROUNDS, references=["1 round"])


@question(
    label="Federated algorithms", asks="Is any other algorithm better than FedAvg?",
    order=10, suite="algorithms",
    audit=("density", "budget", "tuning"),
)  # fmt: skip
def algorithms(methods: Methods) -> list[Comparison]:
    """Federated algorithms against FedAvg, at every server learning rate that it was run with."""
    here = [m for m in methods if labels.federated(m) and labels.trains(m)]
    references = sorted({labels.algorithm(m) for m in here if labels.averages(m)})
    return by_partition(here, ALGORITHM, references=references)


# --- what questions are made of ------------------------------------------------------------------


def by_partition(
    methods: Methods, rows: Axis, *, references: Sequence[str] = (), title: str = ""
) -> list[Comparison]:
    """A table, rows × partitions, for every family with two or more values along `rows`."""
    return [
        compare(
            without_single_values(alike, rows), rows, PARTITION, title=title,
            note=shared_settings(alike, "partition", rows.name), references=references,
        )
        for alike in grouped(methods, lambda m: family(m, rows, PARTITION))
        if values(alike, rows) > 1
    ]  # fmt: skip


def shared_settings(methods: Methods, *varied: str) -> str:
    """The settings that all methods of a table share."""
    method = methods[0]
    parts = [labels.described(method, without=varied)]
    if labels.federated(method):
        settings = method.config["federated"]
        sampled = round(settings["clients"] * settings["participation"])
        parts.append(f"{settings['clients']} clients, {sampled} per round")
    parts.append(f"batch {method.get('train.batch_size')}")
    return "; ".join(parts) + "."


def _with_start(
    shown: Methods,
    alike: Methods,
    rows: Axis,
    methods: Methods,
    *,
    references: Sequence[str],
    varied: tuple[str, ...],
    title: str = "",
) -> Comparison:
    """Rows × partitions, with one more row: the fitted head that the methods start from."""
    starts = [start for m in alike for start in head_without_training(methods, m)]
    label = labels.trained(starts[0]) if starts else ""
    same = [start for start in starts if labels.trained(start) == label]
    return compare(
        without_single_values(shown, rows), rows, PARTITION, title=title,
        note=shared_settings(alike, *varied), references=[*references, *([label] if same else [])],
        levels=[labels.DENSE, label], everywhere=same, everywhere_label=label,
    )  # fmt: skip


def _even(methods: Methods) -> list[str]:
    """The even partition, if there is another one to compare with it."""
    even = [labels.partition(m) for m in methods if labels.evenly_split(m)]
    return even[:1] if values(methods, PARTITION) > 1 else []


def _budgets(methods: Methods) -> str:
    """How long central and federated methods were trained, which need not be the same."""
    spent: dict[str, list[str]] = {"Central": [], "Federated": []}
    for method in methods:
        spent["Federated" if labels.federated(method) else "Central"].append(labels.spent(method))
    return " ".join(
        f"{where}: {' or '.join(dict.fromkeys(texts))}." for where, texts in spent.items() if texts
    )


def _central_label(method: Method) -> str:
    return labels.described(method, without=("partition",))
