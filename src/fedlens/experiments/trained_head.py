"""A head trained on frozen features before all else: by the clients, where there are any.

Central training is one client with all the data that does every step in one round.
"""

import logging
from typing import Any

import torch
from torch import nn

from fedlens import params, rng
from fedlens.config.schema import Config, cohort_size
from fedlens.data.examples import FeatureExamples
from fedlens.data.partition import Partition
from fedlens.errors import FedlensError
from fedlens.federated import sampling, server, wire
from fedlens.federated.client import LocalRules, Task
from fedlens.federated.engines.serial import Engine
from fedlens.federated.engines.vectorised import NAMES, Vectorised
from fedlens.federated.rounds import Gathering
from fedlens.federated.tasks import Crowd
from fedlens.runtime.progress import bar
from fedlens.runtime.stop import StopRequest
from fedlens.training.precision import Precision
from fedlens.training.step import StepRules

log = logging.getLogger(__name__)


def trained_head(
    config: Config,
    train: FeatureExamples,
    head: nn.Linear,
    partition: Partition | None,
    precision: Precision,
    stop: StopRequest,
    *,
    crowd: Crowd | None = None,
) -> tuple[nn.Linear, dict[str, Any]]:
    """`head` after head.steps local steps of FedAvg, and what it cost to send.

    A `crowd` does the steps, if the clients are elsewhere.
    """
    seed, rules = head_seed(config), head_rules(config, precision)
    everyone = torch.arange(len(train))
    clients = len(partition) if partition else 1
    size = cohort_size(config.federated) if partition else 1
    steps = config.federated.local_steps if partition else config.head.steps
    rounds = -(-config.head.steps // steps)
    head.to(train.features.device)
    start = dict(zip(NAMES, (head.weight.detach(), head.bias.detach()), strict=True))
    globally = server.Server(start, server.TABLE["average"], server.ServerSettings())
    engine: Engine = Vectorised(train, rules, seed, torch.get_num_threads())
    if crowd:
        engine = crowd.engine("head")
    with bar("training the head", stop) as update:
        for number in range(1, rounds + 1):
            cohort = sampling.cohort(seed, number, clients=clients, size=size)
            gathering = Gathering(globally.parameters, rules)
            tasks = [
                Task(
                    number,
                    client,
                    partition.shard(client) if partition else everyone,
                    steps,
                    config.head.lr,
                )
                for client in cohort
            ]
            for answer in engine.updates(globally.parameters, tasks):
                if not answer.parameters:
                    raise FedlensError(
                        f"Client {answer.task.client} did not train the head in its round {number} "
                        f"({answer.fault}): see to its node, then run the same command again."
                    )
                if not gathering.add(answer):
                    raise FedlensError(
                        f"The head diverged in round {number} of its training: lower head.lr."
                    )
            change = gathering.change()
            assert change is not None
            globally.step(change)
            update(number, rounds)
    params.assign(dict(zip(NAMES, (head.weight, head.bias), strict=True)), globally.parameters)
    facts = {"head_rounds": rounds, "head_bytes_up": rounds * size * wire.size(start)}
    log.info("head trained beforehand: %s", facts if partition else {"steps": steps})
    return head, facts if partition else {}


def head_seed(config: Config) -> int:
    """Draws of its own, none of the training's."""
    return rng.address(config.seed, "trained head")


def head_rules(config: Config, precision: Precision) -> LocalRules:
    return LocalRules(
        step=StepRules(
            precision.for_clients(),
            label_smoothing=config.train.label_smoothing,
            dropout=config.head.dropout,
            clip_norm=config.train.clip_norm,
        ),
        batch_size=config.train.batch_size,
        momentum=config.train.momentum,
        weight_decay=config.train.weight_decay,
        nesterov=config.train.nesterov,
    )
