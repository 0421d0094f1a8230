"""Merging methods as aggregators: the clients' updates are task vectors, merged into one change.

TIES, DARE, Breadcrumbs, consensus, task arithmetic, TSV-Merge, Iso-C, RegMean and the Fisher
average: the rows of `fedlens.arithmetic`.
"""

from collections.abc import Sequence
from typing import Any

import torch

from fedlens import params
from fedlens.arithmetic.merging import merge
from fedlens.arithmetic.task_vectors import task_vector
from fedlens.federated.server.aggregation import Contribution
from fedlens.params import Params
from fedlens.registry import Row
from fedlens.rng import Stream
from fedlens.runtime.threads import limited_threads
from fedlens.sparse.packing import Packing


class Merged:
    """Holds all updates of a round and merges them by a row of `merge_method`."""

    def __init__(self, start: Params, stream: Stream, *, method: Row, **parameters: Any) -> None:
        self.start = start
        self.stream = stream
        self.method = method
        self.parameters = parameters
        self.packing: Packing | None = None
        self.whole: Params = {}
        self.vectors: dict[int, dict[str, torch.Tensor]] = {}
        self.weights: list[float] = []
        self.statistics: list[Params] = []

    def unpack_with(self, packing: Packing, whole: Params) -> None:
        self.packing, self.whole = packing, whole

    def add(self, one: Contribution) -> None:
        self.vectors[one.client] = task_vector(self.start, one.parameters)
        self.weights.append(one.weight)
        if self.method.traits.get("needs"):
            self.statistics.append(params.copy(one.statistics))

    def change(self) -> dict[str, torch.Tensor]:
        return merge_packed(
            list(self.vectors.values()),
            self.method,
            self.packing,
            self.whole,
            weights=self.weights,
            ids=list(self.vectors),
            stream=self.stream,
            statistics=self.statistics if self.method.traits.get("needs") else None,
            **self.parameters,
        )


def merge_packed(
    vectors: Sequence[Params],
    method: Row,
    packing: Packing | None,
    whole: Params,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """`merge` of vectors as they are sent: of a masked tensor, its trained entries.

    A method that reads matrices (trait `matrices`) gets masked tensors whole, with zeros where they
    are frozen, and of its result the trained entries are taken. `whole` has their shapes.
    """
    if not method.traits.get("matrices", False):
        return merge(vectors, method, **options)
    with limited_threads(1):  # factorisations give other last bits with other numbers of threads
        if packing is None or not packing.index:
            return merge(vectors, method, **options)
        return _merge_spread(vectors, method, packing, whole, **options)


def _merge_spread(
    vectors: Sequence[Params], method: Row, packing: Packing, whole: Params, **options: Any
) -> dict[str, torch.Tensor]:
    shaped = {
        name: torch.empty_like(whole[name], dtype=torch.float64, device=value.device)
        for name, value in vectors[0].items()
    }
    spread = [
        {name: packing.spread(name, v.double(), shaped[name]) for name, v in vector.items()}
        for vector in vectors
    ]
    merged = merge(spread, method, **options)
    return {name: packing.taken(name, value) for name, value in merged.items()}
