"""Heads in closed form: statistics from whoever holds the data, free numbers from validation.

Statistics are found by the content they are of, so runs that share it take them once.
"""

import hashlib
import logging
from collections.abc import Callable
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import nn

from fedlens import files, params
from fedlens.cache import cached
from fedlens.config.schema import HeadConfig
from fedlens.data.examples import FeatureExamples
from fedlens.data.partition import Partition
from fedlens.federated import wire
from fedlens.federated.tasks import Crowd
from fedlens.models import heads

VERSION = 1  # to be raised whenever the same features would give other bits

log = logging.getLogger(__name__)


def closed_form_head(
    config: HeadConfig,
    train: FeatureExamples,
    validation: FeatureExamples,
    classes: int,
    partition: Partition | None = None,
    *,
    crowd: Crowd | None = None,
    check: Callable[[], None] = lambda: None,
) -> tuple[nn.Linear, dict[str, Any]]:
    """Ridge or class means; λ and temperature, where they are free, from validation.

    With a partition every client sends the statistics of its shard and the server adds them up:
    the head is that of the pooled data, whoever holds what. A `crowd` is asked for them, if the
    clients are elsewhere; `check` is called while another process takes the same statistics.
    """
    facts: dict[str, Any] = {}
    if crowd:
        stats = reduce(add, crowd.statistics(validation.features.shape[1], classes))
    else:
        stats = _shared(train, classes, partition, check)
    if partition is not None:
        facts["statistics_bytes_up"] = len(partition) * wire.size(vars(stats))
    if config.name == "class_means":
        head = heads.class_means(stats)
    elif config.ridge_lambda is None:
        head, facts["ridge_lambda"] = heads.choose_ridge(
            stats, validation.features, validation.labels
        )
    else:
        head, facts["ridge_lambda"] = heads.ridge(stats, config.ridge_lambda), config.ridge_lambda
    temperature = config.temperature
    if temperature is None:
        with torch.no_grad():
            logits = head.to(validation.features.device)(validation.features)
        temperature = heads.temperature(logits, validation.labels)
    facts["temperature"] = temperature
    log.info("%s head in closed form: %s", config.name, facts)
    return heads.scaled(head, temperature), facts


def _shared(
    train: FeatureExamples,
    classes: int,
    partition: Partition | None,
    check: Callable[[], None],
) -> heads.Statistics:
    """The statistics from the cache, or taken and put there: a digest costs a fifth or less."""
    dealt = {} if partition is None else vars(partition)
    content = params.digest({"features": train.features, "labels": train.labels, **dealt})
    threads = torch.get_num_threads()  # another number, other last bits
    key = (VERSION, content, classes, threads, torch.__version__)
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:32]
    path = files.cache_dir() / "statistics" / f"{name}.safetensors"

    def take() -> dict[str, torch.Tensor]:
        if partition is None:
            return vars(heads.Statistics.of(train.features, train.labels, classes))
        return vars(federated_statistics(train, partition, classes))

    return heads.Statistics(**cached(path, take, threads=threads, check=check))


def federated_statistics(
    train: FeatureExamples, partition: Partition, classes: int
) -> heads.Statistics:
    """XᵀX, XᵀY and counts of every client, added up in the clients' order."""
    clients = range(len(partition))
    return reduce(add, (client_statistics(train, partition, classes, k) for k in clients))


def client_statistics(
    train: FeatureExamples, partition: Partition, classes: int, client: int
) -> heads.Statistics:
    shard = partition.shard(client)
    return heads.Statistics.of(train.features[shard], train.labels[shard], classes)
