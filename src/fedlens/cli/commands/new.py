"""`fedlens new`: a small project with methods of one's own, which works at once."""

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from fedlens.cli.shared import PLAIN, Commands, out
from fedlens.errors import FedlensError

TEMPLATES = ("README.md", "plugin.py", "experiment.yaml", "suite.yaml", "notebook.ipynb")

app = Commands()


@app.command()
def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
) -> None:
    """Create a small project with an aggregator and a mask rule of your own.

    Example: `fedlens new mine`
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise FedlensError(f"{folder} is not empty: name a new or empty folder.")
        for name in TEMPLATES:
            template = files("fedlens.cli").joinpath("project", name)
            (folder / name).write_bytes(template.read_bytes())
    except OSError as error:
        raise FedlensError(f"Cannot write to {folder} ({error.strerror}).") from error
    out.print(
        f"Wrote {', '.join(TEMPLATES)} to {folder}. Next:\n\n"
        f"    cd {folder}\n    fedlens run experiment.yaml\n",
        **PLAIN,
    )
