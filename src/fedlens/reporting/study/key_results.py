"""The answer to each question in one or two sentences: what the first screen of a page shows.

A sentence states a difference with its interval, its corrected p and its number of seeds, and calls
it significant only if its test does (`captions.verdict`). The difference is picked by a rule that
looks at no accuracy where the rows have an order (the last row minus the reference); where they
have none, it is the largest, if any is significant the largest of those, and the sentence says
among how many. Rows that are themselves references are not picked.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fedlens.reporting.study import captions
from fedlens.reporting.study.content import (
    AlphaCurve,
    Answer,
    Cell,
    Chapter,
    Content,
    Contrast,
    Grid,
    Question,
)
from fedlens.reporting.study.labels import counted
from fedlens.reporting.study.tables import p_value

ORDERED = ("lines", "partitions")  # figures of questions whose rows and columns have an order
REFERENCES = 2  # sentences on differences between rows: one for each of the first references
LISTED = 3  # means in a sentence; of more, the lowest and the highest


@dataclass(frozen=True)
class KeyResult:
    question: str  # as a question
    sentences: list[str]
    grid: str  # name of the table behind it
    tested: bool  # whether any of the table's differences was tested
    note: str  # what the methods of the table share; '' for a headline, whose table stands below


def key_results(content: Content, chapter: Chapter) -> list[KeyResult]:
    """A result for each question, from its first table; those with a test come first."""
    results = []
    for question in content.questions:
        grids = [grid for grid in captions.grids(chapter) if grid.question == question.name]
        for grid in grids[:1]:
            asks = question.asks or question.label
            note = "" if question.headline else capital(grid.note)
            tested = any(map(captions.tested, grid.contrasts))
            results.append(KeyResult(asks, answer(grid, question), grid.name, tested, note))
    return sorted(results, key=lambda result: not result.tested)


def answer(grid: Grid, question: Question) -> list[str]:
    """Sentences on the differences of a table, or on its means if it has none."""
    sentences = []
    for turned in (False, True):
        every = [one for one in grid.contrasts if one.turned == turned]
        alike = [one for one in every if one.row not in grid.levels] or every
        references = list(dict.fromkeys(one.against for one in alike))[:REFERENCES]
        for against in references:
            here = [one for one in alike if one.against == against]
            sentences.append(_difference(grid, here, ordered=question.figure in ORDERED))
    return sentences or [means(grid)]


def _difference(grid: Grid, contrasts: Sequence[Contrast], *, ordered: bool) -> str:
    """One sentence on the differences from one reference, in the column with most tests."""
    columns = list(dict.fromkeys(one.column for one in contrasts))
    tests = {
        column: sum(captions.tested(one) for one in contrasts if one.column == column)
        for column in columns
    }
    most = max(tests.values())
    column = [name for name in columns if tests[name] == most][-1]
    here = [one for one in contrasts if one.column == column]
    tested = [one for one in here if captions.tested(one)] or here
    several = len(grid.rows if here[0].turned else grid.columns) > 1
    where = f" at {column}" if several else ""
    if ordered:
        return f"{statement(tested[-1], where)}."
    significant = [one for one in tested if _significant(one)]
    largest = max(significant or tested, key=lambda one: abs(one.mean))
    text = statement(largest, where)
    if len(tested) > 1 and captions.tested(largest):
        be = "is" if len(significant) == 1 else "are"
        many = f"{counted(len(tested), 'tested difference')} from {named(largest.against)}"
        if significant:
            found = "this one" if len(significant) == 1 else "this is the largest of them"
            text += f". Of {many}{where}, {len(significant)} {be} significant: {found}"
        else:
            text += f". Of {many}{where}, none is significant; this one is the largest"
    return f"{text}."


def statement(contrast: Contrast | Answer, where: str = "") -> str:
    """What a difference is, with its interval, and whether it is significant."""
    both = (
        (contrast.row, contrast.against)
        if isinstance(contrast, Contrast)
        else (contrast.first, contrast.second)
    )
    first, second = map(named, both)
    if contrast.mean is None:
        return f"There are no runs yet that compare {first} with {second}"
    spread = "" if contrast.half is None else f" ± {contrast.half:.2f}"
    seeds = counted(contrast.count, "seed")
    tested = f"{p_value(contrast.corrected)}, {seeds}" if contrast.corrected is not None else seeds
    if _significant(contrast):
        return (
            f"Test accuracy{where} is {abs(contrast.mean):.2f}{spread} points "
            f"{captions.verdict(contrast)} with {first} than with {second} (significant: {tested})"
        )
    signed = f"{contrast.mean:+z.2f}".replace("-", "−")
    if captions.tested(contrast):
        return (
            f"The difference between {first} and {second}{where} is not significant "
            f"({signed}{spread} points, {tested})"
        )
    return (
        f"Test accuracy{where}, {first} minus {second}: {signed}{spread} points "
        f"({seeds}; {captions.verdict(contrast)})"
    )


def named(label: str) -> str:
    """In quotation marks where the label has a comma, so that a reader sees where it ends."""
    return f"“{label}”" if "," in label else label


def means(grid: Grid) -> str:
    """Means with their intervals, in the first column that most rows have; no order is claimed."""
    columns = [
        [(row, cell) for row, cells in zip(grid.rows, grid.cells, strict=True)
         if (cell := cells[place])]
        for place in range(len(grid.columns))
    ]  # fmt: skip
    place = max(range(len(columns)), key=lambda number: (len(columns[number]), -number))
    filled = columns[place]
    where = f" ({grid.columns[place]})" if len(grid.columns) > 1 else ""
    if len(filled) > LISTED:
        low, high = (pick(filled, key=lambda one: one[1].mean) for pick in (min, max))
        text = f"ranges from {_mean(*low)} to {_mean(*high)}"
    else:
        text = f"is {'; '.join(_mean(*one) for one in filled)}"
    note = "" if len(filled) < 2 else " These means were not compared by a test."
    return f"Test accuracy{where} {text}.{note}"


def scaled(curves: Sequence[AlphaCurve]) -> str:
    """What the first sweep of α chose, and what that changed on test data."""
    curve = curves[0]
    runs = f" There are {len(curves)} sweeps in all." if len(curves) > 1 else ""
    signed = f"{curve.test - curve.as_trained:+z.2f}".replace("-", "−")
    return (
        f"α = {curve.chosen:g} has the best validation accuracy for {named(curve.label)}. Its test "
        f"accuracy is {curve.test:.2f} %, {signed} points from the trained model's "
        f"(1 run; {captions.TOO_FEW}).{runs}"
    )


def _mean(row: str, cell: Cell) -> str:
    spread = "" if cell.half is None else f" ± {cell.half:.2f}"
    notes = captions.untrained(cell) or counted(len(cell.seeds), "seed")
    return f"{cell.mean:.2f}{spread} % for {named(row)} ({notes})"


def _significant(contrast: Contrast | Answer) -> bool:
    return captions.verdict(contrast) in ("higher", "lower")


def capital(text: str) -> str:
    """With a capital first letter, which labels lack."""
    return text[:1].upper() + text[1:]
