"""`fedlens report` writes a page, a paper, tables and figures from records, without torch.

`fedlens records` exports the records of runs, to publish them.
"""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from fedlens.cli.shared import PLAIN, Commands, Plugins, out
from fedlens.errors import FedlensError, shown
from fedlens.runtime.units import counted

app = Commands()


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUNS...", help="Runs, folders of runs, or archives of runs."),
    ],
    folder: Annotated[
        Path, typer.Option("--out", help="The folder to write the report to.")
    ] = Path("report"),
    about: Annotated[
        Path | None,
        typer.Option(help="A YAML file with `title` and `authors: [{name, id, affiliation}]`."),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            metavar="SUITE [KEY=VALUE]...",
            help="The suite that was run, with its overrides. The report answers its `contrasts` "
            "and corrects p-values over these only.",
        ),
    ] = None,
    pdf: Annotated[
        bool, typer.Option("--pdf", help="Also compile the paper (needs latexmk).")
    ] = False,
    _plugins: Plugins = None,
) -> None:
    """Write a report on finished runs: HTML page, LaTeX paper, tables, figures and audit.

    Everything is computed from the runs' records; nothing is trained or evaluated. The page is one
    file that works offline. An older report in the same folder is replaced; texts of your own in
    it, such as `discussion.tex`, are kept.

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
            f"The suite {name} has no contrasts: leave --suite out, or add `contrasts` to it."
        )
    authors = details.read(about) if about else About()
    result = write(runs, folder, authors, asked=asked, pdf=pdf)
    width = max((len(check.outcome) for check in result.audit), default=0)
    for check in result.audit:
        colour = {"PASS": "green", "FAIL": "red"}.get(check.outcome, "yellow")
        outcome = f"[{colour}]{check.outcome:{width}}[/{colour}]"
        out.print(f"{outcome} {check.title} ({check.scope})", highlight=False)
        for violation in check.violations:
            out.print(f"      {violation}", style="red", **PLAIN)
    if result.unfinished:
        out.print(f"Left out, not finished: {counted(len(result.unfinished), 'run')}", **PLAIN)
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
    runs: Annotated[Path, typer.Argument(metavar="RUNS", help="A folder of runs, or an archive.")],
    archive: Annotated[Path, typer.Option("--out", help="The archive to write, NAME.tar.xz.")],
) -> None:
    """Write the records of finished runs to one archive, without checkpoints and logs.

    `fedlens report`, `ls` and `show` read an archive like a folder of runs. If the archive exists,
    its runs are kept, and records of the same runs are updated.

    Example: `fedlens records runs --out results/my_study.tar.xz`
    """
    from fedlens.store.export import write_records

    export = write_records(runs, archive)
    kept = f"; kept from before: {counted(len(export.kept), 'run')}" if export.kept else ""
    out.print(f"Wrote {counted(len(export.written), 'run')} to {archive}{kept}", **PLAIN)
    if export.unfinished:
        out.print(f"Left out, not finished: {counted(len(export.unfinished), 'run')}", **PLAIN)
