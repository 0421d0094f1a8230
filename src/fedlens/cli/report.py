"""`fedlens report`: from records to a page, a paper, tables and figures; `fedlens records`: copies
of them to publish. Loads no torch.
"""

from pathlib import Path
from typing import Annotated

import typer

from fedlens.cli.shared import PLAIN, out

app = typer.Typer()


@app.command()
def report(
    places: Annotated[
        list[Path],
        typer.Argument(metavar="RUNS...", help="Runs, or folders that hold runs, such as `runs`."),
    ],
    folder: Annotated[Path, typer.Option("--out", help="The report's folder.")] = Path("report"),
    about: Annotated[
        Path | None,
        typer.Option(help="YAML with `title` and `authors: [{name, id, affiliation}]`."),
    ] = None,
    pdf: Annotated[bool, typer.Option("--pdf", help="Compile report.tex with latexmk.")] = False,
) -> None:
    """Report on finished runs: an HTML page, a LaTeX paper, tables, figures and an audit.

    Everything comes from the runs' records; nothing is trained or evaluated. The page is one file
    that needs no network. An older report in the same folder is replaced.

    Example: `fedlens report runs --out report --about about.yaml --pdf`
    """
    from fedlens.reporting.report import PAGE, write
    from fedlens.reporting.study import about as details
    from fedlens.reporting.study.content import About

    told = details.read(about) if about else About()
    found = write(places, folder, told, pdf=pdf)
    for check in found.audit:
        if check.passed:
            out.print(
                f"[green]holds[/green]     {check.title} ({check.looked_at})", highlight=False
            )
            continue
        out.print(f"[red]violated  {check.title}[/red]", highlight=False)
        for violation in check.violations:
            out.print(f"       {violation}", style="red", **PLAIN)
    if found.unfinished:
        out.print(f"{len(found.unfinished)} runs are not finished and are left out.", **PLAIN)
    if pdf:
        out.print(f"paper   {folder / 'report.pdf'}", **PLAIN)
    out.print(f"report  {folder / PAGE}", **PLAIN)


@app.command()
def records(
    root: Annotated[Path, typer.Argument(metavar="RUNS", help="A folder that holds runs.")],
    folder: Annotated[Path, typer.Option("--out", help="Where to put them.")],
) -> None:
    """Copy the records of finished runs, without checkpoints and logs: small enough to publish.

    A copy is all that `fedlens report`, `ls` and `show` read, and the same command brings it up to
    date.

    Example: `fedlens records runs --out results/my_study`
    """
    from fedlens.store.export import copy_records

    copied, unfinished = copy_records(root, folder)
    out.print(f"{len(copied)} runs copied to {folder}", **PLAIN)
    if unfinished:
        out.print(f"{len(unfinished)} runs are not finished and are left out.", **PLAIN)
