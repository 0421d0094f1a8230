"""The report as one HTML page: tables are written here, charts are drawn by the page's script.

The page loads nothing from the network, and its security policy forbids it. Texts from records and
from the user's YAML file are escaped, in the markup by jinja2 and in the data by their encoding.
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fedlens.reporting.study import captions
from fedlens.reporting.study.content import (
    AlphaCurve,
    Cell,
    Chapter,
    Content,
    CurveSet,
    Grid,
    MaskMap,
)
from fedlens.reporting.study.labels import NONE, counted
from fedlens.reporting.study.statistics import MIN_SEEDS, SIGNIFICANCE

SCRIPTS = ("tools", "lines", "dots", "drawings", "page")  # each needs those before it
UNUSED = ("per_class",)  # long lists in records that no chart shows

PARTS = ("overview", "curves", "comparisons", "masks", "arithmetic", "clients", "audit", "runs")
TABS = {part: part.capitalize() for part in PARTS}
PARTITION_LABELS = {  # statistics of a partition
    "sizes": "images",
    "classes_per_client": "classes",
    "label_entropy": "label entropy, nats",
    "emd": "distance to all data",
}
FACT_LABELS = {"lr": "learning rate", "l2": "ridge λ"}  # the other keys can be read as they are


def page(content: Content) -> str:
    """The page as HTML; the same content gives the same bytes."""
    environment = Environment(
        loader=PackageLoader("fedlens.reporting.page", ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= FILTERS
    return environment.get_template("template.html").render(
        content=content,
        tabs=TABS,
        partition_labels=PARTITION_LABELS,
        fact_labels=FACT_LABELS,
        summary=summary(content),
        tuned=captions.tuned(content.chapters),
        limit=SIGNIFICANCE,
        min_seeds=MIN_SEEDS,
        family=captions.family(content),
        violations=sum(len(check.violations) for check in content.audit),
        first=_first(content),
        data=Markup(_data(content)),
        style=Markup(_asset("style.css")),
        script=Markup("\n".join(_asset(f"{name}.js") for name in SCRIPTS)),
    )


def summary(content: Content) -> str:
    """A paragraph on what the records contain."""
    seeds = sorted({run.seed for run in content.runs})
    sentences = [
        f"This report is made from {counted(len(content.runs), 'finished run')} in "
        f"{counted(len(content.chapters), 'setting')}, over {_seeds(seeds)}."
    ]
    sentences += [
        f"On {chapter.setting}: {'; '.join(parts)}."
        for chapter in content.chapters
        if (parts := _highlights(content, chapter))
    ]
    failed = sum(not check.passed for check in content.audit)
    checks = counted(len(content.audit), "check")
    sentences.append(
        f"Of {checks} in the audit, {failed} found violations."
        if failed
        else f"The audit found no violation in {checks}."
    )
    return " ".join(sentences)


def _highlights(content: Content, chapter: Chapter) -> list[str]:
    """The range of the headline or of the largest table, and counts of significant differences."""
    parts = []
    largest = max(chapter.grids, key=lambda grid: len(_named(grid)), default=None)
    if grid := chapter.headline or largest:
        named = _named(grid)
        low, high = (_reached(*pick(named, key=lambda at: at[1].mean)) for pick in (min, max))
        parts.append(f"{grid.title}, " + (low if len(named) == 1 else f"from {low} to {high}"))
    for question in content.questions:
        grids = [grid for grid in chapter.grids if grid.question == question.name]
        contrasts = [contrast for grid in grids for contrast in grid.contrasts]
        if question.summary and contrasts:
            significant = sum(captions.verdict(one) in ("higher", "lower") for one in contrasts)
            parts.append(
                f"{question.label}: of {counted(len(contrasts), 'difference')} between rows, over "
                f"{captions.span(contrast.count for contrast in contrasts)}, {significant} "
                f"{'is' if significant == 1 else 'are'} significant (p < {SIGNIFICANCE:g} after "
                f"Holm's correction, over at least {MIN_SEEDS} seeds)"
            )
    return parts


def _named(grid: Grid) -> list[tuple[str, Cell]]:
    return [
        (f"{row}, {column}", cell)
        for row, cells in zip(grid.rows, grid.cells, strict=True)
        for column, cell in zip(grid.columns, cells, strict=True)
        if cell
    ]


def _reached(name: str, cell: Cell) -> str:
    notes = [name, captions.untrained(cell) or counted(len(cell.seeds), "seed")]
    return f"{cell.mean:.2f} % ({'; '.join(notes)})"


def unanswered(chapter: Chapter, content: Content) -> list[str]:
    """Labels of the questions that no table of this setting answers."""
    answered = {grid.question for grid in chapter.grids}
    return [one.label for one in content.questions if one.name not in answered and not one.headline]


def share(value: float, low: float, high: float) -> str:
    """Where a value lies between two others, from 0 to 1: the strength of its colour."""
    place = (value - low) / (high - low) if high > low else 0.0
    return f"{min(max(place, 0.0), 1.0):.3f}"


def extent(grid: Grid) -> tuple[float, float]:
    means = [cell.mean for row in grid.cells for cell in row if cell]
    return min(means), max(means)


def distinct(items: Sequence[MaskMap | AlphaCurve]) -> list[str]:
    """Their labels; repeated ones with the hash that ends the run's name."""
    counts = Counter(item.label for item in items)
    return [
        item.label if counts[item.label] == 1 else f"{item.label} ({item.run.rpartition('_')[2]})"
        for item in items
    ]


def titles(items: Sequence[Grid | CurveSet], chapter: Chapter) -> list[str]:
    """Titles of tables or of their curves; repeated ones with what the table's methods share."""
    counts = Counter(item.title for item in items)
    notes = {grid.name: grid.note.rstrip(".") for grid in chapter.grids}
    return [
        item.title if counts[item.title] == 1 else f"{item.title}: {notes[item.name]}"
        for item in items
    ]


def deepest(masks: Sequence[MaskMap]) -> float:
    """The highest density of all maps, so that colours can be compared between maps."""
    return max(one for mask in masks for row in mask.density for one in row if one is not None)


def _first(content: Content) -> int:
    """The setting to show first: one with a headline, if there is any."""
    return next((i for i, chapter in enumerate(content.chapters) if chapter.headline), 0)


def _accuracy(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def _signed(value: float) -> str:
    return f"{value:+z.2f}".replace("-", "−")


def _decimal(value: float | None, digits: int = 2) -> str:
    return NONE if value is None else f"{value:z.{digits}f}".replace("-", "−")


def _probability(value: float | None) -> str:
    if value is None:
        return NONE
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def _megabytes(value: float) -> str:
    return f"{value:,.0f} MB" if value >= 10 else f"{value:.2g} MB"


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'' if len(seeds) == 1 else 's'} {', '.join(map(str, seeds))}"


def _data(content: Content) -> str:
    """The charts' data, as JSON that cannot close the element that contains it."""
    data = _finite([asdict(chapter) for chapter in content.chapters])
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _finite(value: Any) -> Any:
    """All digits are kept: rounded twice, a chart's number could differ from the table's."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items() if key not in UNUSED}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value


def _asset(name: str) -> str:
    return files("fedlens.reporting.page").joinpath(name).read_text(encoding="utf-8")


FILTERS = {
    "accuracy": _accuracy,
    "signed": _signed,
    "decimal": _decimal,
    "probability": _probability,
    "megabytes": _megabytes,
    "counted": counted,
    "verdict": captions.verdict,
    "asked": captions.asked,
    "untrained": captions.untrained,
    "sent": captions.sent,
    "ties": captions.ties,
    "chance": captions.chance,
    "classes": captions.classes,
    "unanswered": unanswered,
    "share": share,
    "extent": extent,
    "distinct": distinct,
    "titles": titles,
    "deepest": deepest,
}
