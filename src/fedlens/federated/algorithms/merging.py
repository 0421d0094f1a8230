"""Merging methods as aggregators: the clients' updates are task vectors, merged into one change.

TIES, DARE, Breadcrumbs, consensus, task arithmetic: the rows of `fedlens.arithmetic.merging`.
"""

from typing import Any

import torch

from fedlens.arithmetic.merging import merge
from fedlens.arithmetic.task_vectors import task_vector
from fedlens.federated.aggregation import Contribution
from fedlens.params import Params
from fedlens.registry import Row
from fedlens.rng import Stream


class Merged:
    """Holds all updates of a round and merges them by a row of `merge_method`."""

    def __init__(self, start: Params, stream: Stream, *, method: Row, **parameters: Any) -> None:
        self.start = start
        self.stream = stream
        self.method = method
        self.parameters = parameters
        self.vectors: dict[int, dict[str, torch.Tensor]] = {}
        self.weights: list[float] = []

    def add(self, one: Contribution) -> None:
        self.vectors[one.client] = task_vector(self.start, one.parameters)
        self.weights.append(one.weight)

    def change(self) -> dict[str, torch.Tensor]:
        return merge(
            list(self.vectors.values()),
            self.method,
            weights=self.weights,
            ids=list(self.vectors),
            stream=self.stream,
            **self.parameters,
        )
