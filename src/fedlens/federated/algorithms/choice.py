"""From the name of a row, or a function of the user's own, to an aggregator for every round."""

from collections.abc import Callable, Mapping
from functools import partial
from inspect import isclass
from typing import Any

import torch

from fedlens import params
from fedlens.arithmetic.task_vectors import task_vector
from fedlens.errors import FedlensError
from fedlens.federated.algorithms.merging import Merged
from fedlens.federated.server.aggregation import Aggregator, Contribution
from fedlens.params import Params
from fedlens.registry import Row, aggregator, merge_method
from fedlens.rng import Stream

MakeAggregator = Callable[[Params, Stream], Aggregator]  # (start, stream), for one round
AggregateFunction = Callable[..., Mapping[str, torch.Tensor]]  # (updates, weights, *, parameters)


def make_aggregator(
    choice: str | Row | Callable[..., Any], parameters: Mapping[str, Any] | None = None
) -> MakeAggregator:
    """An aggregator by name, by row, or by a class or function of one's own.

    A class is made for each round as `cls(start, stream, **parameters)` and has `add` and
    `change`. A function is called once a round as `function(updates, weights, **parameters)`,
    where `updates` are the clients' changes w_k − w in float64, in the order of the clients'
    numbers, and `weights` their numbers of examples; it returns the change of the global model.

    Examples:
        >>> import torch
        >>> from fedlens.federated.server.aggregation import Contribution
        >>> from fedlens.rng import Stream
        >>> start = {"w": torch.zeros(2)}
        >>> def largest(updates, weights):
        ...     return updates[weights.index(max(weights))]
        >>> round_ = make_aggregator(largest)(start, Stream(0, ("merge", 1)))
        >>> round_.add(Contribution(0, {"w": torch.tensor([1.0, 2.0])}, 10, None, 2.24))
        >>> round_.add(Contribution(1, {"w": torch.tensor([3.0, 4.0])}, 20, None, 5.0))
        >>> round_.change()["w"].tolist()
        [3.0, 4.0]
    """
    if isinstance(choice, str):
        choice = aggregator[choice]
    if isinstance(choice, Row):
        values = choice.checked(parameters or {})
        for method in merge_method:
            if method.source == choice.source:
                return partial(Merged, method=method, **values)
        choice = choice.make
    else:
        values = dict(parameters or {})
        aggregator.check_signature(choice, {}, values)
    made_each_round = isclass(choice)
    if made_each_round:
        return partial(choice, **values)
    return partial(Collected, function=partial(choice, **values))


def needed_statistic(choice: str | Row | Callable[..., Any]) -> str | None:
    """What clients must send for an aggregator beside their updates: its row's trait `needs`."""
    if isinstance(choice, str):
        choice = aggregator[choice]
    return choice.traits.get("needs") if isinstance(choice, Row) else None


class Collected:
    """A plain function as an aggregator: holds all updates of a round, then calls it."""

    def __init__(self, start: Params, stream: Stream, *, function: AggregateFunction) -> None:
        del stream
        self.start = start
        self.function = function
        self.updates: dict[int, tuple[dict[str, torch.Tensor], float]] = {}

    def add(self, one: Contribution) -> None:
        self.updates[one.client] = task_vector(self.start, one.parameters), one.weight

    def change(self) -> dict[str, torch.Tensor]:
        ordered = [self.updates[client] for client in sorted(self.updates)]
        change = self.function([update for update, _ in ordered], [weight for _, weight in ordered])
        if fault := params.mismatch(self.start, change):
            raise FedlensError(
                f"The aggregator's result does not fit the model ({fault}): return one tensor for "
                "every tensor of an update."
            )
        return {name: change[name].double() for name in self.start}
