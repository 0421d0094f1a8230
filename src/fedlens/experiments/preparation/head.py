"""Heads that are fitted on frozen features before anything else: in closed form, or trained.

A closed-form head needs sums over the clients' features only; a trained one takes rounds of FedAvg.
Without a partition there is one client, which holds everything. Remote clients may fail and be left
out, so a head of theirs is kept in the run's folder, where resumed sessions and analyses find it.
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
from fedlens.experiments.preparation.provenance import check_head_digest
from fedlens.federated import wire
from fedlens.federated.client import LocalTraining
from fedlens.federated.rounds import BadUpdate, FederatedAlgorithm
from fedlens.federated.sampling import draw_cohort
from fedlens.federated.tasks import Clients
from fedlens.models import head_files
from fedlens.models.architectures import backbones
from fedlens.models.deep_features import DeepFeatures
from fedlens.models.heads import Labelled, Statistics, widened
from fedlens.registry import Row
from fedlens.runtime.progress import progress_bar
from fedlens.runtime.stop import StopRequest
from fedlens.runtime.units import counted
from fedlens.store.run_folder import RunFolder

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
    experiment: Experiment,
    clients: Clients,
    settings: HeadSettings,
    stop: StopRequest,
    folder: RunFolder | None = None,
) -> Experiment:
    """The experiment with its head fitted by the clients, where it is fitted beforehand.

    `folder` is that of the run that the head is for: one that is kept there is not fitted again.
    """
    if not experiment.head_is_fitted:
        return experiment
    if folder is not None and folder.head.exists():
        head = experiment.model.head
        values, facts = head_files.load(folder.head, tensors(head))
        params.assign(tensors(head), values)
        measurements = facts["measurements"]
    else:
        head, measurements, left_out = _fitted(experiment, clients, settings, stop)
        if folder is not None and not clients.repeatable:
            _keep(folder, head, measurements, left_out)
    if folder is not None:
        check_head_digest(folder, tensors(head))
    experiment = experiment.with_head(head, measurements)
    clients.share(head=head)
    return experiment


def tensors(head: nn.Linear) -> dict[str, torch.Tensor]:
    return {WEIGHT: head.weight, BIAS: head.bias}


def _fitted(
    experiment: Experiment, clients: Clients, settings: HeadSettings, stop: StopRequest
) -> tuple[nn.Linear, dict[str, Any], dict[int, str]]:
    """The head, measurements, and the clients that it was fitted without, with the reasons."""
    federated = experiment.partition is not None
    if settings.training is not None:
        return train_head(
            experiment.model.head, clients, settings.training, stop, federated=federated
        )
    head, measurements = fit_head(
        settings,
        clients,
        experiment.features.validation,
        experiment.classes,
        settings.reads(experiment.backbone),
        federated=federated,
    )
    return head, measurements, dict(clients.left_out)


def _keep(
    folder: RunFolder, head: nn.Linear, measurements: dict[str, Any], left_out: dict[int, str]
) -> None:
    if left_out and folder.checkpoints.is_dir():
        raise FedlensError(
            f"{folder.name} began with a head that was fitted by all clients, and "
            f"{counted(len(left_out), 'client')} could not be used now "
            f"({next(iter(left_out.values())).rstrip('.')}): check the nodes, then run the same "
            "command again."
        )
    reasons = {str(client): why for client, why in sorted(left_out.items())}
    facts = {"measurements": measurements, "left_out": reasons}
    head_files.save(folder.head, tensors(head), facts)
    folder.write("head", facts)


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
    known = validation.features, validation.labels
    statistics = clients.statistics(validation.features, classes)
    try:
        head, chosen, size = settings.solve(statistics, known, reads)
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        raise FedlensError(
            f"The {settings.row.label} cannot be solved from the clients' features "
            f"({' '.join(str(error).split())}): choose another head, or a larger penalty."
        ) from error
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
) -> tuple[nn.Linear, dict[str, Any], dict[int, str]]:
    """`head` after all its local steps of FedAvg, what it cost to send, and who was left out.

    Only remote clients are left out of a round; in this process, a bad update is divergence.
    """
    steps = training.local_steps or training.steps
    rounds = -(-training.steps // steps)
    algorithm = FederatedAlgorithm(
        clients.engine("head"),
        training.local,
        bad_update="raise" if clients.repeatable else "skip",
        seed=training.seed,
    )
    names = tensors(head)
    state = algorithm.init(names)
    used, left_out = 0, dict[int, str]()
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
                state, report = algorithm.apply(state, cohort)
            except BadUpdate as bad:
                raise FedlensError(
                    f"The head diverged in round {number} of its training: lower head.lr."
                ) from bad
            used += len(report.accepted)
            left_out |= report.rejected
            update(number, rounds)
    if not used:
        why = next(iter(left_out.values()), "no client was asked").rstrip(".")
        raise FedlensError(
            f"No client trained the head ({why}): check the nodes, or lower head.lr, then run the "
            "same command again."
        )
    params.assign(names, state.trained)
    if not federated:
        log.info("head trained in %d steps", steps)
        return head, {}, {}
    bytes_up = rounds * training.cohort_size * wire.size(state.trained)
    measurements = {"head_rounds": rounds, "head_bytes_up": bytes_up}
    log.info("head trained: %s", measurements)
    return head, measurements, left_out
