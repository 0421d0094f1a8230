"""The report as one page: tables written out here, charts drawn by the page from data inside it.

The page asks the network for nothing, and forbids itself to. Whatever comes from records or from
the user's YAML file is text, never markup: jinja2 escapes it, and so does the data's encoding.
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
from fedlens.reporting.study.labels import counted
from fedlens.reporting.study.statistics import DECIDED, FEWEST

SCRIPTS = ("tools", "lines", "dots", "drawings", "page")  # in the order in which they need another
NONE = "–"
UNREAD = ("per_class",)  # long lists in records that no chart shows

PARTS = ("overview", "curves", "comparisons", "masks", "arithmetic", "clients", "audit", "runs")
TABS = {part: part.capitalize() for part in PARTS}
QUESTIONS = {  # chapter → what is asked, to name what no run answers
    "central": "central baselines",
    "schedules": "learning-rate schedules",
    "heads": "heads on the frozen backbone",
    "under_heads": "heads under which the backbone is trained",
    "heterogeneity": "heterogeneity",
    "local_steps": "local steps",
    "mask_rules": "mask rules",
    "sparsity": "density",
    "calibration_rounds": "calibration rounds",
    "algorithms": "ways to aggregate",
}
SUMMARY = {  # of a partition
    "sizes": "images",
    "classes_per_client": "classes",
    "label_entropy": "label entropy, nats",
    "emd": "distance to all data",
}
FACTS = {"lr": "learning rate", "ridge_lambda": "ridge λ"}  # others are words already
HEAT = ("heterogeneity", "local_steps")  # two ordered axes: colours show what a chart would


def page(content: Content) -> str:
    """The whole page; the same content gives the same bytes."""
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
        heat=HEAT,
        partition_words=SUMMARY,
        fact_words=FACTS,
        summary=summary(content),
        tuned=captions.tuned(content.chapters),
        limit=DECIDED,
        fewest=FEWEST,
        faults=sum(len(check.violations) for check in content.audit),
        first=_first(content),
        data=Markup(_data(content)),
        style=Markup(_asset("style.css")),
        script=Markup("\n".join(_asset(f"{name}.js") for name in SCRIPTS)),
    )


def summary(content: Content) -> str:
    """What the records hold, in a paragraph; no number that they do not."""
    seeds = sorted({run.seed for run in content.runs})
    said = [
        f"This report is drawn from {counted(len(content.runs), 'finished run')} in "
        f"{counted(len(content.chapters), 'setting')}, over {_seeds(seeds)}."
    ]
    said += [f"On {c.setting}: {'; '.join(told)}." for c in content.chapters if (told := _told(c))]
    failed = sum(not check.passed for check in content.audit)
    checks = counted(len(content.audit), "check")
    said.append(
        f"Of {checks} in the audit, {failed} found violations."
        if failed
        else f"The audit found no violation in {checks}."
    )
    return " ".join(said)


def _told(chapter: Chapter) -> list[str]:
    """The range of the six models, or of the largest table; how many rules could be told apart."""
    said = []
    widest = max(chapter.grids, key=lambda grid: len(_named(grid)), default=None)
    if grid := chapter.headline or widest:
        found = _named(grid)
        low, high = (_reached(*pick(found, key=lambda at: at[1].mean)) for pick in (min, max))
        said.append(f"{grid.title}, " + (low if len(found) == 1 else f"from {low} to {high}"))
    rules = [c for grid in chapter.grids if grid.chapter == "mask_rules" for c in grid.contrasts]
    if rules:
        decided = sum(captions.verdict(contrast) in ("higher", "lower") for contrast in rules)
        said.append(
            f"of {counted(len(rules), 'difference')} between rows of the mask-rule tables, over "
            f"{captions.span(contrast.count for contrast in rules)}, {decided} "
            f"{'is' if decided == 1 else 'are'} decided (p < {DECIDED:g} after Holm's correction, "
            f"over at least {FEWEST} seeds)"
        )
    return said


def _named(grid: Grid) -> list[tuple[str, Cell]]:
    return [
        (f"{row}, {column}", cell)
        for row, cells in zip(grid.rows, grid.cells, strict=True)
        for column, cell in zip(grid.columns, cells, strict=True)
        if cell
    ]


def _reached(name: str, cell: Cell) -> str:
    told = [name, captions.untrained(cell) or counted(len(cell.seeds), "seed")]
    return f"{cell.mean:.2f} % ({'; '.join(told)})"


def missing(chapter: Chapter) -> list[str]:
    """The study's questions that no table of this setting answers."""
    found = {grid.chapter for grid in chapter.grids}
    return [said for name, said in QUESTIONS.items() if name not in found]


def share(value: float, low: float, high: float) -> str:
    """Where a value lies between two others, from 0 to 1: how deep its colour is."""
    place = (value - low) / (high - low) if high > low else 0.0
    return f"{min(max(place, 0.0), 1.0):.3f}"


def extent(grid: Grid) -> tuple[float, float]:
    means = [cell.mean for row in grid.cells for cell in row if cell]
    return min(means), max(means)


def distinct(items: Sequence[MaskMap | AlphaCurve]) -> list[str]:
    """Their labels; where one repeats, also the hash that ends the run's name."""
    counts = Counter(item.label for item in items)
    return [
        item.label if counts[item.label] == 1 else f"{item.label} ({item.run.rpartition('_')[2]})"
        for item in items
    ]


def titles(items: Sequence[Grid | CurveSet], chapter: Chapter) -> list[str]:
    """Of tables, or of the curves of their cells; where one repeats, also what holds for it."""
    counts = Counter(item.title for item in items)
    notes = {grid.name: grid.note.rstrip(".") for grid in chapter.grids}
    return [
        item.title if counts[item.title] == 1 else f"{item.title}: {notes[item.name]}"
        for item in items
    ]


def deepest(masks: Sequence[MaskMap]) -> float:
    """The largest share of any map, so that colours can be compared between maps."""
    return max(held for mask in masks for row in mask.density for held in row if held is not None)


def _first(content: Content) -> int:
    """The setting to begin with: one with models of the study if there is any."""
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
    """What charts are drawn from, as JSON that cannot end the element that holds it."""
    told = _finite([asdict(chapter) for chapter in content.chapters])
    text = json.dumps(told, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _finite(value: Any) -> Any:
    """All digits are kept: rounded twice, a number in a chart need not be the table's."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(held) for key, held in value.items() if key not in UNREAD}
    if isinstance(value, list | tuple):
        return [_finite(held) for held in value]
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
    "untrained": captions.untrained,
    "sent": captions.sent,
    "ties": captions.ties,
    "chance": captions.chance,
    "classes": captions.classes,
    "missing": missing,
    "share": share,
    "extent": extent,
    "distinct": distinct,
    "titles": titles,
    "deepest": deepest,
}
