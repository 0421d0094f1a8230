"""A finished run, loaded again: its experiment, what it started from, and what it learned.

Parameters are whole maps, frozen ones included and LoRA's factors merged, so that runs which
trained different parts of one model can be subtracted from each other. BatchNorm's statistics,
where they were trained, take no part in that: the model keeps those the run ended with.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fedlens import params
from fedlens.config import compose
from fedlens.config.schema import Config, head_changes
from fedlens.errors import FedlensError
from fedlens.experiments import settings
from fedlens.experiments.build import Experiment, build
from fedlens.experiments.clients import local_session
from fedlens.experiments.loops.evaluation import Evaluator
from fedlens.experiments.preparation.head import prepare_head
from fedlens.experiments.preparation.masks import find_masks
from fedlens.federated.client import trainable_parameters
from fedlens.federated.tasks import Clients
from fedlens.models.trained_parts import lora
from fedlens.params import Params
from fedlens.registry import head as head_registry
from fedlens.runtime.allocator import keep_large_blocks
from fedlens.runtime.device import choose_device
from fedlens.runtime.stop import StopRequest
from fedlens.sparse.packing import Packing
from fedlens.store import manifest, model_state
from fedlens.store.analysis_records import require_result
from fedlens.store.checkpoints import Checkpoints
from fedlens.store.run_folder import RunFolder
from fedlens.training.evaluate import Evaluation


@dataclass(frozen=True)
class LoadedRun:
    folder: RunFolder
    seed: int
    experiment: Experiment
    evaluator: Evaluator
    start: dict[str, torch.Tensor]  # θ before training: pretrained, with the head as fitted
    tuned: dict[str, torch.Tensor]  # θ as chosen
    validation_split: tuple[Any, ...]  # what decides which images are held out
    statistics_examples: int | None  # of a client, for merging methods that need statistics
    adds_updates: bool  # the model is its start plus the mean updates of all rounds, as in FedAvg
    with_ridge_head: Callable[[], dict[str, torch.Tensor]]  # `start`, but with a ridge head
    # All parameters, with the trained ones taken from a client update as it was sent.
    unpacked: Callable[[Params], dict[str, torch.Tensor]]
    packing: Packing  # which entries of the trained parameters clients send

    def assign(self, parameters: Params) -> None:
        """Writes these parameters into the model."""
        params.assign(dict(self.experiment.model.named_parameters()), parameters)

    def validate(self, parameters: Params) -> Evaluation:
        self.assign(parameters)
        evaluation = self.evaluator.validation()
        if evaluation is None:
            raise FedlensError(
                f"{self.folder.name} has no validation images (data.validation=0), and nothing "
                "may be chosen on test images: choose a run that has some."
            )
        return evaluation


def load_run(
    folder: RunFolder, stop: StopRequest, *, overrides: list[str] | None = None
) -> LoadedRun:
    """`overrides` may change where data lie and what to run on, as for `resume`."""
    result = require_result(folder)
    config = compose.amend(compose.load(folder.config), overrides or [])
    keep_large_blocks()
    if config.threads:
        torch.set_num_threads(config.threads)
    experiment, clients = _prepared(config, choose_device(config.device), stop, folder)
    manifest.check_inputs(folder.manifest or {}, experiment.input_hashes)
    masks = settings.masks(config, experiment)
    experiment = find_masks(experiment, clients, masks, folder, stop)
    model = experiment.model
    start = _parameters(model)
    packing = Packing(trainable_parameters(model), experiment.masks)
    unpacked = _unpacker(folder, experiment, packing)
    chosen = result["choice"]
    name = f"{result['unit']}-{chosen['unit']:06d}"
    model_state.load_state(Checkpoints(folder.checkpoints).load(name).tensors, model)
    if params.digest(model_state.learned(model)) != chosen["parameters"]:
        raise FedlensError(
            f"The checkpoint {name} of {folder.name} does not hold the parameters its result was "
            "measured with: run it again under another run.name."
        )
    evaluator = Evaluator(model, experiment, batch_size=config.evaluate.batch_size, stop=stop)
    tuned = _parameters(model)
    lora.merge(model)
    data, algorithm = config.data, config.algorithm
    return LoadedRun(
        folder=folder,
        seed=config.seed,
        experiment=experiment,
        evaluator=evaluator,
        start=start,
        tuned=tuned,
        validation_split=(
            config.seed,
            experiment.input_hashes["data"],
            data.validation,
            data.train_per_class,
        ),
        statistics_examples=algorithm.statistics_examples,
        adds_updates=not head_changes(config)
        and (algorithm.aggregator.name, algorithm.server.name, algorithm.server.lr)
        == ("mean", "sgd", 1.0)
        and not compose.row_of(config, "algorithm.correction").traits.get("moves_model")
        and algorithm.average.name == "none",
        with_ridge_head=partial(_start_with_ridge_head, config, experiment.device, stop),
        unpacked=unpacked,
        packing=packing,
    )


def _parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of all parameters, with LoRA's factors merged into the weights."""
    return params.copy(lora.plain(lora.names(model), dict(model.named_parameters())))


def _unpacker(
    folder: RunFolder, experiment: Experiment, packing: Packing
) -> Callable[[Params], dict[str, torch.Tensor]]:
    """`LoadedRun.unpacked`, of the model before its factors are merged."""
    model, factors = experiment.model, list(lora.names(experiment.model))
    start = params.copy(dict(model.named_parameters()))

    def unpacked(packed: Params) -> dict[str, torch.Tensor]:
        if any(one.exact for one in factors):
            raise FedlensError(
                f"{folder.name} averages products of LoRA's factors, so a client's factors alone "
                "are not its model: use a run with train.trainable.average=factors or frozen_a."
            )
        parameters = params.copy(start)
        packing.unpack(packed, {name: parameters[name] for name in packing.layout})
        return lora.plain(factors, parameters)

    return unpacked


def _start_with_ridge_head(
    config: Config, device: torch.device, stop: StopRequest
) -> dict[str, torch.Tensor]:
    """What a run started from, but with a ridge head on the frozen backbone."""
    same = {key: config.head[key] for key in ("dropout", "layers", "tokens", "random_features")}
    ridge = head_registry.settings({"name": "ridge", **same}, "head")
    experiment, _ = _prepared(replace(config, head=ridge), device, stop)
    return _parameters(experiment.model)


def _prepared(
    config: Config, device: torch.device, stop: StopRequest, folder: RunFolder | None = None
) -> tuple[Experiment, Clients]:
    """The experiment with its head fitted, all clients in this process.

    `folder` is that of the run whose head it is, which may be kept there.
    """
    session = local_session(config, stop)
    experiment = build(config, device, stop, session.data)
    clients = session.clients(experiment)
    head = settings.head(config, experiment.precision)
    return prepare_head(experiment, clients, head, stop, folder), clients
