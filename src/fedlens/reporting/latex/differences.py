"""Sentences about differences, from what the seeds can bear.

A difference is stated as one only where its corrected p-value is below DECIDED; otherwise it is not
decided, and from one seed nothing is. An ordering that no contrast supports is never spoken of.
"""

from collections.abc import Iterable, Sequence

from fedlens.reporting.content import Contrast, Grid
from fedlens.reporting.latex.speech import counted, emphasised, listed, number, spread, tex
from fedlens.reporting.tables import DECIDED


def points(contrast: Contrast, *, signed: bool = True) -> str:
    mean = contrast.mean if signed else abs(contrast.mean)
    return f"{number(mean, 2)}{spread(contrast.half)}"


def p_value(contrast: Contrast) -> str:
    """Three decimals, or as many as its first digit takes, and its being below the limit."""
    p = contrast.corrected or 0.0
    decimals = 3
    while decimals < 6 and (0 < p < 10.0**-decimals or p < DECIDED <= round(p, decimals)):
        decimals += 1
    return f"$p$ = {number(p, decimals)}"


def decided(contrast: Contrast) -> bool:
    return contrast.corrected is not None and contrast.corrected < DECIDED


def once(contrasts: Iterable[Contrast]) -> list[Contrast]:
    """Of `a minus b` and `b minus a` the first alone."""
    seen: set[tuple[str, str, str]] = set()
    kept = []
    for contrast in contrasts:
        if (contrast.against, contrast.row, contrast.column) not in seen:
            kept.append(contrast)
        seen.add((contrast.row, contrast.against, contrast.column))
    return kept


def contrasts(grid: Grid, *, columns: int = 2) -> list[str]:
    """For each reference a sentence by column: of many columns the first and the last."""
    every = once(grid.contrasts)
    told: list[str] = []
    for against in dict.fromkeys(c.against for c in every):
        alone: list[str] = []
        names = list(dict.fromkeys(c.column for c in every if c.against == against))
        if len(names) > columns:
            names = [names[0], *names[len(names) - columns + 1 :]]
        for column in names:
            where = f" under {tex(column)}" if len(grid.columns) > 1 else ""
            here = [c for c in every if (c.against, c.column) == (against, column)]
            tested = [c for c in here if c.corrected is not None]
            single = [f"{emphasised(c.row)} {points(c)}" for c in here if c.corrected is None]
            if tested:
                told.append(f"Against {emphasised(against)}{where}, {_tested(tested)}.")
            if single:
                alone.append(f"{where.strip()} {listed(single)}".strip())
        if alone:
            said = (
                f"With one seed, which decides nothing, the differences from {emphasised(against)}"
            )
            told.append(f"{said} are, in points: {'; '.join(alone)}.")
    return told


def _tested(found: Sequence[Contrast]) -> str:
    clauses = []
    for verb, sign in (("costs", -1), ("gains", 1)):
        settled = [c for c in found if decided(c) and sign * c.mean > 0]
        said = [
            f"{emphasised(c.row)} {f'{verb} ' if c is settled[0] else ''}{points(c, signed=False)} "
            f"{'points ' if c is settled[0] else ''}({p_value(c)})"
            for c in settled
        ]
        clauses += [listed(said)] if said else []
    unsettled = [f"{emphasised(c.row)} ({points(c)})" for c in found if not decided(c)]
    if unsettled:
        clauses.append(f"the difference is not decided by these data for {listed(unsettled)}")
    return "; ".join(clauses)


def verdict(grid: Grid) -> str:
    """What is decided in a table, or that nothing is; '' where nothing was tested."""
    tested = [c for c in once(grid.contrasts) if c.corrected is not None]
    settled = sorted((c for c in tested if decided(c)), key=lambda c: -abs(c.mean))
    if not tested:
        return ""
    count = f"of {counted(len(tested), 'difference')} "
    if not settled:
        return f"{emphasised(grid.title)}: {count}none is decided"
    first = settled[0]
    where = f" under {tex(first.column)}" if len(grid.columns) > 1 else ""
    largest = (
        f"{emphasised(first.row)} {'costs' if first.mean < 0 else 'gains'} "
        f"{points(first, signed=False)} points against {emphasised(first.against)}{where} "
        f"({p_value(first)})"
    )
    if len(tested) == 1:
        return f"{emphasised(grid.title)}: {largest}"
    be = "is" if len(settled) == 1 else "are"
    return (
        f"{emphasised(grid.title)}: {count}{number(len(settled))} {be} decided, the largest: "
        f"{largest}"
    )
