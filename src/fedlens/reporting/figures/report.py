"""All figures of a report, with their names, captions and order."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, TypeVar

from matplotlib.figure import Figure

from fedlens.registry import mask_rule
from fedlens.reporting.figures.accuracy import grid_figure
from fedlens.reporting.figures.alpha import alpha_curve_figure
from fedlens.reporting.figures.analyses import FIGURES
from fedlens.reporting.figures.learning_curves import (
    ALONG,
    Panels,
    arranged,
    comparable,
    curve_figure,
    drawable,
    measured,
    observation_figure,
    panel_side,
    parts,
)
from fedlens.reporting.figures.masks import maps_figure
from fedlens.reporting.figures.palette import Palette, palette
from fedlens.reporting.figures.partition import holdings_figure
from fedlens.reporting.figures.style import FORMATS, paper, render
from fedlens.reporting.study.captions import grids
from fedlens.reporting.study.content import (
    Chapter,
    Content,
    CurveSet,
    Grid,
    MaskMap,
    PartitionPicture,
    Question,
)

Kind = Literal[
    "grid", "curves", "bytes", "observations", "mask", "alpha", "partition", "finding"
]  # fmt: skip

EACH = 12  # drawings that are worth a process
MOST = 6  # mask maps, and partitions, of a setting
OVER = {
    "rounds": "Validation accuracy over rounds",
    "steps": "Validation accuracy over local steps",
    "bytes": "Validation accuracy over megabytes sent, including those before the first round",
}
T = TypeVar("T")


@dataclass(frozen=True)
class Drawing:
    """A figure to be drawn by `draw`; `name` is the stem of its files, unique in a report."""

    name: str
    caption: str
    topic: str  # the name of a question, or masks, arithmetic, partitions
    setting: str
    kind: Kind
    draw: Callable[[], Figure]


def figures(content: Content) -> list[Drawing]:
    """In the order of the report: setting by setting, tables first, each with its curves."""
    colours = palette(content)
    names: set[str] = set()
    drawings = []
    for number, chapter in enumerate(content.chapters):
        suffix = "" if number == 0 else f"-setting{number + 1}"
        for drawing in _of_chapter(content, chapter, colours, suffix):
            name = _free(drawing.name, names)
            names.add(name)
            drawings.append(replace(drawing, name=name, draw=partial(_styled, drawing.draw)))
    return drawings


def write(
    drawings: Sequence[Drawing], folder: Path, formats: Sequence[str] = FORMATS
) -> list[Path]:
    """Every drawing in every format, as folder/NAME.FORMAT; many are drawn by several processes.

    Files are not synced one by one, which would take longer than drawing them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draw = partial(_write_one, folder=folder, formats=tuple(formats))
    workers = min(os.cpu_count() or 1, len(drawings) // EACH)
    if workers < 2:
        written = [draw(drawing) for drawing in drawings]
    else:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            written = list(pool.map(draw, drawings))
    return [path for paths in written for path in paths]


def _write_one(drawing: Drawing, *, folder: Path, formats: Sequence[str]) -> list[Path]:
    paths = [folder / f"{drawing.name}.{form}" for form in formats]
    with paper():  # ticks are made and measured only when a figure is saved
        figure = drawing.draw()
        for path, form in zip(paths, formats, strict=True):
            render(figure, path, form)
    return paths


def _of_chapter(
    content: Content, chapter: Chapter, colours: Palette, suffix: str
) -> Iterator[Drawing]:
    """`suffix` distinguishes names that every setting numbers from one."""
    made = partial(Drawing, setting=chapter.setting)
    curves = {one.name: one for one in chapter.curves}
    for grid in grids(chapter):
        question = content.question(grid)
        if sum(cell is not None for row in grid.cells for cell in row) > 1:
            yield made(
                name=grid.name, caption=_caption(grid), topic=grid.question, kind="grid",
                draw=partial(grid_figure, grid, question, colours),
            )  # fmt: skip
        if grid.name in curves:
            yield from _of_curves(curves[grid.name], grid, question, colours, made)
    maps = _first_of_each_rule(chapter.masks)[:MOST]
    if len(maps) > 1:
        yield made(
            name=f"masks{suffix}", topic="masks", kind="mask", draw=partial(maps_figure, maps),
            caption="Weights trained, in percent, by layer and kind, of each mask.",
        )  # fmt: skip
    for one in maps:
        yield made(
            name=f"{one.name}{suffix}", topic="masks", kind="mask",
            caption=f"Weights trained, in percent, by layer and kind: {one.label}.",
            draw=partial(maps_figure, [one]),
        )  # fmt: skip
    for curve in chapter.alphas:
        yield made(
            name=f"{curve.name}{suffix}", topic="arithmetic", kind="alpha",
            caption=f"{curve.base} + α(run − {curve.base}): {curve.label}. α is chosen on "
            "validation; the star is its test accuracy.",
            draw=partial(alpha_curve_figure, curve),
        )  # fmt: skip
    for finding in chapter.findings:
        yield made(
            name=f"{finding.name}{suffix}", topic="arithmetic", kind="finding",
            caption=f"{finding.facts[0][1] if finding.facts else finding.kind}: {finding.label}.",
            draw=partial(FIGURES[finding.kind], finding.record),
        )  # fmt: skip
    for picture in _spread(chapter.partitions, MOST):
        yield made(
            name=f"{picture.name}{suffix}", topic="partitions", kind="partition",
            caption=f"Classes that each client holds: {picture.label}.",
            draw=partial(holdings_figure, _partition_record(picture)),
        )  # fmt: skip


def _of_curves(
    curve_set: CurveSet,
    grid: Grid,
    question: Question,
    colours: Palette,
    made: Callable[..., Drawing],
) -> Iterator[Drawing]:
    several = sum(cell is not None for row in grid.cells for cell in row) > 1
    about = f"{curve_set.title}. {grid.note}" if several else f"{curve_set.title}."
    over = OVER | (
        {"rounds": "Validation accuracy over epochs"} if curve_set.unit == "epoch" else {}
    )
    for along in ALONG:
        curves = drawable(curve_set, along)
        shown = comparable(arranged(curves, grid, panel_side(question, along)), along)
        for part in parts(shown):
            yield made(
                name=f"{curve_set.name}-{along}", topic=curve_set.question,
                kind="bytes" if along == "bytes" else "curves", caption=f"{over[along]}. {about}",
                draw=partial(curve_figure, part, _lines(shown), along, colours),
            )  # fmt: skip
    observed = [observation for observation in curve_set.observations if measured([observation])]
    if observed:
        lines = arranged(observed, grid, panel_side(question))
        for piece in parts(lines):
            yield made(
                name=f"{curve_set.name}-observations", topic=curve_set.question,
                kind="observations",
                caption=f"Drift and agreement of clients, round by round. {about}",
                draw=partial(observation_figure, piece, _lines(lines), colours),
            )  # fmt: skip


def _styled(draw: Callable[[], Figure]) -> Figure:
    with paper():
        return draw()


def _free(name: str, taken: set[str]) -> str:
    """The name itself, or with the first number that makes it new."""
    numbered = (f"{name}-{number}" for number in count(2))
    return next(candidate for candidate in chain([name], numbered) if candidate not in taken)


def _caption(grid: Grid) -> str:
    seeds = {len(cell.seeds) for row in grid.cells for cell in row if cell}
    levels = f"Lines without dots: {'; '.join(grid.levels)}." if grid.levels else ""
    over = "One seed, no interval." if seeds == {1} else "Mean and interval over seeds."
    return " ".join(filter(None, [f"{grid.title}.", grid.note, levels, over]))


def _lines(shown: Panels[Any]) -> list[str]:
    return list(dict.fromkeys(line for panel in shown.values() for line in panel))


def _first_of_each_rule(masks: Sequence[MaskMap]) -> list[MaskMap]:
    """One mask of every rule, then a second of each, …; rules in the registry's order."""
    known = [row.label for row in mask_rule]
    counts: Counter[str] = Counter()
    order = []
    for place, one in enumerate(masks):
        counts[one.rule] += 1
        rank = known.index(one.rule) if one.rule in known else len(known)
        order.append((counts[one.rule], rank, one.rule, place))
    return [masks[place] for *_, place in sorted(order)]


def _spread(items: Sequence[T], most: int) -> list[T]:
    """At most so many, evenly spread from the first to the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def _partition_record(picture: PartitionPicture) -> dict[str, Any]:
    """As in a run's folder, with the lists that follow from its histogram."""
    statistics: dict[str, Any] = {
        "clients": picture.clients,
        "samples": picture.samples,
        "summary": picture.summary,
    }
    if not picture.histogram:
        return {"name": picture.label, "statistics": statistics}
    statistics["sizes"] = [sum(held) for held in picture.histogram]
    statistics["classes_per_client"] = [sum(n > 0 for n in held) for held in picture.histogram]
    return {"name": picture.label, "statistics": statistics, "histogram": picture.histogram}
