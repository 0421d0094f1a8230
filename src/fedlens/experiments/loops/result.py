"""The end of a run: which parameters are chosen, and what the test split says of them."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fedlens import params
from fedlens.data.splits import Choice
from fedlens.experiments.build import Experiment
from fedlens.experiments.loops.evaluation import Evaluator
from fedlens.experiments.loops.loop import Position
from fedlens.federated import wire
from fedlens.federated.client import trainable_parameters
from fedlens.federated.diagnostics import client_accuracy
from fedlens.federated.server.carried import returned
from fedlens.models.classifier import carried
from fedlens.sparse.packing import Packing
from fedlens.store import model_state
from fedlens.store.checkpoints import Checkpoints
from fedlens.store.run_folder import RunFolder
from fedlens.training.evaluate import Evaluation


def trained_size(experiment: Experiment) -> dict[str, int]:
    """How many numbers are trained, and the bytes of one update as it travels."""
    packing = Packing(trainable_parameters(experiment.model), experiment.masks)
    sent = packing.layout | {
        name: value.to("meta")
        for name, value in carried(experiment.model, experiment.model.batch_norm).items()
        if name in returned(experiment.model, experiment.model.batch_norm)
    }
    return {
        "trained_parameters": sum(value.numel() for value in packing.layout.values()),
        "update_bytes": wire.size(sent, packing.index) if sent else 0,
    }


def choose(
    experiment: Experiment,
    folder: RunFolder,
    checkpoints: Checkpoints,
    position: Position,
    *,
    select_best: bool,
    early_stopping: bool,
) -> Choice:
    """Loads the chosen parameters into the model and fixes the choice in the run's folder.

    `select_best`: the parameters with the best validation accuracy, else the last ones.
    """
    by_validation = select_best and position.best is not None
    chosen = position.done
    if by_validation and position.best:
        model_state.load_state(checkpoints.load(position.best).tensors, experiment.model)
        chosen = position.best_unit
    choice = Choice(
        parameters=params.digest(model_state.learned(experiment.model)),
        # An early stop on validation is a choice too, even of the last parameters.
        chosen_on="validation" if by_validation or early_stopping else "last",
        unit=chosen,
    )
    if experiment.test.opened is None:  # else a second choice is refused when the split is opened
        folder.write("choice", asdict(choice))
    return choice


def result(
    choice: Choice,
    experiment: Experiment,
    evaluator: Evaluator,
    records: Mapping[int, Mapping[str, Any]],
    *,
    units: int,
    test: bool,
) -> dict[str, Any]:
    """What was chosen and how good it is; `test` opens the test split for that choice."""
    return {
        "choice": asdict(choice),
        "units": units,
        "validation": records[choice.unit].get("validation"),
        **(_tested(experiment, evaluator.test(choice)) if test else {}),
        "facts": {**experiment.measurements, **trained_size(experiment)},
    }


def _tested(experiment: Experiment, evaluation: Evaluation) -> dict[str, Any]:
    return {"test": asdict(evaluation), **per_client(experiment, evaluation)}


def per_client(experiment: Experiment, evaluation: Evaluation) -> dict[str, Any]:
    """How well the model serves the clients, where there are any."""
    if experiment.partition is None:
        return {}
    return {"per_client": client_accuracy(evaluation.per_class, experiment.class_counts)}
