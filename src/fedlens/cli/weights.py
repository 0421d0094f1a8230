"""`fedlens weights`: list, fetch and verify pretrained weights."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fedlens.cli.shared import Commands, out
from fedlens.registry import backbone as backbone_registry
from fedlens.runtime.stop import StopRequest

app = Commands(help="List, get and check pretrained weights.", no_args_is_help=True)

Backbone = Annotated[
    str, typer.Argument(metavar="BACKBONE", help="A name from `fedlens weights list`.")
]


@app.command("list")
def list_all() -> None:
    """List the backbones and the files of their weights."""
    table = Table("backbone", "patch", "px", "files", "paper", box=None)
    for row in backbone_registry:
        if row.name == "timm":
            table.add_row("timm:<any name>", "", "", "downloaded by timm's name", "")
            continue
        known = row.traits
        files = ", ".join(known.get("files", ())) or "pretrained on this machine, on first use"
        if row.function is not None:
            files = f"{row.name}.safetensors or {row.name}.pth, in the folder FEDLENS_WEIGHTS"
        patch, pixels = str(known.get("patch", "")), str(known.get("resolution", ""))
        table.add_row(row.name, patch, pixels, files, row.paper)
    out.print(table)


@app.command()
def fetch(backbone: Backbone) -> None:
    """Get the weights of a backbone: download them if they are missing, and print their path."""
    from fedlens.experiments.build import weights_file

    settings = backbone_registry.settings(backbone, "backbone")
    out.print(str(weights_file(settings, StopRequest())), soft_wrap=True)


@app.command()
def verify(
    backbone: Backbone,
    file: Annotated[
        Path | None, typer.Option(help="The file to check; default: where `fetch` puts it.")
    ] = None,
    sha256: Annotated[str | None, typer.Option(help="The SHA-256 that the file must have.")] = None,
) -> None:
    """Check that a file has the parameters of the backbone, and print its hash."""
    from fedlens.experiments.build import weights_file
    from fedlens.models import backbones, weights

    settings = backbone_registry.settings(backbone, "backbone")
    path = weights_file(settings.but(weights=str(file) if file else None), StopRequest())
    loaded = weights.verify(backbones.find(settings), path, expected_sha256=sha256)
    out.print(f"ok       {loaded.path}\nsha256   {loaded.sha256}", soft_wrap=True)
