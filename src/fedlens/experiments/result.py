"""What a run says of itself: in its manifest when a session begins, in its result at the end."""

import logging
from dataclasses import asdict
from typing import Any

import torch

from fedlens import params
from fedlens.config import compose
from fedlens.config.schema import Config, unit
from fedlens.data.splits import Choice
from fedlens.experiments import privacy
from fedlens.experiments.build import Parts
from fedlens.experiments.evaluation import Measure
from fedlens.experiments.loop import Position
from fedlens.federated.diagnostics import client_accuracy
from fedlens.store import manifest, model_state
from fedlens.store.checkpoints import Checkpoints
from fedlens.store.run_folder import RunFolder
from fedlens.training.evaluate import Evaluation

FLOWER_PACKAGES = {"flower": ("flwr",), "flower_simulation": ("flwr", "ray")}

log = logging.getLogger(__name__)


def _what(config: Config) -> dict[str, Any]:
    """What every record names, so that no number is taken for another world's."""
    return {
        "experiment": config.experiment,
        "data": config.data.name,
        "backbone": config.backbone.name,
        "resolution": config.backbone.resolution,
        "pretrained": config.backbone.pretrained,
        "seed": config.seed,
        "unit": unit(config),  # what is counted: epochs or rounds
        **(_sparse(config) if config.sparse.density is not None else {}),
        **(_federation(config) if config.federated.clients else {}),
    }


def _sparse(config: Config) -> dict[str, Any]:
    return {"density": config.sparse.density, "mask_rule": config.sparse.rule}


def _federation(config: Config) -> dict[str, Any]:
    return {
        "clients": config.federated.clients,
        "partition": asdict(config.partition),
        "algorithm": config.algorithm.name,
        "local_steps": config.federated.local_steps,
    }


def sign(config: Config, folder: RunFolder, parts: Parts, device: torch.device) -> None:
    """Adds this session to the manifest; refuses to go on with other data or weights."""
    by_superlink = config.engine.name == "flower"  # whose own command says nothing to a reader
    session = manifest.session(
        device,
        command=[*compose.command(config), "engine=flower"] if by_superlink else None,
        packages=FLOWER_PACKAGES.get(config.engine.name, ()),
    )
    signed = folder.manifest or {
        "name": folder.name,
        **_what(config),
        "inputs": parts.inputs,
        "sessions": [],
    }
    manifest.check_inputs(signed, parts.inputs)
    if signed["sessions"] and (changed := manifest.differences(signed["sessions"][0], session)):
        log.warning("%s differ from the first session: the last bits may too", ", ".join(changed))
    folder.write("manifest", {**signed, "sessions": [*signed["sessions"], session]})


def conclude(
    config: Config,
    folder: RunFolder,
    parts: Parts,
    measure: Measure,
    checkpoints: Checkpoints,
    position: Position,
) -> dict[str, Any]:
    """Fixes the choice, then opens the test split for it, where it is to be opened."""
    by_validation = config.evaluate.select == "best" and position.best is not None
    chosen = position.done
    if by_validation and position.best:
        model_state.put_back(checkpoints.load(position.best).tensors, parts.model)
        chosen = position.best_unit
    choice = Choice(
        parameters=params.digest(model_state.learned(parts.model)),
        # An early stop on validation is a choice too, even of the last parameters.
        chosen_on="validation" if by_validation or config.train.early_stopping else "last",
        unit=chosen,
    )
    if parts.test.opened is None:  # else a second choice is refused when the split is opened
        folder.write("choice", asdict(choice))
    counted = unit(config)
    records = {record[counted]: record for record in folder.journal("metrics").read()}
    return {
        **_what(config),
        "choice": asdict(choice),
        "units": position.done,
        "validation": records[chosen].get("validation"),
        **(_tested(parts, measure.test(choice)) if config.evaluate.test else {}),
        "facts": parts.facts,
        **privacy.spent(config, records.values()),
        "seconds": round(position.seconds, 1),
        "finished": manifest.now(),
    }


def _tested(parts: Parts, found: Evaluation) -> dict[str, Any]:
    return {"test": asdict(found), **per_client(parts, found)}


def per_client(parts: Parts, found: Evaluation) -> dict[str, Any]:
    """How the model serves the clients, where there are any."""
    if parts.partition is None:
        return {}
    return {"per_client": client_accuracy(found.per_class, parts.held_classes)}
