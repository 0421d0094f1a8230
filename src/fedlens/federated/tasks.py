"""What server and clients exchange: a cohort's tasks, and the clients' updates.

Training data and labels stay with the clients; only these values travel.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal, Protocol

import torch
from torch import nn

from fedlens.errors import FedlensError
from fedlens.models.heads import Statistics
from fedlens.params import Params
from fedlens.sparse.masks import Masks, Ranking
from fedlens.sparse.sensitivity.fisher import Sensitivity
from fedlens.training.step import Tally

Stage = Literal["head", "rounds"]  # a head trained on features before the rounds, or the rounds


@dataclass(frozen=True)
class ClientTask:
    """What the server asks of one client in one round; whoever holds the data finds its shard."""

    round: int
    client: int
    steps: int
    lr: float
    examples: int  # how many the client holds: its weight in the average
    correction: Params | None = None  # added to each gradient, as SCAFFOLD's c − c_i
    own: Params | None = None  # tensors that the client keeps for itself, as it left them (FedBN)
    statistics: Params = field(default_factory=dict)  # the layout of those that are asked for
    chain: int | None = None  # the number of its chain: it starts where the client before it in the
    # chain stopped. None: all clients start from the global model


@dataclass(frozen=True)
class ClientUpdate:
    """What a client answers; its tensors are lent until the engine yields the next update."""

    task: ClientTask
    parameters: Params  # of a masked parameter, the trained entries, and tensors that travel
    # beside them (`federated.carried`); empty if none arrived
    tally: Tally | None  # None: the client does not reveal its losses
    fault: str | None = None  # why the client gave up or did not answer
    individual: bool = True  # False: `parameters` are the mean of all, by secure aggregation
    statistics: Params = field(default_factory=dict)  # what the aggregator needs besides


@dataclass(frozen=True)
class Cohort:
    """The clients drawn for one round, and the tasks of those that will answer."""

    round: int
    drawn: tuple[int, ...]
    tasks: tuple[ClientTask, ...]
    lr: float
    dropout: bool = False  # clients may drop out: the record lists those that did
    stragglers: bool = False  # clients may do fewer steps: the record lists how many they did

    @property
    def dropped(self) -> list[int]:
        """The clients that were drawn but do not answer."""
        answering = {task.client for task in self.tasks}
        return sorted(client for client in self.drawn if client not in answering)

    @property
    def chains(self) -> list[list[ClientTask]]:
        """The tasks of each chain, one after another; empty where there are no chains."""
        chained = [task for task in self.tasks if task.chain is not None]
        return [list(links) for _, links in groupby(chained, key=lambda task: task.chain)]


class NoUpdates(FedlensError):
    """None of the clients that an engine was asked to train gave an update."""

    def __init__(self, tasks: Sequence[ClientTask], reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"None of the {len(tasks)} clients of round {tasks[0].round} gave an update "
            f"({reason.rstrip('.')}): check the nodes, then run the same command again to "
            "resume."
        )


class Engine(Protocol):
    """Whoever carries out a round's tasks: this process, worker processes, or remote nodes."""

    def updates(self, parameters: Params, tasks: Sequence[ClientTask]) -> Iterator[ClientUpdate]:
        """One update for every task, in their order; each is lent until the next one."""
        ...

    def close(self) -> None: ...


class Clients(Protocol):
    """All clients of an experiment, wherever they are; answers come in the order asked for."""

    @property
    def sizes(self) -> Sequence[int]:
        """How many examples each client holds."""
        ...

    @property
    def repeatable(self) -> bool:
        """Whether clients that are asked again give the same answers: remote ones may not."""
        ...

    @property
    def left_out(self) -> Mapping[int, str]:
        """The clients whose statistics, sensitivities or rankings could not be used, and why."""
        ...

    def engine(self, stage: Stage) -> Engine: ...

    def statistics(self, known: torch.Tensor, classes: int) -> Statistics:
        """The sum over all clients: what closed-form heads need.

        `known` are features of validation examples, which show the width and the scale.
        """
        ...

    def sensitivities(
        self, clients: Sequence[int], round_: int, parameters: Params
    ) -> Iterator[Sensitivity]:
        """Of the model with these parameters, in a calibration round (numbered from 0)."""
        ...

    def rankings(self, clients: Sequence[int], like: Ranking) -> Iterator[Ranking]:
        """Each client's own ranking of the weights, calibrated on its examples alone."""
        ...

    def share(self, *, head: nn.Linear | None = None, masks: Masks | None = None) -> None:
        """Sends a prepared head or masks to the clients; local clients need nothing."""
        ...
