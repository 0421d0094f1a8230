"""`fedlens weights`: list, fetch and verify pretrained weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from fedlens.cli.shared import PLAIN, Commands, out
from fedlens.registry import Row
from fedlens.registry import backbone as backbone_registry
from fedlens.runtime.stop import StopRequest

app = Commands(help="List, get and check pretrained weights.", no_args_is_help=True)

Backbone = Annotated[
    str, typer.Argument(metavar="BACKBONE", help="A name from `fedlens weights list`.")
]


@app.command("list")
def list_all() -> None:
    """List the backbones and the files of their weights."""
    for row in backbone_registry:
        out.print(Text("timm:NAME" if row.name == "timm" else row.name, style="bold"))
        for name, text in _facts(row):
            out.print(f"  {name:8}{text}", **PLAIN)


def _facts(row: Row) -> Iterator[tuple[str, str]]:
    known = row.traits
    if row.name == "timm":
        yield "weights", "any model of timm, downloaded by its name there"
        return
    if "resolution" in known:
        patches = f", patches of {known['patch']} px" if "patch" in known else ""
        yield "images", f"{known['resolution']} px{patches}"
    if row.function is not None:
        yield "weights", f"{row.name}.safetensors or {row.name}.pth in the folder FEDLENS_WEIGHTS"
    else:
        yield (
            "weights",
            known["files"][0] if known.get("files") else "shipped with fedlens",
        )
        yield from (("", f"or {file}") for file in known.get("files", ())[1:])
    if row.paper:
        yield "paper", row.paper


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
    """Check that a weights file matches the backbone, and print its SHA-256."""
    from fedlens.experiments.build import weights_file
    from fedlens.models.architectures import backbones, weights

    settings = backbone_registry.settings(backbone, "backbone")
    path = weights_file(settings.but(weights=str(file) if file else None), StopRequest())
    loaded = weights.verify(backbones.find(settings), path, expected_sha256=sha256)
    out.print(f"ok       {loaded.path}\nsha256   {loaded.sha256}", soft_wrap=True)
