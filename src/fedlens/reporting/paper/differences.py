"""Sentences about differences, from what the seeds can bear.

A difference is stated as one only where it is decided (see `statistics`); otherwise it is not, and
by fewer than FEWEST seeds nothing is. An ordering that no contrast supports is never spoken of.
"""

from collections.abc import Iterable, Sequence

from fedlens.reporting.paper.prose import counted, emphasised, listed, number, spread, tex
from fedlens.reporting.study import statistics
from fedlens.reporting.study.captions import span
from fedlens.reporting.study.content import Contrast, Grid
from fedlens.reporting.study.statistics import DECIDED, FEWEST


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
    return statistics.decided(contrast.corrected, contrast.count)


def over(found: Iterable[Contrast]) -> str:
    """'over 3 seeds'."""
    return f"over {span(c.count for c in found)}"


def once(contrasts: Iterable[Contrast]) -> list[Contrast]:
    """Of `a minus b` and `b minus a` the first alone."""
    seen: set[tuple[str, str, str]] = set()
    kept = []
    for contrast in contrasts:
        if (contrast.against, contrast.row, contrast.column) not in seen:
            kept.append(contrast)
        seen.add((contrast.row, contrast.against, contrast.column))
    return kept


def contrasts(grid: Grid, *, columns: int = 2, turned: bool = False) -> list[str]:
    """For each reference a sentence by column: of many columns the first and the last.

    Or `turned`, for each reference column a sentence by row.
    """
    every = once(c for c in grid.contrasts if c.turned == turned)
    several = len(grid.rows if turned else grid.columns) > 1
    told: list[str] = []
    for against in dict.fromkeys(c.against for c in every):
        few: list[tuple[str, list[Contrast]]] = []
        names = list(dict.fromkeys(c.column for c in every if c.against == against))
        if len(names) > columns:
            names = [names[0], *names[len(names) - columns + 1 :]]
        for column in names:
            where = f" under {tex(column)}" if several else ""
            here = [c for c in every if (c.against, c.column) == (against, column)]
            if tested := [c for c in here if c.count >= FEWEST]:
                first = f"Against {emphasised(against)}{where}, {over(tested)}, "
                told.append(f"{first}{_tested(tested)}.")
            if untested := [c for c in here if c.count < FEWEST]:
                few.append((where.strip(), untested))
        if few:
            told.append(_untested(against, few))
    return told


def _untested(against: str, found: Sequence[tuple[str, Sequence[Contrast]]]) -> str:
    counts = [c.count for _, here in found for c in here]
    nothing = "decides nothing" if max(counts) == 1 else "decide nothing"
    said = [
        f"{where} {listed([f'{emphasised(c.row)} {points(c)}' for c in here])}".strip()
        for where, here in found
    ]
    return (
        f"{span(counts)} {nothing}; the differences from {emphasised(against)} are, in points: "
        f"{'; '.join(said)}."
    )


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
    """What is decided in a table, or that nothing is; '' where seeds are too few to decide."""
    tested = [c for c in once(grid.contrasts) if c.count >= FEWEST]
    settled = sorted((c for c in tested if decided(c)), key=lambda c: -abs(c.mean))
    if not tested:
        return ""
    count = f"of {counted(len(tested), 'difference')} {over(tested)} "
    if not settled:
        return f"{emphasised(grid.title)}: {count}none is decided"
    first = settled[0]
    several = len(grid.rows if first.turned else grid.columns) > 1
    where = f" under {tex(first.column)}" if several else ""
    largest = (
        f"{emphasised(first.row)} {'costs' if first.mean < 0 else 'gains'} "
        f"{points(first, signed=False)} points against {emphasised(first.against)}{where} "
        f"({p_value(first)})"
    )
    if len(tested) == 1:
        return f"{emphasised(grid.title)}: {over(tested)}, {largest}"
    be = "is" if len(settled) == 1 else "are"
    return (
        f"{emphasised(grid.title)}: {count}{number(len(settled))} {be} decided, the largest: "
        f"{largest}"
    )
