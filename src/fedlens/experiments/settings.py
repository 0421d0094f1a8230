"""From a config to the plain settings that clients, server and training loops take.

Nothing below this module reads a config.
"""

from functools import partial
from typing import Any, cast

import torch

from fedlens import rng
from fedlens.config.compose import getattr_dotted, row_of
from fedlens.config.schema import (
    CACHED_PASSES,
    Config,
    cohort_size,
    cycle,
    head_changes,
    rounds,
    sequential,
    unit,
    visits,
)
from fedlens.experiments.build import Experiment, products
from fedlens.experiments.loops.central_loop import CentralSettings
from fedlens.experiments.loops.federated_loop import FederatedSettings
from fedlens.experiments.loops.loop import LoopSettings
from fedlens.experiments.preparation import privacy
from fedlens.experiments.preparation.head import HeadSettings, HeadTraining
from fedlens.experiments.preparation.masks import MaskSettings
from fedlens.experiments.preparation.prefix import PrefixSettings, batch_sizes
from fedlens.experiments.preparation.refit import HeadRefit
from fedlens.federated.algorithms.choice import make_aggregator
from fedlens.federated.algorithms.scaffold import SCAFFOLD
from fedlens.federated.chains import ProximalTo
from fedlens.federated.client import LocalTraining, Trainer
from fedlens.federated.client_statistics import ClientStatistic
from fedlens.federated.client_statistics import client_statistic as statistic_of
from fedlens.federated.engines import rows
from fedlens.federated.host import CalibrationSettings
from fedlens.federated.sampling import draw_cohort
from fedlens.federated.server.correction import Correction
from fedlens.federated.server.model_average import ModelAverage
from fedlens.federated.tasks import Engine
from fedlens.registry import Row, backbone, diagnostic
from fedlens.registry import head as head_registry
from fedlens.runtime.stop import StopRequest
from fedlens.training.optimizers import ClientOptimizer
from fedlens.training.precision import Precision
from fedlens.training.step import StepSettings


def step(config: Config, precision: Precision) -> StepSettings:
    return StepSettings(
        precision=precision,
        label_smoothing=config.train.label_smoothing,
        dropout=config.head.dropout,
        clip_norm=config.train.clip_norm,
        micro_batch=config.train.micro_batch,
    )


def optimizer(config: Config) -> ClientOptimizer:
    row, chosen = row_of(config, "train.optimizer"), config.train.optimizer
    made: ClientOptimizer = row.make(**chosen.parameters)
    return made


def local_training(config: Config, precision: Precision) -> LocalTraining:
    return LocalTraining(
        step=step(config, precision.for_clients()),
        batch_size=config.train.batch_size,
        optimizer=optimizer(config),
        proximal=config.algorithm.proximal,
        proximal_to=cast(ProximalTo, config.algorithm.proximal_to),
        carry_momentum=config.algorithm.carry_momentum,
    ).corrected(correction(config))


def correction(config: Config) -> Correction | None:
    """None where clients follow their own gradients."""
    if config.algorithm.scaffold:
        return SCAFFOLD()
    made: Correction | None = _made_for_cycle(config, "algorithm.correction", "tau")
    return made


def model_average(config: Config) -> ModelAverage | None:
    """None where the global model itself is evaluated."""
    made: ModelAverage | None = _made_for_cycle(config, "algorithm.average", "rounds")
    return made


def _made_for_cycle(config: Config, key: str, name: str) -> Any:
    """What the row of `key` makes; its parameter `name`, if null, is the cycle's rounds."""
    parameters = getattr_dotted(config, key).parameters
    if name in parameters and parameters[name] is None:
        parameters = {**parameters, name: cycle(config.federated)}
    return row_of(config, key).make(**parameters)


def central(config: Config, precision: Precision) -> CentralSettings:
    return CentralSettings(
        lr=config.train.lr,
        schedule=config.train.schedule,
        batch_size=config.train.batch_size,
        steps_per_epoch=config.train.steps_per_epoch,
        step=step(config, precision),
        optimizer=optimizer(config),
        seed=config.seed,
    )


def loop(config: Config) -> LoopSettings:
    return LoopSettings(
        unit=unit(config),
        evaluate_every=config.evaluate.every,
        checkpoint_every=config.checkpoint.every,
        checkpoint_minutes=config.checkpoint.minutes,
        early_stopping=config.train.early_stopping,
        test_curve=config.evaluate.test_curve,
    )


def head(config: Config, precision: Precision) -> HeadSettings:
    row = row_of(config, "head")
    if row.traits.get("by") == "training":
        return HeadSettings(row, training=head_training(config, precision))
    common = {one.name for one in head_registry.common}
    parameters = {k: v for k, v in config.head.parameters.items() if k not in common}
    return HeadSettings(row, parameters, train_layers=config.head.train_layers)


def refit(config: Config, experiment: Experiment, stop: StopRequest) -> HeadRefit | None:
    """None where the head stays as it was solved first."""
    every = config.federated.refit_head
    if not head_changes(config):
        return None
    chosen = head(config, experiment.precision)
    return HeadRefit(
        every, chosen, config.federated.refit_examples, config.evaluate.batch_size, config.seed,
        experiment, stop,
    )  # fmt: skip


def head_training(config: Config, precision: Precision) -> HeadTraining:
    federated = config.federated.clients is not None
    return HeadTraining(
        local=LocalTraining(
            step=StepSettings(
                precision.for_clients(),
                label_smoothing=config.train.label_smoothing,
                dropout=config.head.dropout,
                clip_norm=config.train.clip_norm,
            ),
            batch_size=config.train.batch_size,
            optimizer=optimizer(config),
        ),
        lr=config.head.lr,
        steps=config.head.steps,
        local_steps=config.federated.local_steps if federated else None,
        cohort_size=cohort_size(config.federated) if federated else 1,
        seed=rng.address(config.seed, "trained head"),  # draws of its own
    )


def masks(config: Config, experiment: Experiment) -> MaskSettings | None:
    """None where every weight is trained."""
    sparse, rule = config.sparse, config.sparse.rule
    if sparse.density is None:
        return None
    by_clients = sparse.source == "clients"
    return MaskSettings(
        calibration=CalibrationSettings(
            rule=rule.name,
            density=sparse.density,
            rule_parameters=rule.parameters,
            scope=sparse.scope,
            method=sparse.method,
            rounds=sparse.rounds,
            shrink_factor=sparse.shrink_factor,
            labels=sparse.labels,
            target=sparse.target,
            examples=sparse.examples,
            passes=sparse.passes,
            micro_batch=sparse.micro_batch,
        ),
        seed=config.seed,
        biases=sparse.biases,
        norms=sparse.norms,
        embeddings=sparse.embeddings,
        by_clients=by_clients and experiment.partition is not None,
        voting=sparse.voting,
        client_count=sparse.clients,
        depends_on={
            "data_config": _without_root(config),
            "backbone": backbone.spelled(config.backbone),
            "resolution": config.backbone.resolution,
            "partition": _partition(config, experiment) if by_clients else None,
            "of_clients": config.federated.clients if by_clients else None,
            "threads": _threads_of_scores(config, by_clients=by_clients),
            **products(config),
        },
    )


def prefix(config: Config, experiment: Experiment) -> PrefixSettings:
    clients = experiment.partition
    shards = [len(experiment.train)] if clients is None else clients.sizes.tolist()
    federated, train, evaluate = config.federated, config.train, config.evaluate
    if clients is None:
        epoch = central(config, experiment.precision).epoch_length(len(experiment.train))
        units, seen = train.epochs, epoch * train.batch_size
    else:
        units, seen = (
            rounds(config),
            visits(config) * federated.local_steps * train.batch_size,
        )
    validation = len(experiment.validation or ())
    heads = units // federated.refit_head if federated.refit_head else 0  # each is evaluated too
    threads = config.engine.get("threads_per_client")
    return PrefixSettings(
        max_bytes=int(train.prefix_cache_gb * 1e9),
        images_seen=units * seen + (units // evaluate.every + heads) * validation,
        min_passes=CACHED_PASSES,
        batch=train.micro_batch or train.batch_size,
        splits_batches=train.micro_batch is not None,
        train_sizes=batch_sizes(shards, train.batch_size, train.micro_batch),
        train_threads={threads} if threads else {1, torch.get_num_threads()},
        evaluate_batch=evaluate.batch_size,
        train_per_class=config.data.train_per_class,
        test_per_class=config.data.test_per_class,
        refused=_prefix_refusal(config),
    )


def _prefix_refusal(config: Config) -> str | None:
    if row_of(config, "engine").traits.get("remote"):
        return "clients are reached through Flower, and each would need a cache of its own"
    if config.train.compile:
        return "train.compile=true compiles the whole model"
    if client_statistic(config) is not None:
        return "clients send statistics of the whole model"
    return None


def _without_root(config: Config) -> dict[str, Any]:
    portable = row_of(config, "data").portable(config.data)
    return {name: value for name, value in portable.items() if name != "root"}


def _partition(config: Config, experiment: Experiment) -> dict[str, Any]:
    """The partition's settings; of one that a file gives, its content too."""
    digest = experiment.input_hashes.get("partition")
    portable = row_of(config, "partition").portable(config.partition)
    return portable if digest is None else {**portable, "digest": digest}


def _threads_of_scores(config: Config, *, by_clients: bool) -> Any:
    """Another number of threads gives other last bits: here, or on the clients' hosts."""
    if by_clients and row_of(config, "engine").traits.get("remote"):
        return f"{config.engine.threads_per_client} of each host"
    return torch.get_num_threads()


def federated(config: Config, precision: Precision) -> FederatedSettings:
    federated, algorithm = config.federated, config.algorithm
    aggregator, server = row_of(config, "algorithm.aggregator"), row_of(config, "algorithm.server")
    sampling = row_of(config, "algorithm.sampling")
    server_parameters = {k: v for k, v in algorithm.server.parameters.items() if k != "lr"}
    return FederatedSettings(
        lr=config.train.lr,
        schedule=config.train.schedule,
        local=local_training(config, precision),
        draw_cohort=partial(
            draw_cohort,
            config.seed,
            size=cohort_size(federated),
            local_steps=federated.local_steps,
            min_local_steps=federated.min_local_steps,
            dropout=federated.dropout,
            sample=partial(sampling.make, **algorithm.sampling.parameters),
        ),
        aggregator=make_aggregator(aggregator, algorithm.aggregator.parameters),
        server=server.make(**server_parameters),
        server_lr=algorithm.server.lr,
        correction=correction(config),
        measure_controls=algorithm.measure_controls,
        average=model_average(config),
        seed=config.seed,
        diagnostics={name: diagnostic[name].make for name in federated.diagnostics},
        weighting="uniform" if config.privacy.name == "central" else "examples",
        release=privacy.release(config),
        bad_update="raise" if federated.fail_on_bad_update else "skip",
        check_rounds=row_of(config, "engine").traits.get("remote", False),
        keep_updates=federated.keep_updates,
        statistic=client_statistic(config),
    )


def client_statistic(config: Config) -> ClientStatistic | None:
    """What clients send beside their updates, where the aggregator needs it."""
    row = row_of(config, "algorithm.aggregator")
    return statistic_of(row.traits.get("needs"), config.algorithm.statistics_examples)


def make_engine(config: Config, row: Row | None, trainer: Trainer, clients: int) -> Engine:
    """The engine of a local row; without one, clients one after another.

    It receives the number of clients that may train at once: in chains, one.
    """
    clients = 1 if sequential(config) else clients
    if row is None:
        chosen = config.engine
        return rows.serial(
            trainer,
            clients,
            threads_per_client=chosen.threads_per_client,
            vectorise=chosen.vectorise,
        )
    engine: Engine = row.make(trainer, clients, **config.engine.parameters)
    return engine
