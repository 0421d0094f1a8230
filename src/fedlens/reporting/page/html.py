"""The report as one HTML page: tables are written here, charts are drawn by the page's script.

The page loads nothing from the network, and its security policy forbids it. Texts from records and
from the user's YAML file are escaped, in the markup by jinja2 and in the data by their encoding.
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from fedlens.reporting.study import captions, key_results, tables
from fedlens.reporting.study.content import (
    AlphaCurve,
    Answer,
    Chapter,
    Content,
    CurveSet,
    Grid,
    MaskMap,
)
from fedlens.reporting.study.key_results import KeyResult
from fedlens.reporting.study.labels import NONE, counted
from fedlens.reporting.study.statistics import MIN_SEEDS, SIGNIFICANCE

SCRIPTS = ("tools", "lines", "dots", "drawings", "page")  # each needs those before it
UNUSED = ("per_class",)  # long lists in records that no chart shows

PARTS = ("overview", "curves", "comparisons", "masks", "arithmetic", "clients", "audit", "runs")
TABS = {part: part.capitalize() for part in PARTS} | {"overview": "Answers"}
PARTITION_LABELS = {  # statistics of a partition
    "sizes": "images",
    "classes_per_client": "classes",
    "label_entropy": "label entropy, nats",
    "emd": "distance from all data",
}
FACT_LABELS = {  # the other keys can be read as they are
    "lr": "learning rate",
    "l2": "ridge λ",
    "validation": "validation fraction",
}


def page(content: Content) -> str:
    """The page as HTML; the same content gives the same bytes."""
    return _template().render(
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


@cache
def _template() -> Template:
    """Compiled once: that takes longer than to write a page."""
    environment = Environment(
        loader=PackageLoader("fedlens.reporting.page", ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= FILTERS
    environment.tests |= {"tested": captions.tested}
    return environment.get_template("template.html")


def summary(content: Content) -> str:
    """What the records contain, in a line."""
    seeds = sorted({run.seed for run in content.runs})
    unfinished = len(content.unfinished)
    left_out = f"; {counted(unfinished, 'unfinished run')} left out" if unfinished else ""
    return (
        f"{counted(len(content.runs), 'finished run')} in "
        f"{counted(len(content.chapters), 'setting')}, {_seeds(seeds)}{left_out}."
    )


def answered(chapter: Chapter, content: Content) -> list[KeyResult]:
    """The answers of a setting, as the first screen shows them."""
    return key_results.key_results(content, chapter)


def place(grid: str, chapter: Chapter) -> int | str:
    """Where a script finds a table of this name: 'headline' or its number among the others."""
    names = [one.name for one in chapter.grids]
    return names.index(grid) if grid in names else "headline"


def forest(answers: Sequence[Answer]) -> dict[str, Any]:
    """Differences as shares of one axis that contains zero: where their dots and bars lie."""
    known = [(one, one.mean) for one in answers if one.mean is not None]
    ends = [mean + sign * (one.half or 0.0) for one, mean in known for sign in (-1, 1)]
    low, high = min([0.0, *ends]), max([0.0, *ends])
    room = 0.06 * (high - low) or 1.0
    low, high = low - room, high + room

    def at(value: float) -> str:
        return f"{100 * (value - low) / (high - low):.2f}%"

    return {
        "zero": at(0.0),
        "rows": [
            {
                "answer": one,
                "dot": None if one.mean is None else at(one.mean),
                "low": None if one.mean is None else at(one.mean - (one.half or 0.0)),
                "high": None if one.mean is None else at(one.mean + (one.half or 0.0)),
            }
            for one in answers
        ],
    }


def unanswered(chapter: Chapter, content: Content) -> list[str]:
    """The questions that no table of this setting answers, with the suites that would."""
    answered = {grid.question for grid in chapter.grids}
    return [
        f"{one.label} ({one.suite})" if one.suite else one.label
        for one in content.questions
        if one.name not in answered and not one.headline
    ]


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


def _megabytes(value: float) -> str:
    if value >= 1000:
        return f"{value / 1000:,.1f} GB"
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
    "probability": tables.probability,
    "megabytes": _megabytes,
    "counted": counted,
    "verdict": captions.verdict,
    "asked": captions.asked,
    "answered": answered,
    "place": place,
    "forest": forest,
    "scaled": key_results.scaled,
    "statement": key_results.statement,
    "capital": key_results.capital,
    "untrained": captions.untrained,
    "sent": captions.sent,
    "ties": captions.ties,
    "chance": captions.chance,
    "classes": captions.classes,
    "unanswered": unanswered,
    "audited": captions.audited,
    "share": share,
    "extent": extent,
    "distinct": distinct,
    "titles": titles,
    "deepest": deepest,
}
