"""The study's questions as tables: each finds, among a setting's methods, those that answer it.

A question without two methods to compare has no table; the reports say so.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from fedlens.reporting.study import labels
from fedlens.reporting.study.comparison import (
    ALGORITHM,
    CALIBRATED,
    DENSITY,
    MASK,
    PARTITION,
    RULE,
    SCHEDULE,
    STEPS,
    TRAINED,
    UNDER,
    Axis,
    Comparison,
    calibration,
    compare,
    family,
    grouped,
    mask,
    usual,
)
from fedlens.reporting.study.runs import Method
from fedlens.reporting.study.selection import (
    Methods,
    calibrated_alike,
    contested,
    dense_like,
    fedavg,
    heads_alone,
    most_skewed,
    one_way,
    values,
)

WHOLE = Axis("", (), lambda m: "accuracy", lambda m: 0)  # one column for all
MODEL = Axis(
    "", (), lambda m: f"FedAvg, {labels.partition(m)}" if labels.federated(m) else "central",
    labels.evenness,
)  # fmt: skip
SKEW = Axis("", ("partition",), lambda m: str(labels.partition(m) == "IID"), labels.evenness)
ALONE = "ridge head alone"


def comparisons(methods: Methods) -> list[Comparison]:
    """All tables of a setting, chapter by chapter; names are unique."""
    found = [table for question in QUESTIONS for table in question(methods)]
    counts: Counter[str] = Counter()
    numbered = []
    for table in found:
        counts[table.grid.name] += 1
        again = counts[table.grid.name]
        name = table.grid.name if again == 1 else f"{table.grid.name}-{again}"
        numbered.append(replace(table, grid=replace(table.grid, name=name)))
    return numbered


def six_models(methods: Methods, noniid: str = "") -> Comparison | None:
    """Central, FedAvg on even data, FedAvg on skewed data, each dense and sparse.

    One federation, one way of central training and one mask: rows and columns say what differs.
    """
    backbone = [
        m for m in methods
        if labels.trains(m) and m.get("train.what") != "head"
        and (labels.partition(m) in ("central", "IID", noniid) or not noniid)
        and (labels.algorithm(m) == "FedAvg" or not labels.federated(m))
    ]  # fmt: skip
    alike = one_way(backbone, MASK, SKEW)
    shown = ("central", "IID", noniid or most_skewed(alike))
    here = [m for m in alike if labels.partition(m) in shown]
    masked = usual([m for m in here if labels.sparse(m)], mask, labels.partition)
    dense = [m for m in here if not labels.sparse(m)]
    if not here:
        return None
    return compare(
        [*dense, *masked], MODEL, MASK, name="six_models", chapter="headline",
        title="The six models of the study",
        note="One federation, one way of central training and one mask: those on record in most "
             f"of these cells, then the best on validation. {_budgets([*dense, *masked])}",
    )  # fmt: skip


def central(methods: Methods) -> list[Comparison]:
    here = [m for m in methods if not labels.federated(m)]
    if not here:
        return []
    label = Axis("trained", (), _central_words, lambda m: (labels.trains(m), _central_words(m)))
    return [
        compare(
            here, label, WHOLE, name="central", chapter="central",
            title="Central baselines",
            note="All training images in one place; in each row the best on validation, whatever "
                 "its schedule, batch size and epochs.",
        )
    ]  # fmt: skip


def schedules(methods: Methods) -> list[Comparison]:
    here = [m for m in methods if labels.trains(m)]
    return _each(here, SCHEDULE, "schedules", "Learning-rate schedules")


def heads(methods: Methods) -> list[Comparison]:
    """Everything that leaves the backbone as it was pretrained."""
    here = [m for m in methods if m.get("train.what") == "head" or not labels.trains(m)]
    here = [m for m in here if not labels.federated(m) or labels.algorithm(m) == "FedAvg"]
    learned = one_way([m for m in here if labels.trains(m)], TRAINED, PARTITION)
    here = [*(m for m in here if not labels.trains(m)), *learned]
    if values(here, TRAINED) < 2:
        return []
    return [
        compare(
            here, TRAINED, PARTITION, name="heads", chapter="heads",
            title="Heads on the frozen backbone",
            note="The backbone is as pretrained; a head in closed form needs no step. "
                 f"{_budgets(learned)}",
        )
    ]  # fmt: skip


def under_heads(methods: Methods) -> list[Comparison]:
    """The backbone trained by clients under one head or another, beside the ridge head alone."""
    found = []
    here = [m for m in fedavg(methods) if m.get("train.what") != "head" and not labels.sparse(m)]
    for alike in grouped(here, lambda m: family(m, UNDER, PARTITION)):
        if values(alike, UNDER) < 2:
            continue
        start = [head for m in alike for head in heads_alone(methods, m)]
        found.append(
            compare(
                contested(alike, UNDER), UNDER, PARTITION,
                name="under_heads", chapter="under_heads",
                title="The backbone under one head or another",
                note=_note(alike, "partition", "trained"),
                references=[ALONE] if start else [],
                everywhere=start, everywhere_label=ALONE,
            )
        )  # fmt: skip
    return found


def local_steps(methods: Methods) -> list[Comparison]:
    """Partitions × J at a constant number of local steps; one J where there is no more.

    What trains the backbone comes before heads alone.
    """
    found = []
    heads_last = sorted(fedavg(methods), key=lambda m: m.get("train.what") == "head")
    for alike in grouped(heads_last, lambda m: family(m, PARTITION, STEPS)):
        several = values(alike, STEPS) > 1
        if several or (values(alike, PARTITION) > 1 and not labels.sparse(alike[0])):
            found.append(
                compare(
                    alike, PARTITION, STEPS,
                    name="local_steps" if several else "heterogeneity",
                    chapter="local_steps" if several else "heterogeneity",
                    title="Heterogeneity and local steps" if several else "Heterogeneity",
                    note=_note(alike, "partition", *(["steps"] if several else [])),
                    references=["IID"] if values(alike, PARTITION) > 1 else [],
                    column_references=[STEPS.label(min(alike, key=STEPS.order))] if several else [],
                )
            )  # fmt: skip
    return found


def mask_rules(methods: Methods) -> list[Comparison]:
    """Rules at one density, beside dense training and the closed-form head they begin from."""
    found = []
    masked = [m for m in fedavg(methods) if labels.sparse(m)]
    for alike in grouped(masked, lambda m: family(m, RULE, PARTITION)):
        here = calibrated_alike(alike)
        if values(here, RULE) < 2:
            continue
        dense, start = dense_like(here[0], methods), heads_alone(methods, here[0])
        found.append(
            compare(
                contested([*dense, *here], RULE), RULE, PARTITION,
                name="mask_rules", chapter="mask_rules",
                title=f"Mask rules at {labels.density(here[0])}",
                note=_note(here, "partition", "rule"),
                references=[*(["dense"] if dense else []), *([ALONE] if start else [])],
                everywhere=start, everywhere_label=ALONE,
            )
        )  # fmt: skip
    return sorted(found, key=lambda table: table.grid.title)


def sparsity(methods: Methods) -> list[Comparison]:
    found = []
    masked = [m for m in fedavg(methods) if labels.sparse(m)]
    for alike in grouped(masked, lambda m: family(m, DENSITY, PARTITION)):
        if values(alike, DENSITY) < 2:
            continue
        dense = dense_like(alike[0], methods)
        found.append(
            compare(
                contested([*dense, *alike], DENSITY), DENSITY, PARTITION,
                name="sparsity", chapter="sparsity",
                title="How few weights are enough", note=_note(alike, "partition", "density"),
                references=["dense"] if dense else [],
            )
        )  # fmt: skip
    return found


def calibration_rounds(methods: Methods) -> list[Comparison]:
    here = [m for m in fedavg(methods) if calibration(m)]
    return _each(
        here, CALIBRATED, "calibration_rounds", "Calibration in rounds", against=["1 round"]
    )


def algorithms(methods: Methods) -> list[Comparison]:
    """Each against averaging, and against averaging with a longer step where that was tried."""
    here = [m for m in methods if labels.federated(m) and labels.trains(m)]
    averaging = {labels.algorithm(m) for m in here if m.get("algorithm.name") == "fedavg"}
    return _each(
        here, ALGORITHM, "algorithms", "Other ways to aggregate",
        against=sorted(averaging | {"FedAvg"}),
    )  # fmt: skip


QUESTIONS: tuple[Callable[[Methods], list[Comparison]], ...] = (
    central,
    schedules,
    heads,
    under_heads,
    local_steps,
    mask_rules,
    sparsity,
    calibration_rounds,
    algorithms,
)


def _each(
    methods: Methods, rows: Axis, chapter: str, title: str, *, against: Sequence[str] = ()
) -> list[Comparison]:
    """A table, rows × partitions, for every family with two values or more along `rows`."""
    return [
        compare(
            contested(alike, rows), rows, PARTITION, name=chapter, chapter=chapter, title=title,
            note=_note(alike, "partition", rows.name), references=against,
        )
        for alike in grouped(methods, lambda m: family(m, rows, PARTITION))
        if values(alike, rows) > 1
    ]  # fmt: skip


def _budgets(methods: Methods) -> str:
    """What was spent, centrally and by clients, which need not be the same."""
    said: dict[str, list[str]] = {"Central": [], "FedAvg": []}
    for method in methods:
        said["FedAvg" if labels.federated(method) else "Central"].append(labels.spent(method))
    return " ".join(
        f"{where}: {' or '.join(dict.fromkeys(told))}." for where, told in said.items() if told
    )


def _central_words(method: Method) -> str:
    return labels.described(method, but=("partition",))


def _note(methods: Methods, *varied: str) -> str:
    """What all methods of a table share."""
    method = methods[0]
    said = [labels.described(method, but=varied)]
    if labels.federated(method):
        told = method.config["federated"]
        sampled = round(told["clients"] * told["participation"])
        said.append(f"{told['clients']} clients, {sampled} a round")
    said.append(f"batch {method.get('train.batch_size')}")
    return "; ".join(said) + "."
