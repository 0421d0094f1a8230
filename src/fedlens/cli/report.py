"""`fedlens report` writes a page, a paper, tables and figures from records, without torch.

`fedlens records` exports the records of runs, to publish them.
"""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from fedlens.cli.shared import PLAIN, out
from fedlens.errors import FedlensError, shown

app = typer.Typer()


@app.command()
def report(
    places: Annotated[
        list[Path],
        typer.Argument(metavar="RUNS...", help="Runs, folders of runs, or archives of runs."),
    ],
    folder: Annotated[Path, typer.Option("--out", help="The report's folder.")] = Path("report"),
    about: Annotated[
        Path | None,
        typer.Option(help="YAML with `title` and `authors: [{name, id, affiliation}]`."),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            metavar="SUITE [KEY=VALUE]...",
            help="The suite that was run, with its overrides: its `contrasts` are answered, and "
            "p-values are corrected over them alone.",
        ),
    ] = None,
    pdf: Annotated[bool, typer.Option("--pdf", help="Compile report.tex with latexmk.")] = False,
) -> None:
    """Report on finished runs: an HTML page, a LaTeX paper, tables, figures and an audit.

    Everything is computed from the runs' records; nothing is trained or evaluated. The page is one
    file that works offline. An older report in the same folder is replaced.

    Example: `fedlens report runs --out report --about about.yaml --pdf`
    """
    from fedlens.reporting.report import PAGE, write
    from fedlens.reporting.study import about as details
    from fedlens.reporting.study import contrasts
    from fedlens.reporting.study.content import About
    from fedlens.suites.suite import find

    name, *overrides = _words(suite) if suite is not None else [""]
    asked = contrasts.asked(find(name), overrides) if name else []
    if name and not asked:
        raise FedlensError(
            f"The suite {name} states no contrasts: leave --suite out, or add `contrasts` to it."
        )
    authors = details.read(about) if about else About()
    result = write(places, folder, authors, asked=asked, pdf=pdf)
    for check in result.audit:
        colour = {"PASS": "green", "FAIL": "red"}.get(check.outcome, "yellow")
        outcome = f"[{colour}]{check.outcome:9}[/{colour}]"
        out.print(f"{outcome} {check.title} ({check.scope})", highlight=False)
        for violation in check.violations:
            out.print(f"       {violation}", style="red", **PLAIN)
    if result.unfinished:
        out.print(f"{len(result.unfinished)} runs are not finished and are left out.", **PLAIN)
    paper = "report.pdf" if (folder / "report.pdf").exists() else "report.tex"
    out.print(f"paper   {folder / paper}", **PLAIN)
    out.print(f"report  {folder / PAGE}", **PLAIN)


def _words(suite: str) -> list[str]:
    """The suite's name and its overrides."""
    try:
        words = shlex.split(suite)
    except ValueError:  # an unclosed quote
        words = []
    if not words or not words[0]:
        raise FedlensError(
            f"--suite '{shown(suite)}' must be a suite's name and key=value overrides, with closed "
            "quotes."
        )
    return words


@app.command()
def records(
    root: Annotated[Path, typer.Argument(metavar="RUNS", help="A folder of runs, or an archive.")],
    archive: Annotated[Path, typer.Option("--out", help="The archive: NAME.tar.xz.")],
) -> None:
    """Write the records of finished runs to one archive, without checkpoints and logs.

    `fedlens report`, `ls` and `show` read an archive like a folder of runs. Runs that the archive
    already has are kept, and records of the same runs are updated.

    Example: `fedlens records runs --out results/my_study.tar.xz`
    """
    from fedlens.store.export import write_records

    export = write_records(root, archive)
    kept = f", {len(export.kept)} kept from before" if export.kept else ""
    out.print(f"{len(export.written)} runs written to {archive}{kept}", **PLAIN)
    if export.unfinished:
        out.print(f"{len(export.unfinished)} runs are not finished and are left out.", **PLAIN)
