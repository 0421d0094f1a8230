"""Sentences about numbers that the page, the paper and the Markdown tables share.

The number of seeds, whether a difference is significant, what was chosen and what was sent.
"""

from collections.abc import Iterable, Sequence

from fedlens.reporting.study.content import (
    AlphaCurve,
    Answer,
    Cell,
    Chapter,
    Check,
    Content,
    Contrast,
    Grid,
    PartitionPicture,
)
from fedlens.reporting.study.labels import counted
from fedlens.reporting.study.statistics import MIN_SEEDS, significant

UNTRAINED = "In some seeds the parameters before any training were the best on validation."
DAGGER = "†"  # marks such cells
TOO_FEW = "too few seeds to test"
NOT_SIGNIFICANT = "not significant"
NOT_TESTED = "not tested"  # the suite states its contrasts, and this is none of them
NO_RUNS = "no runs yet"
TABLE_FAMILY = (
    "p-values are corrected by Holm's method over all differences between the rows (or between the "
    "columns) of a table, so the same two methods can have different p-values in different tables"
)


def grids(chapter: Chapter) -> list[Grid]:
    """All tables of a setting, the headline first."""
    return [*([chapter.headline] if chapter.headline else []), *chapter.grids]


def cells(*tables: Grid) -> list[Cell]:
    return [cell for grid in tables for row in grid.cells for cell in row if cell]


def span(counts: Iterable[int]) -> str:
    """'2 seeds', '1 to 3 seeds'."""
    ordered = sorted(counts)
    most = counted(ordered[-1], "seed")
    return most if ordered[0] == ordered[-1] else f"{ordered[0]} to {most}"


def seeds(grid: Grid) -> str:
    return span(len(cell.seeds) for cell in cells(grid))


def untrained(cell: Cell) -> str:
    """A note on a cell that was tested before any training; '' for all others."""
    if not cell.untrained:
        return ""
    return f"best before training in {cell.untrained} of {counted(len(cell.seeds), 'seed')}"


def tested(contrast: Contrast | Answer) -> bool:
    """Whether it has enough seeds, and is among the contrasts that the suite states, if it does."""
    stated = contrast.p is None or contrast.corrected is not None
    return contrast.count >= MIN_SEEDS and stated


def verdict(contrast: Contrast | Answer) -> str:
    """'higher', 'lower', 'not significant', 'not tested', or why it cannot be tested."""
    if contrast.mean is None:
        return NO_RUNS
    if contrast.count < MIN_SEEDS:
        return TOO_FEW
    if not tested(contrast):
        return NOT_TESTED
    if not significant(contrast.corrected, contrast.count):
        return NOT_SIGNIFICANT
    return "higher" if contrast.mean > 0 else "lower"


def family(content: Content) -> str:
    """Over what p-values are corrected."""
    if not content.asked:
        return TABLE_FAMILY
    return (
        f"p-values are corrected by Holm's method over the "
        f"{counted(len(content.asked), 'contrast')} that the suite states; other differences are "
        "not tested"
    )


def asked(answers: Sequence[Answer]) -> str:
    """What the p-values of the stated contrasts rest on."""
    known = [one.count for one in answers if one.count]
    seeds = f" over {span(known)}" if known else ""
    fewest = min((count for count in known if count >= MIN_SEEDS), default=MIN_SEEDS)
    return (
        f"Paired differences in points of test accuracy{seeds}, with 95 % intervals; the effect is "
        "in standard deviations of the differences. p: Student's paired test, corrected (Holm) "
        f"over all {counted(len(answers), 'contrast')} of this list, which the suite states before "
        "its runs. At so few seeds the test rests on normal differences; a test by exact sign "
        f"flips could not go below p = {2 ** (1 - fewest):.2g} at {fewest} seeds."
    )


def tuned(chapters: Iterable[Chapter]) -> str:
    """Whether learning rates were chosen, and on what data."""
    shown = cells(*(grid for chapter in chapters for grid in grids(chapter)))
    shown = [cell for cell in shown if cell.lr is not None]  # a head in closed form has no rate
    several = sum(cell.candidates > 1 for cell in shown)
    if not several:
        return (
            "Learning rates and weight decay were not tuned in these runs: each method was run "
            "with one value."
        )
    others = "; in the others each method was run with one value" if several < len(shown) else ""
    return (
        f"In {several} of {counted(len(shown), 'trained cell')} of the tables the method, with its "
        "learning rate and weight decay, was chosen among several on validation, never on test "
        f"accuracy{others}."
    )


def audited(checks: Sequence[Check]) -> str:
    """How many checks of the audit passed: '4 checks passed, 3 had nothing to check'."""
    passed = sum(check.outcome == "PASS" for check in checks)
    failed = sum(not check.passed for check in checks)
    empty = len(checks) - passed - failed
    parts = [
        f"{counted(passed, 'check')} passed",
        f"{failed} failed" if failed else "",
        f"{empty} had nothing to check" if empty else "",
    ]
    return ", ".join(filter(None, parts))


def sent(chapter: Chapter, grid: Grid) -> str:
    """Which messages a table's sizes count."""
    curves = [curve for one in chapter.curves if one.name == grid.name for curve in one.curves]
    early = sorted(
        one.megabytes[0] for one in curves
        if one.megabytes and one.unit[0] == 0 and one.megabytes[0] > 0
    )  # fmt: skip
    if not early:
        return "in both directions"
    amounts = dict.fromkeys(f"{value:.2f}" for value in (early[0], early[-1]))
    return (
        f"in both directions in all rounds, and {' to '.join(amounts)} MB that clients send before "
        "the first round, for the head or the mask"
    )


def ties(curve: AlphaCurve) -> list[float]:
    """Other α with the same validation accuracy as the chosen one."""
    best = curve.accuracy[curve.alphas.index(curve.chosen)]
    return [
        alpha for alpha, accuracy in zip(curve.alphas, curve.accuracy, strict=True)
        if accuracy == best and alpha != curve.chosen
    ]  # fmt: skip


def chance(clients: int) -> float:
    """The share of weights whose signs conflict if every client's sign is drawn at random."""
    return 1 - 2.0 ** (1 - clients)


def classes(chapter: Chapter, label: str) -> str:
    """How many a client of a method holds: '1 class', '3 to 9 classes'; '' if unknown."""
    for partition in chapter.partitions:
        if f", {partition.label}," in f", {label},":
            return held_classes(partition)
    return ""


def held_classes(partition: PartitionPicture) -> str:
    """How many classes a client of a partition holds: '1 class', '3 to 9 classes'."""
    if not (summary := partition.summary.get("classes_per_client")):
        return ""
    low, high = round(summary["min"]), round(summary["max"])
    many = counted(high, "class")
    return many if low == high else f"{low} to {many}"
