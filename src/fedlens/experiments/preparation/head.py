"""Heads that are fitted on frozen features before anything else: in closed form, or trained.

A closed-form head needs sums over the clients' features only; a trained one takes rounds of FedAvg.
Without a partition there is one client, which holds everything.
"""

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from fedlens import files, params
from fedlens.cache import cached
from fedlens.data.examples import FeatureExamples
from fedlens.errors import FedlensError
from fedlens.experiments.build import Experiment
from fedlens.federated import wire
from fedlens.federated.client import LocalTraining
from fedlens.federated.rounds import BadUpdate, FederatedAlgorithm
from fedlens.federated.sampling import draw_cohort
from fedlens.federated.tasks import Clients
from fedlens.models.architectures import backbones
from fedlens.models.deep_features import DeepFeatures
from fedlens.models.heads import Labelled, Statistics, widened
from fedlens.registry import Row
from fedlens.runtime.progress import progress_bar
from fedlens.runtime.stop import StopRequest

WEIGHT, BIAS = "head.weight", "head.bias"
STATISTICS_VERSION = 2  # to be raised whenever the same features would give other bits

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeadTraining:
    """How a head is trained by rounds of FedAvg on features."""

    local: LocalTraining
    lr: float
    steps: int  # local steps × rounds
    local_steps: int | None  # of a client in a round; None: all of them, in one round
    cohort_size: int
    seed: int


@dataclass(frozen=True)
class HeadSettings:
    row: Row
    parameters: dict[str, Any] = field(default_factory=dict)  # of a closed-form head
    training: HeadTraining | None = None  # of a trained head
    train_layers: int | None = None  # blocks that it reads while the backbone is trained; None: all

    def reads(self, backbone: nn.Module) -> int:
        """How many features, the first ones, it reads while the backbone is trained."""
        if self.train_layers is None:
            return backbones.width(backbone)
        return cast(DeepFeatures, backbone).widths[self.train_layers]

    def solve(
        self, statistics: Statistics, validation: Labelled, reads: int
    ) -> tuple[nn.Linear, dict[str, Any], int]:
        """The head that reads the first so many features, what was chosen, and a message's size."""
        features, labels = validation
        part = statistics.first(reads)
        head, chosen = self.row.make(part, (features[:, :reads], labels), **self.parameters)
        return widened(head, features.shape[1]), chosen, wire.size(part.sent())


def prepare_head(
    experiment: Experiment, clients: Clients, settings: HeadSettings, stop: StopRequest
) -> Experiment:
    """The experiment with its head fitted by the clients, where it is fitted beforehand."""
    if not experiment.head_is_fitted:
        return experiment
    validation = experiment.features.validation
    federated = experiment.partition is not None
    if settings.training is not None:
        head, measurements = train_head(
            experiment.model.head, clients, settings.training, stop, federated=federated
        )
    else:
        reads = settings.reads(experiment.backbone)
        head, measurements = fit_head(
            settings, clients, validation, experiment.classes, reads, federated=federated
        )
    experiment = experiment.with_head(head, measurements)
    clients.share(head=head)
    return experiment


def fit_head(
    settings: HeadSettings,
    clients: Clients,
    validation: FeatureExamples,
    classes: int,
    reads: int,
    *,
    federated: bool,
) -> tuple[nn.Linear, dict[str, Any]]:
    """A head in closed form from the sum of all clients' statistics, whoever holds what.

    It reads the first so many features. Free numbers, such as ridge's λ and the temperature, are
    chosen on validation.
    """
    statistics = clients.statistics(validation.features.shape[1], classes)
    known = validation.features, validation.labels
    head, chosen, size = settings.solve(statistics, known, reads)
    sent = {"statistics_bytes_up": len(clients.sizes) * size} if federated else {}
    measurements = {**sent, **chosen}
    log.info("%s in closed form: %s", settings.row.label, measurements)
    return head, measurements


def cached_statistics(
    experiment: Experiment, check: Callable[[], None], compute: Callable[[], Statistics]
) -> Statistics:
    """What `compute` returns, from the disk cache if a run with the same features was before.

    A digest of the features costs a fifth of their statistics, or less. `check` is called while
    another process computes the same.
    """
    train, partition = experiment.features.train, experiment.partition
    shards = {} if partition is None else vars(partition)
    content = params.digest({"features": train.features, "labels": train.labels, **shards})
    threads = torch.get_num_threads()  # another number, other last bits
    key = (STATISTICS_VERSION, content, experiment.classes, threads, torch.__version__)
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:32]
    path = files.cache_dir() / "statistics" / f"{name}.safetensors"
    tensors = cached(path, lambda: compute().sent(), threads=threads, check=check)
    return Statistics.received(tensors)


def train_head(
    head: nn.Linear,
    clients: Clients,
    training: HeadTraining,
    stop: StopRequest,
    *,
    federated: bool,
) -> tuple[nn.Linear, dict[str, Any]]:
    """`head` after all its local steps of FedAvg, and what it cost to send."""
    steps = training.local_steps or training.steps
    rounds = -(-training.steps // steps)
    algorithm = FederatedAlgorithm(
        clients.engine("head"), training.local, bad_update="raise", seed=training.seed
    )
    names = {WEIGHT: head.weight, BIAS: head.bias}
    state = algorithm.init(names)
    with progress_bar("training the head", stop) as update:
        for number in range(1, rounds + 1):
            cohort = draw_cohort(
                training.seed,
                number,
                clients.sizes,
                size=training.cohort_size,
                lr=training.lr,
                local_steps=steps,
            )
            try:
                state, _ = algorithm.apply(state, cohort)
            except BadUpdate as bad:
                raise _failure(bad) from bad
            update(number, rounds)
    params.assign(names, state.trained)
    if not federated:
        log.info("head trained in %d steps", steps)
        return head, {}
    bytes_up = rounds * training.cohort_size * wire.size(state.trained)
    measurements = {"head_rounds": rounds, "head_bytes_up": bytes_up}
    log.info("head trained: %s", measurements)
    return head, measurements


def _failure(bad: BadUpdate) -> FedlensError:
    task = bad.update.task
    if bad.update.parameters:
        return FedlensError(
            f"The head diverged in round {task.round} of its training: lower head.lr."
        )
    return FedlensError(
        f"Client {task.client} did not train the head in its round {task.round} "
        f"({bad.fault.rstrip('.')}): check its node, then run the same command again."
    )
