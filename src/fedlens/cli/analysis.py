"""The steps common to all analyses of a run: compute or load the record, print it, draw it."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedlens.cli.shared import out
from fedlens.files import clear_partials
from fedlens.runtime.stop import Interrupted, StopRequest, listening
from fedlens.store.analysis_records import Record, analysis_folder, read_record
from fedlens.store.run_folder import RunFolder

if TYPE_CHECKING:
    from fedlens.experiments.loaded_run import LoadedRun

Alphas = Annotated[
    str, typer.Option(help="Values of α: a list such as `0,0.5,1`, or first:last:step.")
]
Scales = Annotated[
    str, typer.Option(help="Values of λ: a list such as `0.5,1,2`, or first:last:step.")
]
Round = Annotated[
    int | None,
    typer.Option(
        "--round", help="The round whose client updates to use; default: the last that was kept."
    ),
]
FigureFile = Annotated[
    Path | None,
    typer.Option("--figure", help="Also save the figure to this file (png, svg or pdf)."),
]


def compute_or_load(
    folder: RunFolder,
    name: str,
    compute: Callable[[str, StopRequest], Record],
    figure: Path | None,
) -> None:
    """Print and draw the record of an analysis; only `compute`, for a new one, loads torch."""
    from fedlens.reporting.figures.analyses import draw
    from fedlens.reporting.figures.style import figure_format
    from fedlens.reporting.terminal.analyses import analysis_page

    if figure:
        figure_format(figure)
    target = analysis_folder(folder, name)
    clear_partials(target)  # of a process that was killed
    record = read_record(folder, name)
    if record is None:
        with listening() as stop:
            try:
                record = compute(name, stop)
            except Interrupted as reason:
                raise Interrupted("run the same command again to start over.") from reason
    with folder.named_in_errors():
        out.print(analysis_page(record))
        out.print(f"record: {target / 'record.json'}", soft_wrap=True)
        for path in (target / "figure.png", figure):
            if path:
                draw(record, path)
                out.print(f"figure: {path}", soft_wrap=True)


def load_run(
    folder: RunFolder, stop: StopRequest, overrides: list[str] | None = None
) -> "LoadedRun":
    from fedlens.experiments.loaded_run import load_run

    return load_run(folder, stop, overrides=overrides)
