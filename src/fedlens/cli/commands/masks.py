"""`fedlens masks`: which weights are trained, layer by layer, and how much masks overlap."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedlens.cli.shared import RUNS, Commands, Plugins, Root, out
from fedlens.errors import FedlensError
from fedlens.store.run_folder import find_run

app = Commands(help="Inspect masks: which weights a run trains.", no_args_is_help=True)

Masks = Annotated[
    list[str],
    typer.Argument(
        metavar="MASKS...",
        help="Runs (id, name or folder), or .safetensors files with masks.",
    ),
]


@app.command()
def show(
    sources: Masks,
    root: Root = RUNS,
    figure: Annotated[
        Path | None, typer.Option(help="Save a figure to this file (png, svg or pdf).")
    ] = None,
    _plugins: Plugins = None,
) -> None:
    """Show which fraction of each layer a mask trains, and how the mask was made.

    For several masks of one model, it also shows the overlap of each pair (Jaccard index: weights
    in both masks / weights in either), and in brackets the overlap of two random masks.

    Example: `fedlens masks show RUN1 RUN2 --figure masks.png`
    """
    if figure:
        from fedlens.reporting.figures.style import figure_format

        figure_format(figure)
    files = [_file(source, root) for source in sources]
    paths = list({path.resolve(): path for path in files}.values())  # without duplicates
    from fedlens.reporting.terminal.masks import mask_labels, mask_page, overlap_table
    from fedlens.sparse import mask_files, mask_statistics

    loaded = [mask_files.load(path) for path in paths]
    labels = mask_labels([provenance for _, provenance in loaded], _names(paths))
    masks = dict(zip(labels, (masks for masks, _ in loaded), strict=True))
    overlap = mask_statistics.overlap(masks) if len(masks) > 1 else None
    records: list[dict[str, Any]] = [
        {
            "label": label,
            "path": str(path),
            "provenance": provenance,
            **mask_statistics.density_by_layer_and_kind(masks[label], prefix="backbone."),
        }
        for label, path, (_, provenance) in zip(labels, paths, loaded, strict=True)
    ]
    for record in records:
        out.print(mask_page(record), "")
    if overlap:
        out.print(overlap_table(overlap))
    if figure:
        from fedlens.reporting.figures.masks import mask_figure

        mask_figure(records, figure, overlap=overlap)
        out.print(f"figure: {figure}", soft_wrap=True)


def _file(source: str, root: Path) -> Path:
    """The masks of a run, or the file itself."""
    path = Path(source)
    if path.suffix == ".safetensors" or path.is_file():
        return path
    run = find_run(source, root)
    if not run.masks.exists():
        from fedlens.config.compose import load

        if load(run.config).sparse.density is None:
            raise FedlensError(
                f"{run.name} trains all weights and has no masks: choose a run with sparse.density."
            )
        raise FedlensError(f"{run.name} has no masks yet: run `fedlens resume {run.path}`.")
    return run.masks


def _names(paths: list[Path]) -> list[str]:
    """The name of each mask's run or file; full paths if names are not unique."""
    names = [
        path.resolve().parent.name if path.name == "masks.safetensors" else path.stem
        for path in paths
    ]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]
