"""A report is a folder: a page, a paper, tables and figures, all from one `Content`.

index.html  report.tex  references.bib  [report.pdf]  content.json  tables/  figures/  clock.csv
introduction.tex  discussion.tex  …: the author's own words, kept from one report to the next.
Times are in clock.csv only, so the same records give the same bytes in all other files.
"""

import csv
import io
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from fedlens.errors import FedlensError
from fedlens.files import clear_partials, replacing
from fedlens.reporting import paper
from fedlens.reporting.assemble import content
from fedlens.reporting.figures import report
from fedlens.reporting.page.html import page
from fedlens.reporting.study import captions, tables
from fedlens.reporting.study.captions import grids
from fedlens.reporting.study.content import About, Content
from fedlens.reporting.study.contrasts import Asked
from fedlens.reporting.study.runs import Method, Study, read
from fedlens.runtime.units import counted
from fedlens.store.run_folder import SHAPE_ERRORS

PAGE = "index.html"
CONTENT = "content.json"  # a folder with this file is a report

log = logging.getLogger(__name__)


def write(
    places: Sequence[Path],
    out: Path,
    about: About,
    *,
    asked: Sequence[Asked] = (),
    pdf: bool = False,
) -> Content:
    """Reads runs and writes the folder `out`, which may hold an older report, but nothing else.

    `asked` are the contrasts that a suite stated before its runs. If writing fails, an older report
    stays as it was. Files that its author added are kept. Without latexmk there is no PDF, which a
    warning says before any work.
    """
    if pdf and (missing := paper.missing_program()):
        log.warning(missing)
        pdf = False
    clear_partials(out.parent, of=out.name)  # of a report that was killed
    if out.exists() and not (out / CONTENT).exists() and (out.is_file() or any(out.iterdir())):
        raise FedlensError(f"{out} exists and is not a report: choose another folder.")
    study = read(places)
    runs, settings = counted(len(study.runs), "run"), counted(len(study.settings), "setting")
    log.info("%s in %s", runs, settings)
    try:
        result = content(study, about, asked)
    except SHAPE_ERRORS as error:
        raise _naming_the_run(study, error) from error
    with replacing(out) as folder:
        folder.mkdir()
        paper.keep(out, folder)
        _write_tables(result, folder / "tables")
        log.info("drawing figures")
        report.write(report.figures(result), folder / "figures")
        (folder / PAGE).write_text(page(result), encoding="utf-8")
        paper.write(result, folder, folder / "figures")
        (folder / "clock.csv").write_text(_clock(study), encoding="utf-8", newline="")
        text = json.dumps(asdict(result), indent=1, allow_nan=False)
        (folder / CONTENT).write_text(text + "\n", encoding="utf-8")
    if pdf:  # after everything else, which stays with TeX's log if TeX fails
        log.info("compiling report.tex")
        paper.compile_pdf(out)
    return result


def _naming_the_run(study: Study, error: Exception) -> FedlensError:
    """The first run of which no report can be made alone, or the error if there is none."""
    for setting, methods in study.settings.items():
        for run in (run for method in methods for run in method.runs):
            try:
                with run.folder.named_in_errors():
                    content(Study({setting: [Method((run,))]}, {}), About())
            except FedlensError as named:
                return named
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return FedlensError(f"These runs cannot be reported on together ({reason}): leave some out.")


def _write_tables(content: Content, folder: Path) -> None:
    folder.mkdir()
    lines = [f"# {content.about.title}", ""]
    if content.asked:
        (folder / "asked.csv").write_text(
            tables.asked_csv(content.asked), encoding="utf-8", newline=""
        )
        lines += ["## What the study asked", "", tables.asked(content.asked), ""]
    for chapter in content.chapters:
        lines += [f"## {chapter.setting}", ""]
        for grid in grids(chapter):
            (folder / f"{grid.name}.csv").write_text(
                tables.to_csv(grid), encoding="utf-8", newline=""
            )
            if grid.contrasts:
                (folder / f"{grid.name}-differences.csv").write_text(
                    tables.contrasts_csv(grid), encoding="utf-8", newline=""
                )
            lines += [
                f"### {grid.title}",
                "",
                grid.note,
                "",
                tables.markdown(grid, captions.family(content)),
                "",
            ]
    (folder / "tables.md").write_text("\n".join(lines), encoding="utf-8")


def _clock(study: Study) -> str:
    """Times of every run, apart from what must be the same twice."""
    stream = io.StringIO()
    writer = csv.writer(stream)
    writer.writerow(["run", "first started", "finished", "seconds", "sessions"])
    for run in study.runs:
        sessions = run.manifest["sessions"]
        writer.writerow(
            [run.name, sessions[0]["started"], run.result["finished"], run.result["seconds"],
             len(sessions)]
        )  # fmt: skip
    return stream.getvalue()
