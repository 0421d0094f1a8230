"""What all analyses of a finished run share: found or computed, printed, and drawn."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedlens.cli.shared import out
from fedlens.runtime.stop import Interrupted, StopRequest, listening
from fedlens.store.analysis_records import Record, finished, place
from fedlens.store.run_folder import RunFolder

if TYPE_CHECKING:
    from fedlens.analyses.loaded_run import OpenedRun

Alphas = Annotated[str, typer.Option(help="Such as `0,0.5,1`, or first:last:step.")]
Scales = Annotated[str, typer.Option(help="Of λ, such as `0.5,1,2`, or first:last:step.")]
Round = Annotated[
    int | None, typer.Option("--round", help="A round whose updates were kept; else the last.")
]
FigureFile = Annotated[
    Path | None, typer.Option("--figure", help="Draw it to this file too (png, svg or pdf).")
]


def answer(
    folder: RunFolder,
    name: str,
    compute: Callable[[str, StopRequest], Record],
    figure: Path | None,
) -> None:
    """The record, made only if it is not there; torch is loaded by `compute` alone."""
    from fedlens.reporting.figures.analyses import draw
    from fedlens.reporting.figures.style import figure_format
    from fedlens.reporting.terminal.analyses import analysis_page

    if figure:
        figure_format(figure)
    record = finished(folder, name)
    if record is None:
        with listening() as stop:
            try:
                record = compute(name, stop)
            except Interrupted as reason:
                raise Interrupted("run the same command again.") from reason
    out.print(analysis_page(record))
    where = place(folder, name)
    out.print(f"record {where / 'record.json'}", soft_wrap=True)
    for path in (where / "figure.png", figure):
        if path:
            draw(record, path)
            out.print(f"drawn to {path}", soft_wrap=True)


def opened(folder: RunFolder, stop: StopRequest, overrides: list[str] | None = None) -> "OpenedRun":
    from fedlens.analyses.loaded_run import open_run

    return open_run(folder, stop, overrides=overrides)
