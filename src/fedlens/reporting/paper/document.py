"""Content → report.tex: the template with values and sentences from the records.

In the template << >> is a value, <% %> a statement; all values are LaTeX already.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

from fedlens.reporting.figures import report
from fedlens.reporting.paper import audit, own_texts, prose
from fedlens.reporting.paper.floats import Placed
from fedlens.reporting.paper.results import placed_figures, results
from fedlens.reporting.study import captions, key_results, tables
from fedlens.reporting.study.content import About, Answer, Chapter, Content
from fedlens.reporting.study.statistics import MIN_SEEDS, SIGNIFICANCE

TEMPLATE, BIBLIOGRAPHY = "report.tex.j2", "references.bib"
COLUMNS = 3  # settings described side by side
VALUES = 6  # of one fact
VERDICTS = 6  # questions in the conclusion
FACTS = {  # name in Content → label in LaTeX
    "clients": "Clients $K$",
    "participation": "Share $C$ per round",
    "local_steps": "Local steps $J$",
    "batch_size": "Batch size",
    "lr": "Learning rate $\\eta$",
    "schedule": "Learning-rate schedule",
    "momentum": "Momentum $\\mu$",
    "weight_decay": "Weight decay $\\beta$",
    "l2": "Ridge $\\lambda$",
    "validation": "Held out for validation",
    "density": "Density $\\rho$",
    "calibration_rounds": "Calibration rounds $R$",
    "calibration_source": "Calibrated on",
    "calibration_examples": "Calibration examples",
    "epochs": "Epochs of central training",
    "seeds": "Seeds",
}


def write(content: Content, folder: Path, figures: Path) -> None:
    """Writes report.tex, references.bib and places for the author's words to `folder`.

    Its subfolder `figures` holds the PDFs.
    """
    drawings = [
        drawing for drawing in report.figures(content)
        if (figures / f"{drawing.name}.pdf").exists()
    ]  # fmt: skip
    text = render(content, placed_figures(content, drawings, figures, folder))
    (folder / "report.tex").write_text(text, encoding="utf-8")
    (folder / BIBLIOGRAPHY).write_text(_data(BIBLIOGRAPHY), encoding="utf-8")
    own_texts.begin(folder)


def render(content: Content, placed: dict[str, list[Placed]]) -> str:
    every = results(content, placed)
    return _template().render(
        title=prose.tex(content.about.title),
        date=prose.tex(content.about.date),
        authors=_authors(content.about),
        abstract=prose.tex(content.about.abstract),
        size=_size(content),
        measured=_measured(content, every),
        headline=_headline(content),
        settings=_settings(content.chapters),
        results=every,
        answered={name: bool(section["text"]) for name, section in every.items()},
        nothing=not any(section["text"] for section in every.values()),
        other_questions=[one for one in every.values() if one["title"] and one["text"]],
        splits=_splits(content.chapters),
        audit=audit.checked(content.audit),
        violations=audit.violations(content.audit),
        verdict=audit.verdict(content.audit),
        verdicts=_verdicts(content),
        limits=_limits(content),
        tuned=prose.tex(captions.tuned(content.chapters)),
        limit=prose.number(SIGNIFICANCE),
        min_seeds=prose.number(MIN_SEEDS),
        family=prose.tex(captions.family(content)),
        asked=_asked(content.asked),
    )


@cache
def _template() -> Template:
    environment = Environment(
        block_start_string="<%",
        block_end_string="%>",
        variable_start_string="<<",
        variable_end_string=">>",
        comment_start_string="<#",
        comment_end_string="#>",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
        autoescape=False,  # it would escape for HTML
    )
    return environment.from_string(_data(TEMPLATE))


def _data(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _authors(about: About) -> list[dict[str, str]]:
    """One entry per affiliation, with its authors and their IDs."""
    together: dict[str, list[str]] = {}
    for author in about.authors:
        known = f" ({prose.tex(author.id)})" if author.id else ""
        together.setdefault(author.affiliation, []).append(prose.tex(author.name) + known)
    return [
        {"names": prose.joined(names), "affiliation": prose.tex(affiliation)}
        for affiliation, names in together.items()
    ]


def _size(content: Content) -> str:
    seeds = {run.seed for run in content.runs}
    return (
        f"{prose.counted(len(content.runs), 'finished run')} in "
        f"{prose.counted(len(content.chapters), 'setting')} with "
        f"{prose.counted(len(seeds), 'seed')}"
    )


def _measured(content: Content, sections: Mapping[str, Mapping[str, str]]) -> str:
    """What the runs measure, as the abstract says it; '' where they answer none of it."""
    answered = {name for name, section in sections.items() if section["text"]}
    several = any(len(chapter.partitions) > 1 for chapter in content.chapters)
    aims = [
        ("how much accuracy heterogeneous data cost",
         several and answered & {"models", "heterogeneity", "steps", "heads"}),
        ("what changes if only a small share of the weights is trained",
         answered & {"rules", "density", "calibration"}),
        ("what the arithmetic of updates shows",
         answered & {"arithmetic", "aggregators", "drift", "conflicts", "clients"}),
    ]  # fmt: skip
    said = [aim for aim, there in aims if there]
    return f"We measure {prose.joined(said)}." if said else ""


def _headline(content: Content) -> str:
    for chapter in content.chapters:
        if chapter.headline:
            return f"In the setting {prose.tex(chapter.setting)}, {prose.models(chapter.headline)}"
    return ""


def _settings(chapters: Sequence[Chapter]) -> dict[str, Any]:
    """Rows of a table with a column for each of the first settings."""
    shown = chapters[:COLUMNS]
    rows = [
        [label, *(_values(chapter.facts.get(name, [])) for chapter in shown)]
        for name, label in FACTS.items()
        if any(chapter.facts.get(name) for chapter in shown)
    ]
    left_out = [prose.tex(chapter.setting) for chapter in chapters[COLUMNS:]]
    return {
        "names": [prose.tex(chapter.setting) for chapter in shown],
        "rows": rows,
        "width": f"{0.55 / max(1, len(shown)):.3f}",  # of a column, as a share of the page's column
        "left_out": left_out,
    }


def _splits(chapters: Sequence[Chapter]) -> str:
    """How the training images are split over clients, partition by partition."""
    sentences = []
    for chapter in chapters[:COLUMNS]:
        texts = [
            f"{prose.emphasised(one.label)} ({prose.counted(one.clients, 'client')}"
            f"{f', {prose.tex(held)} each' if (held := captions.held_classes(one)) else ''})"
            for one in chapter.partitions
        ]
        if texts:
            where = f"In the setting {prose.tex(chapter.setting)}, the"
            where = where if len(chapters) > 1 else "The"
            sentences.append(f"{where} training images are split by {prose.joined(texts)}.")
    return " ".join(sentences)


def _values(values: Sequence[float | str]) -> str:
    texts = [prose.tex(v) if isinstance(v, str) else prose.number(v) for v in values]
    if len(texts) > VALUES:
        texts = [*texts[: VALUES - 2], r"\dots", texts[-1]]
    return ", ".join(texts) or "--"


def _verdicts(content: Content) -> list[tuple[str, str]]:
    """Questions with a test and their answers, as on the first screen of the page."""
    verdicts = []
    for chapter in content.chapters:
        where = f" ({prose.tex(chapter.setting)})" if len(content.chapters) > 1 else ""
        verdicts += [
            (f"{prose.tex(one.question)}{where}", prose.tex(" ".join(one.sentences)))
            for one in key_results.key_results(content, chapter)
            if one.tested
        ]
    return verdicts[:VERDICTS]


def _asked(answers: Sequence[Answer]) -> dict[str, Any]:
    """What the suite asked before its runs: rows of a table, and what its p-values rest on."""
    rows = [[prose.tex(one.question), prose.tex(tables.contrast_value(one))] for one in answers]
    return {"rows": rows, "note": prose.tex(captions.asked(answers)) if answers else ""}


def _limits(content: Content) -> str:
    cells = captions.cells(*(grid for c in content.chapters for grid in captions.grids(c)))
    few = sum(len(cell.seeds) < MIN_SEEDS for cell in cells)
    sentences = []
    if few:
        every = "Both" if few == 2 else f"All {prose.number(few)}"
        some = f"{every} numbers in the tables come"
        if few == 1:
            some = f"One of {prose.counted(len(cells), 'number')} in the tables comes"
        elif few < len(cells):
            some = f"Of {prose.number(len(cells))} numbers in the tables, {prose.number(few)} come"
        sentences.append(
            f"{some} from fewer than {prose.number(MIN_SEEDS)} seeds, which is too few for a test."
        )
    if content.unfinished:
        count = prose.counted(len(content.unfinished), "unfinished run")
        sentences.append(f"The report leaves out {count}.")
    return " ".join(sentences)
