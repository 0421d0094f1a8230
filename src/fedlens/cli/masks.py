"""`fedlens masks`: which weights are trained, layer by layer, and how much masks have in common."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedlens.cli.shared import RUNS, Root, out
from fedlens.errors import FedlensError
from fedlens.store.run_folder import find_run

app = typer.Typer(help="Look at masks: which weights a run trains.", no_args_is_help=True)

What = Annotated[
    list[str],
    typer.Argument(
        metavar="WHAT",
        help="Runs (folder, name, or part of a name) or masks in .safetensors files.",
    ),
]


@app.command()
def show(
    what: What,
    root: Root = RUNS,
    figure: Annotated[
        Path | None, typer.Option(help="Draw them to this file (png, svg or pdf).")
    ] = None,
) -> None:
    """Show where masks come from and what fraction of each layer and kind of weight they train.

    Of several masks of one model it also shows how much each two overlap (Jaccard: weights in
    both over weights in either), beside what two random masks of their densities would.

    Example: `fedlens masks show least-sensitive random-0.1 --figure masks.png`
    """
    if figure:
        from fedlens.reporting.figures.style import figure_format

        figure_format(figure)
    found = [_file(word, root) for word in what]
    paths = list({path.resolve(): path for path in found}.values())  # each once
    from fedlens.reporting.terminal.masks import mask_labels, mask_page, overlap_table
    from fedlens.sparse import mask_files, mask_statistics

    loaded = [mask_files.load(path) for path in paths]
    labels = mask_labels([told for _, told in loaded], _names(paths))
    masks = dict(zip(labels, (masks for masks, _ in loaded), strict=True))
    overlap = mask_statistics.overlap(masks) if len(masks) > 1 else None
    records: list[dict[str, Any]] = [
        {
            "label": label,
            "path": str(path),
            "provenance": told,
            **mask_statistics.density_by_layer_and_kind(masks[label]),
        }
        for label, path, (_, told) in zip(labels, paths, loaded, strict=True)
    ]
    for record in records:
        out.print(mask_page(record), "")
    if overlap:
        out.print(overlap_table(overlap))
    if figure:
        from fedlens.reporting.figures.masks import mask_figure

        mask_figure(records, figure, overlap=overlap)
        out.print(f"drawn to {figure}", soft_wrap=True)


def _file(word: str, root: Path) -> Path:
    """The masks of a run, or the file itself."""
    path = Path(word)
    if path.suffix == ".safetensors" or path.is_file():
        return path
    run = find_run(word, root)
    if not run.masks.exists():
        from fedlens.config.compose import load

        if load(run.config).sparse.density is None:
            raise FedlensError(f"{run.name} trains every weight: it has no masks.")
        raise FedlensError(f"{run.name} has no masks yet: run `fedlens resume {run.path}`.")
    return run.masks


def _names(paths: list[Path]) -> list[str]:
    """Of each its run's name, or the file's; whole paths if those are not all different."""
    names = [
        path.resolve().parent.name if path.name == "masks.safetensors" else path.stem
        for path in paths
    ]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]
