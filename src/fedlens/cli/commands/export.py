"""`fedlens export`: the model of a finished run, for others to use."""

from pathlib import Path
from typing import Annotated

import typer

from fedlens.cli.shared import PLAIN, RUNS, Commands, Root, RunName, RuntimeOverrides, out
from fedlens.runtime.stop import Interrupted, listening
from fedlens.store.analysis_records import require_result
from fedlens.store.run_folder import find_run

app = Commands()


@app.command()
def export(
    run: RunName,
    target: Annotated[Path, typer.Option("--out", help="A new folder for the model.")],
    overrides: RuntimeOverrides = None,
    root: Root = RUNS,
) -> None:
    """Write the model of a finished run to a folder, to use or publish it.

    The folder gets model.safetensors, config.json and README.md, a model card with data, method,
    accuracy, licence and command. `fl.load_model` loads every export. `timm.create_model` loads it
    too if the run started from a model of timm. If the data have moved since training, set their
    path: `data.root=/content/data`

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
            raise Interrupted("run the same command again to start over.") from reason
    seeds = repetitions(folder)
    exported_model.write(target, model.tensors, model.config, model_card(model.config, seeds))
    out.print(f"model: {target} (from {folder.name})", **PLAIN)
    out.print(f"Load it in Python: fl.load_model({str(target)!r})", **PLAIN)
    if not model.config["fedlens"]["loads_in_timm"]:
        out.print("timm.create_model cannot build this model: use fl.load_model.", **PLAIN)
