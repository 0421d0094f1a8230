"""The study's questions as tables: each finds, among a setting's methods, those that answer it.

A question without two methods to compare has no table; the reports say so.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from fedlens.reporting import words
from fedlens.reporting.comparison import (
    ALGORITHM,
    CALIBRATED,
    DENSITY,
    PARTITION,
    RULE,
    SCHEDULE,
    STEPS,
    TRAINED,
    Axis,
    Comparison,
    calibration,
    cell,
    chosen,
    compare,
    family,
    grouped,
)
from fedlens.reporting.content import Grid
from fedlens.reporting.study import Method

Methods = Sequence[Method]

WHOLE = Axis("", (), lambda m: "accuracy", lambda m: 0)  # one column for all
MODELS = ("dense", "sparse")
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
    """Central, FedAvg on even data, FedAvg on skewed data, each dense and sparse."""
    backbone = [m for m in methods if words.trains(m) and m.get("train.what") != "head"]
    eligible = [m for m in backbone if not words.federated(m) or words.algorithm(m) == "FedAvg"]
    skewed = noniid or _most_skewed(eligible)
    rows = {"central": "central", "FedAvg, IID": "IID"}
    if skewed:
        rows[f"FedAvg, {skewed}"] = skewed
    candidates = {
        (row, column): [
            m
            for m in eligible
            if words.partition(m) == where and words.sparse(m) == (column == "sparse")
        ]
        for row, where in rows.items()
        for column in MODELS
    }
    candidates = {place: found for place, found in candidates.items() if found}
    if not candidates:
        return None
    down = [row for row in rows if any((row, column) in candidates for column in MODELS)]
    cells = [
        [cell(candidates[r, c]) if (r, c) in candidates else None for c in MODELS] for r in down
    ]
    grid = Grid(
        name="six_models",
        chapter="headline",
        title="The six models of the study",
        note="In each cell the method with the most seeds and the best validation accuracy.",
        corner="",
        rows=down,
        columns=list(MODELS),
        cells=cells,
    )
    return Comparison(grid, {place: chosen(found) for place, found in candidates.items()})


def central(methods: Methods) -> list[Comparison]:
    here = [m for m in methods if not words.federated(m)]
    if not here:
        return []
    label = Axis("trained", (), _central_words, lambda m: (words.trains(m), _central_words(m)))
    return [
        compare(
            here, label, WHOLE, name="central", chapter="central",
            title="Central baselines", note="All training images in one place.",
        )
    ]  # fmt: skip


def schedules(methods: Methods) -> list[Comparison]:
    here = [m for m in methods if words.trains(m)]
    return _each(here, SCHEDULE, "schedules", "Learning-rate schedules")


def heads(methods: Methods) -> list[Comparison]:
    """Everything that leaves the backbone as it was pretrained."""
    here = [m for m in methods if m.get("train.what") == "head" or not words.trains(m)]
    here = [m for m in here if not words.federated(m) or words.algorithm(m) == "FedAvg"]
    if _values(here, TRAINED) < 2:
        return []
    return [
        compare(
            here, TRAINED, PARTITION, name="heads", chapter="heads",
            title="Heads on the frozen backbone",
            note="The backbone is as pretrained; a head in closed form needs no step.",
        )
    ]  # fmt: skip


def local_steps(methods: Methods) -> list[Comparison]:
    """Partitions × J at a constant number of local steps; one J where there is no more."""
    found = []
    for alike in grouped(_fedavg(methods), lambda m: family(m, PARTITION, STEPS)):
        several = _values(alike, STEPS) > 1
        if several or (_values(alike, PARTITION) > 1 and not words.sparse(alike[0])):
            found.append(
                compare(
                    alike, PARTITION, STEPS,
                    name="local_steps" if several else "heterogeneity",
                    chapter="local_steps" if several else "heterogeneity",
                    title="Heterogeneity and local steps" if several else "Heterogeneity",
                    note=_note(alike, "partition", *(["steps"] if several else [])),
                    references=["IID"] if _values(alike, PARTITION) > 1 else [],
                )
            )  # fmt: skip
    return found


def mask_rules(methods: Methods) -> list[Comparison]:
    """Rules at one density, beside dense training and the closed-form head they begin from."""
    found = []
    drop = Axis("", ("sparse",), words.rule, words.rule)
    for alike in grouped(_fedavg(methods), lambda m: family(m, drop, PARTITION)):
        dense = [m for m in alike if not words.sparse(m)]
        masked = [m for m in alike if words.sparse(m)]
        for share in sorted({m.get("sparse.density") for m in masked}):
            here = _calibrated_alike([m for m in masked if m.get("sparse.density") == share])
            if _values(here, RULE) < 2:
                continue
            start = _heads_alone(methods, here[0])
            found.append(
                compare(
                    [*dense, *here], RULE, PARTITION, name="mask_rules", chapter="mask_rules",
                    title=f"Mask rules at density {share:g}",
                    note=_note(here, "partition", "rule"),
                    references=[*(["dense"] if dense else []), *([ALONE] if start else [])],
                    everywhere=start, everywhere_label=ALONE,
                )
            )  # fmt: skip
    return found


def sparsity(methods: Methods) -> list[Comparison]:
    found = []
    drop = Axis("", ("sparse",), words.rule, words.rule)
    masked = [m for m in _fedavg(methods) if words.sparse(m)]
    for alike in grouped(masked, lambda m: family(m, DENSITY, PARTITION)):
        if _values(alike, DENSITY) < 2:
            continue
        same = family(alike[0], drop, PARTITION)
        dense = [
            m for m in _fedavg(methods)
            if not words.sparse(m) and family(m, drop, PARTITION) == same
        ]  # fmt: skip
        found.append(
            compare(
                [*dense, *alike], DENSITY, PARTITION, name="sparsity", chapter="sparsity",
                title="How few weights are enough", note=_note(alike, "partition", "density"),
                references=["dense"] if dense else [],
            )
        )  # fmt: skip
    return found


def calibration_rounds(methods: Methods) -> list[Comparison]:
    here = [m for m in _fedavg(methods) if calibration(m)]
    return _each(here, CALIBRATED, "calibration_rounds", "Calibration in rounds", against="1 round")


def algorithms(methods: Methods) -> list[Comparison]:
    here = [m for m in methods if words.federated(m) and words.trains(m)]
    return _each(here, ALGORITHM, "algorithms", "Other ways to aggregate", against="FedAvg")


QUESTIONS: tuple[Callable[[Methods], list[Comparison]], ...] = (
    central,
    schedules,
    heads,
    local_steps,
    mask_rules,
    sparsity,
    calibration_rounds,
    algorithms,
)


def _each(
    methods: Methods, rows: Axis, chapter: str, title: str, *, against: str = ""
) -> list[Comparison]:
    """A table, rows × partitions, for every family with two values or more along `rows`."""
    return [
        compare(
            alike, rows, PARTITION, name=chapter, chapter=chapter, title=title,
            note=_note(alike, "partition", rows.name), references=[against] if against else [],
        )
        for alike in grouped(methods, lambda m: family(m, rows, PARTITION))
        if _values(alike, rows) > 1
    ]  # fmt: skip


def _fedavg(methods: Iterable[Method]) -> list[Method]:
    return [
        m for m in methods
        if words.federated(m) and words.trains(m) and words.algorithm(m) == "FedAvg"
    ]  # fmt: skip


def _values(methods: Iterable[Method], axis: Axis) -> int:
    return len({axis.label(method) for method in methods})


def _most_skewed(methods: Methods) -> str:
    """The partition with both a dense and a sparse model if there is one, else any but IID."""
    skewed = [m for m in methods if words.partition(m) not in ("central", "IID")]
    kinds: dict[str, set[bool]] = {}
    for method in skewed:
        kinds.setdefault(words.partition(method), set()).add(words.sparse(method))
    if not skewed:
        return ""
    return words.partition(
        max(skewed, key=lambda m: (len(kinds[words.partition(m)]), words.evenness(m)))
    )


def _calibrated_alike(methods: Methods) -> list[Method]:
    """Of rules that look at sensitivity, those calibrated as most of them were."""
    counts = Counter(told for m in methods if (told := calibration(m)))
    usual = max(counts, key=lambda told: (counts[told], told)) if counts else ""
    return [m for m in methods if calibration(m) in ("", usual)]


def _heads_alone(methods: Methods, like: Method) -> list[Method]:
    """The closed-form head that `like` begins from, federated, with nothing trained."""
    if like.get("head.name") != "ridge":
        return []
    return [
        m for m in methods
        if words.federated(m) and not words.trains(m) and m.get("head.name") == "ridge"
    ]  # fmt: skip


def _central_words(method: Method) -> str:
    return words.described(method, but=("partition",))


def _note(methods: Methods, *varied: str) -> str:
    """What all methods of a table share."""
    method = methods[0]
    said = [words.described(method, but=varied)]
    if words.federated(method):
        told = method.config["federated"]
        sampled = round(told["clients"] * told["participation"])
        said.append(f"{told['clients']} clients, {sampled} a round")
    said.append(f"batch {method.get('train.batch_size')}")
    return "; ".join(said) + "."
