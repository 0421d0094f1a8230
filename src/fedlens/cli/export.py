"""`fedlens export`: the model of a finished run, for others to use."""

from pathlib import Path
from typing import Annotated

import typer

from fedlens.cli.shared import PLAIN, RUNS, Commands, Overrides, Root, RunName, out
from fedlens.runtime.stop import Interrupted, listening
from fedlens.store.analysis_records import require_result
from fedlens.store.run_folder import find_run

app = Commands()


@app.command()
def export(
    run: RunName,
    target: Annotated[Path, typer.Option("--out", help="A new folder for the model.")],
    overrides: Overrides = None,
    root: Root = RUNS,
) -> None:
    """Write the whole model of a finished run: model.safetensors, config.json and README.md.

    The tensors have the names of the timm model that the run started from, so that
    `timm.create_model` loads them; `fl.load_model` loads every export. README.md is a model card
    with data, method, accuracy, licence and command. Where data lie elsewhere than at training, set
    the path: `data.root=/content/data`

    Example: `fedlens export fedavg --out my_model`
    """
    folder = find_run(run, root)
    require_result(folder)
    from fedlens.config import compose
    from fedlens.experiments.export_model import whole_model
    from fedlens.experiments.loaded_run import load_run
    from fedlens.reporting.model_card import model_card
    from fedlens.reporting.study.runs import repetitions
    from fedlens.store import exported_model

    exported_model.check_target(target, folder.name)
    config = compose.amend(compose.load(folder.config), overrides or [])
    with listening() as stop:
        try:
            model = whole_model(load_run(folder, stop, overrides=overrides), config)
            stop.check()
        except Interrupted as reason:
            raise Interrupted("run the same command again.") from reason
    seeds = repetitions(folder)
    exported_model.write(target, model.tensors, model.config, model_card(model.config, seeds))
    out.print(f"{folder.name} written to {target}", **PLAIN)
    out.print(f"load it with fl.load_model({str(target)!r})", **PLAIN)
    if not model.config["fedlens"]["loads_in_timm"]:
        out.print("timm.create_model cannot build this model.", **PLAIN)
