"""Sentences about differences between methods.

A difference is stated as one only if it is significant (see `study.statistics`), and differences
over fewer than MIN_SEEDS seeds are listed without a test. No other ordering is ever stated.
"""

from collections.abc import Iterable, Sequence

from fedlens.reporting.paper.prose import emphasised, listed, number, spread, tex
from fedlens.reporting.study import captions, statistics
from fedlens.reporting.study.captions import span
from fedlens.reporting.study.content import Contrast, Grid
from fedlens.reporting.study.statistics import MIN_SEEDS, SIGNIFICANCE


def points(contrast: Contrast, *, signed: bool = True) -> str:
    mean = contrast.mean if signed else abs(contrast.mean)
    return f"{number(mean, 2)}{spread(contrast.half)}"


def p_value(contrast: Contrast) -> str:
    """Three decimals, or as many as show its first digit and whether it is below the limit."""
    p = contrast.corrected or 0.0
    decimals = 3
    while decimals < 6 and (0 < p < 10.0**-decimals or p < SIGNIFICANCE <= round(p, decimals)):
        decimals += 1
    return f"$p$ = {number(p, decimals)}"


def significant(contrast: Contrast) -> bool:
    return statistics.significant(contrast.corrected, contrast.count)


def seeds(contrasts: Iterable[Contrast]) -> str:
    """'3 seeds', '3 to 5 seeds'."""
    return span(c.count for c in contrasts)


def without_duplicates(contrasts: Iterable[Contrast]) -> list[Contrast]:
    """Of `a minus b` and `b minus a` only the first."""
    seen: set[tuple[str, str, str]] = set()
    kept = []
    for contrast in contrasts:
        if (contrast.against, contrast.row, contrast.column) not in seen:
            kept.append(contrast)
        seen.add((contrast.row, contrast.against, contrast.column))
    return kept


def contrasts(grid: Grid, *, columns: int = 2, turned: bool = False) -> list[str]:
    """A sentence per reference and column: of many columns the first and the last.

    If `turned`, a sentence per reference column and row.
    """
    every = without_duplicates(c for c in grid.contrasts if c.turned == turned)
    several = len(grid.rows if turned else grid.columns) > 1
    sentences: list[str] = []
    for against in dict.fromkeys(c.against for c in every):
        few: list[tuple[str, list[Contrast]]] = []
        names = list(dict.fromkeys(c.column for c in every if c.against == against))
        if len(names) > columns:
            names = [names[0], *names[len(names) - columns + 1 :]]
        for column in names:
            where = f" at {tex(column)}" if several else ""
            here = [c for c in every if (c.against, c.column) == (against, column)]
            if tested := [c for c in here if captions.tested(c)]:
                first = f"Compared with {emphasised(against)}{where} ({seeds(tested)}), "
                sentences.append(f"{first}{_tested(tested)}.")
            if untested := [c for c in here if not captions.tested(c)]:
                few.append((where.strip(), untested))
        if few:
            sentences.append(_untested(against, few))
    return sentences


def _untested(against: str, groups: Sequence[tuple[str, Sequence[Contrast]]]) -> str:
    counts = [c.count for _, here in groups for c in here]
    reason = captions.TOO_FEW if max(counts) < MIN_SEEDS else captions.NOT_TESTED
    texts = [
        f"{f'{where}, ' if where else ''}"
        + listed([f"{emphasised(c.row)} {points(c)}" for c in here])
        for where, here in groups
    ]
    return (
        f"Differences from {emphasised(against)} in points, over {span(counts)} "
        f"({reason}): {'; '.join(texts)}."
    )


def _tested(tested: Sequence[Contrast]) -> str:
    clauses = []
    for verb, sign in (("loses", -1), ("gains", 1)):
        large = [c for c in tested if significant(c) and sign * c.mean > 0]
        texts = [
            f"{emphasised(c.row)} {f'{verb} ' if c is large[0] else ''}{points(c, signed=False)} "
            f"{'points ' if c is large[0] else ''}({p_value(c)})"
            for c in large
        ]
        clauses += [listed(texts)] if texts else []
    others = [f"{emphasised(c.row)} ({points(c)})" for c in tested if not significant(c)]
    if others:
        clauses.append(f"the difference is not significant for {listed(others)}")
    return "; ".join(clauses)
