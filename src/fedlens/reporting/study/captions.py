"""What is said of numbers alike on the page, in the paper and in Markdown.

Over how many seeds they are, what these decide, what was chosen and among how many, what was sent.
"""

from collections.abc import Iterable

from fedlens.reporting.study.content import AlphaCurve, Cell, Chapter, Contrast, Grid
from fedlens.reporting.study.labels import counted
from fedlens.reporting.study.statistics import FEWEST, decided

START = "In some seeds the best on validation was the start, before any training."
DAGGER = "†"  # marks cells of which that is so


def grids(chapter: Chapter) -> list[Grid]:
    """All tables of a setting, the six models first."""
    return [*([chapter.headline] if chapter.headline else []), *chapter.grids]


def cells(*tables: Grid) -> list[Cell]:
    return [cell for grid in tables for row in grid.cells for cell in row if cell]


def span(counts: Iterable[int]) -> str:
    """'2 seeds', '1 to 3 seeds'."""
    found = sorted(counts)
    most = counted(found[-1], "seed")
    return most if found[0] == found[-1] else f"{found[0]} to {most}"


def seeds(grid: Grid) -> str:
    return span(len(cell.seeds) for cell in cells(grid))


def untrained(cell: Cell) -> str:
    """What to mind of a cell that was tested before any training; '' for all others."""
    if not cell.untrained:
        return ""
    return f"{cell.untrained} of {counted(len(cell.seeds), 'seed')}: untrained start was best"


def verdict(contrast: Contrast) -> str:
    """What the seeds say of a difference."""
    if contrast.count < FEWEST:
        verb = "decides" if contrast.count == 1 else "decide"
        return f"{counted(contrast.count, 'seed')} {verb} nothing"
    if not decided(contrast.corrected, contrast.count):
        return "not decided"
    return "higher" if contrast.mean > 0 else "lower"


def tuned(chapters: Iterable[Chapter]) -> str:
    """Whether learning rates were chosen, and on what."""
    found = cells(*(grid for chapter in chapters for grid in grids(chapter)))
    several = sum(cell.candidates > 1 for cell in found)
    if not several:
        return (
            "Learning rates and weight decay are as given in the configs; these records hold no "
            "choice among several."
        )
    others = "; in the others these are as given in the configs" if several < len(found) else ""
    return (
        f"In {several} of {counted(len(found), 'cell')} of the tables the method, with its "
        "learning rate and weight decay, was chosen among several on validation, never on test "
        f"accuracy{others}."
    )


def sent(chapter: Chapter, grid: Grid) -> str:
    """Which messages a table's megabytes are of."""
    curves = [one for told in chapter.curves if told.name == grid.name for one in told.curves]
    early = sorted(
        one.megabytes[0] for one in curves
        if one.megabytes and one.unit[0] == 0 and one.megabytes[0] > 0
    )  # fmt: skip
    if not early:
        return "both ways"
    amounts = dict.fromkeys(f"{value:.2f}" for value in (early[0], early[-1]))
    return (
        f"both ways in rounds, and {' to '.join(amounts)} MB up before the first of them, for the "
        "head or the mask"
    )


def ties(curve: AlphaCurve) -> list[float]:
    """Other α that are as good on validation as the one chosen."""
    best = curve.accuracy[curve.alphas.index(curve.chosen)]
    return [
        alpha for alpha, found in zip(curve.alphas, curve.accuracy, strict=True)
        if found == best and alpha != curve.chosen
    ]  # fmt: skip


def chance(clients: int) -> float:
    """The share of weights whose signs conflict if every client's are drawn at random."""
    return 1 - 2.0 ** (1 - clients)


def classes(chapter: Chapter, label: str) -> str:
    """How many a client of a method holds: '1 class', '3 to 9 classes'; '' where it is unknown."""
    for partition in chapter.partitions:
        told = partition.summary.get("classes_per_client")
        if told and f", {partition.label}," in f", {label},":
            low, high = round(told["min"]), round(told["max"])
            many = f"{high} class{'' if high == 1 else 'es'}"
            return many if low == high else f"{low} to {many}"
    return ""
