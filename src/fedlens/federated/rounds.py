"""The federated round: local training, aggregation and a server step, as a function of the state.

`init` gives a state and `apply(state, cohort)` the next one with a report; neither changes what it
is given. The experiment loop, the training of a head and the library all call this one round.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Literal

import torch

from fedlens import params
from fedlens.errors import FedlensError
from fedlens.federated import wire
from fedlens.federated.aggregation import (
    Aggregator,
    Contribution,
    UnpacksUpdates,
    WeightedMean,
)
from fedlens.federated.algorithms.choice import MakeAggregator
from fedlens.federated.algorithms.fedavg import FedAvg
from fedlens.federated.algorithms.fedopt import ServerSgd
from fedlens.federated.algorithms.scaffold import ClientMemory, InMemory
from fedlens.federated.carried import CarriedRule
from fedlens.federated.client import LocalTraining
from fedlens.federated.correction import Correction
from fedlens.federated.diagnostics import Delta, MakeDiagnostic
from fedlens.federated.server import Moments, ServerOptimizer, server_step
from fedlens.federated.server_memory import Memory
from fedlens.federated.tasks import ClientTask, ClientUpdate, Cohort, Engine
from fedlens.params import Params
from fedlens.rng import Stream
from fedlens.runtime.threads import limited_threads
from fedlens.sparse.packing import Packing
from fedlens.training.step import Tally

OnUpdate = Callable[[ClientUpdate, bool], None]  # an update, and whether it was accepted
Release = Callable[[dict[str, torch.Tensor], int], dict[str, torch.Tensor]]

log = logging.getLogger(__name__)


class BadUpdate(FedlensError):
    """An update that cannot be used, where such an update ends the training."""

    def __init__(self, update: ClientUpdate, fault: str) -> None:
        self.update = update
        self.fault = fault
        self.rejection = _rejection(update, fault).rstrip(".")
        super().__init__(
            f"{self.rejection}: leave such updates out with bad_update='skip', or lower the "
            "learning rate."
        )


@dataclass(frozen=True, eq=False)
class ServerState:
    """All that the server remembers after a round.

    Examples:
        >>> import torch
        >>> import fedlens as fl
        >>> data = torch.randn(20, 3), torch.arange(20) % 2
        >>> clients = fl.partition(data[1], clients=2)
        >>> fed = fl.fedavg(torch.nn.Linear(3, 2), data, clients, lr=0.1, local_steps=2,
        ...                 batch_size=5)
        >>> state = fed.init()
        >>> state.round, list(state.parameters)
        (0, ['weight', 'bias'])
    """

    round: int  # rounds done
    trained: Params  # the global parameters as they travel: of a masked one, the trained entries
    packing: Packing
    base: Params  # whole tensors, read where masks freeze them: there they never change. It may
    # have parameters that are not in `trained`: those that masks freeze entirely
    moments: Moments = field(default_factory=dict)  # of the server optimizer
    correction: Memory = field(default_factory=dict)  # what the correction remembers
    clients: ClientMemory | None = None  # SCAFFOLD's c_i, or what clients keep for themselves
    carried: Params = field(default_factory=dict)  # travels beside `trained`

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The global parameters as whole tensors, in memory of their own.

        Where BatchNorm's statistics are trained, they are among them.
        """
        whole = params.copy(self.base)
        self.packing.unpack(self.trained, {name: whole[name] for name in self.trained})
        return whole | params.copy(self.carried)


@dataclass(frozen=True)
class RoundReport:
    """What happened in one round.

    Examples:
        >>> import torch
        >>> import fedlens as fl
        >>> data = torch.randn(20, 3), torch.arange(20) % 2
        >>> clients = fl.partition(data[1], clients=2)
        >>> fed = fl.fedavg(torch.nn.Linear(3, 2), data, clients, lr=0.1, local_steps=2,
        ...                 batch_size=5)
        >>> state, report = fed.apply(fed.init(), fed.sample(fed.init(), participation=1.0))
        >>> report.accepted, len(report.losses), list(report.diagnostics)
        ((0, 1), 2, ['update_norms', 'drift', 'cosine', 'sign_agreement'])
    """

    cohort: Cohort
    accepted: tuple[int, ...]  # clients whose updates were aggregated
    rejected: Mapping[int, str]  # clients whose updates were not, and why
    tally: Tally | None  # of all accepted clients; None: they do not reveal their losses
    losses: tuple[float, ...]  # each accepted client's mean training loss
    diagnostics: Mapping[str, float | list[float] | None]
    bytes_down: int
    bytes_up: int
    seconds: Mapping[str, float]  # prepare, train, aggregate (while clients train), server

    def record(self) -> dict[str, Any]:
        """As pure JSON, for a journal of rounds."""
        cohort = self.cohort
        record: dict[str, Any] = {"lr": cohort.lr, "participants": list(cohort.drawn)}
        if cohort.dropout:
            record["dropped"] = cohort.dropped
        if cohort.stragglers:
            record["local_steps"] = [task.steps for task in cohort.tasks]
        record["clients"] = list(self.accepted)
        if self.rejected:
            record["rejected"] = {str(client): why for client, why in self.rejected.items()}
        if self.accepted and self.tally is not None:
            record |= {"train": self.tally.metrics(), "client_losses": list(self.losses)}
        record |= self.diagnostics
        return record | {"bytes_down": self.bytes_down, "bytes_up": self.bytes_up}

    def timings(self) -> dict[str, float]:
        """Seconds by what they were spent on, and training speed."""
        training = self.seconds["train"] + self.seconds["aggregate"]
        seen = 0 if self.tally is None else self.tally.seen
        return {
            "prepare_seconds": self.seconds["prepare"],
            "train_seconds": self.seconds["train"],
            "aggregate_seconds": self.seconds["aggregate"] + self.seconds["server"],
            "images_per_second": seen / max(training, 1e-9),
        }


@dataclass(frozen=True)
class FederatedAlgorithm:
    """How rounds are run: who trains, how, and how updates become the next global model.

    `fedavg` and the other functions make one, with its clients, as `Federation.algorithm`.

    Examples:
        >>> import torch
        >>> import fedlens as fl
        >>> model = torch.nn.Linear(3, 2)
        >>> data = torch.randn(20, 3), torch.arange(20) % 2
        >>> fed = fl.fedavg(model, data, fl.partition(data[1], clients=2), lr=0.1, local_steps=2,
        ...                 batch_size=5)
        >>> state = fed.algorithm.init(dict(model.named_parameters()))
        >>> state, report = fed.algorithm.apply(state, fed.sample(state, participation=1.0))
        >>> state.round
        1
    """

    engine: Engine
    local: LocalTraining
    aggregator: MakeAggregator = FedAvg
    server: ServerOptimizer = ServerSgd()  # noqa: RUF009  (it is frozen)
    server_lr: float = 1.0
    correction: Correction | None = None  # of clients' gradients; `local` has its constant terms
    carried: tuple[CarriedRule, ...] = ()  # how the state's `carried` tensors change
    own: tuple[str, ...] = ()  # names of tensors that every client keeps for itself, as in FedBN
    population: int | None = None  # number of all clients: SCAFFOLD and FedDyn average over them
    diagnostics: Mapping[str, MakeDiagnostic] = field(default_factory=dict)  # by name
    weighting: Literal["examples", "uniform"] = "examples"
    release: Release | None = None  # (change, accepted clients) → the change the server uses
    bad_update: Literal["skip", "raise"] = "skip"
    statistics: Params = field(default_factory=dict)  # the layout of what clients send besides
    seed: int = 0

    def init(
        self,
        parameters: Params,
        *,
        masks: Mapping[str, torch.Tensor] | None = None,
        memory: ClientMemory | None = None,
        carried: Params | None = None,
    ) -> ServerState:
        """The state before the first round.

        `parameters` are the trainable ones as whole tensors. The state copies the entries that are
        trained and refers to the tensors for the others. `memory` holds what clients remember
        (SCAFFOLD's c_i, FedBN's layers), in this process by default. `carried` are the tensors of
        the rules in `self.carried`.
        """
        correction = self.correction
        self._check_correction()
        packing = Packing(parameters, masks or {})
        trained = params.with_float64(params.copy(packing.pack(parameters)))
        return ServerState(
            round=0,
            trained=trained,
            packing=packing,
            base=parameters,
            moments=self.server.init(trained),
            correction={} if correction is None else correction.init(trained),
            clients=(memory or InMemory()) if self._client_states or self.own else None,
            carried=params.with_float64(params.copy(carried or {})),
        )

    def _check_correction(self) -> None:
        if self.correction is None:
            return
        name = type(self.correction).__name__
        if self.correction.needs_effective_steps and self.local.effective_steps(1) is None:
            raise FedlensError(
                f"{name} divides updates by the optimizer's effective steps, which only SGD "
                "defines: train the clients with SGD."
            )
        if self.correction.client_states and self.population is None:
            raise FedlensError(f"{name} needs `population`, the number of all clients.")
        if self.correction.client_states and self.own:
            raise FedlensError(
                f"{name} and layers that clients keep for themselves both need client states: "
                "choose one."
            )

    @property
    def _client_states(self) -> bool:
        return self.correction is not None and self.correction.client_states

    def apply(
        self, state: ServerState, cohort: Cohort, *, on_update: OnUpdate | None = None
    ) -> tuple[ServerState, RoundReport]:
        """One round: the next state, and what happened.

        `on_update` is called after every client, while its update's tensors may still be read.
        """
        if cohort.round != state.round + 1:
            raise FedlensError(
                f"The cohort is for round {cohort.round}, but the state is after round "
                f"{state.round}: draw a cohort for round {state.round + 1}."
            )
        began = time.monotonic()
        tasks = self._tasks(cohort, state)
        updates = _RoundUpdates(self, state, cohort.round)
        prepared = time.monotonic()
        aggregating = 0.0
        for update in self.engine.updates({**state.trained, **state.carried}, tasks):
            arrived = time.monotonic()
            with limited_threads(1):  # the other threads are the workers', where there are any
                accepted = updates.add(update)
            aggregating += time.monotonic() - arrived
            if on_update is not None:
                on_update(update, accepted)
        trained = time.monotonic()
        diagnostics = updates.diagnostics()
        following = replace(self._step(state, updates), round=cohort.round)
        size_down = wire.size({**state.trained, **state.carried}, state.packing.index)
        size_up = wire.size(updates.expected, state.packing.index)
        if self.correction is not None:
            term = wire.size(state.trained, state.packing.index)
            size_down += term
            size_up += term if self.correction.returned else 0
        statistics = wire.size(self.statistics) if self.statistics else 0
        report = RoundReport(
            cohort=cohort,
            accepted=tuple(updates.accepted),
            rejected=updates.rejected,
            tally=updates.tally,
            losses=tuple(updates.losses),
            diagnostics=diagnostics,
            bytes_down=len(cohort.drawn) * size_down,
            bytes_up=len(cohort.tasks) * (size_up + statistics),
            seconds={
                "prepare": prepared - began,
                "train": trained - prepared - aggregating,
                "aggregate": aggregating,
                "server": time.monotonic() - trained,
            },
        )
        return following, report

    def _step(self, state: ServerState, updates: "_RoundUpdates") -> ServerState:
        """The state after the server's step; the same where no valid update came."""
        if not updates.accepted:
            return state
        change = updates.change()
        if self.release is not None:
            change = self.release(change, len(updates.accepted))
        memory, clients = state.correction, state.clients
        if updates.correction is not None:
            corrected = updates.correction.result(change, self.population or 0)
            change, memory = dict(corrected.change), corrected.memory
            if self._client_states:
                assert clients is not None
                clients = clients.updated(corrected.clients)
        trained, moments = server_step(
            state.trained, state.moments, change, self.server, self.server_lr
        )
        if self.own:
            assert clients is not None
            clients = clients.updated(updates.own)
        carried = dict(state.carried)
        for rule in updates.carried:
            carried |= rule.result(trained)
        return replace(
            state,
            trained=trained,
            moments=moments,
            correction=memory,
            clients=clients,
            carried=carried,
        )

    def _tasks(self, cohort: Cohort, state: ServerState) -> list[ClientTask]:
        """The cohort's tasks with what their clients remember, and the correction's terms.

        Clients without states share one term where they take as many steps.
        """
        memory, correction = state.clients, self.correction

        def remembered(client: int) -> Params | None:
            return None if memory is None else memory.get(client)

        @cache
        def term(scale: float | None, client: int | None) -> Params:
            assert correction is not None
            own = None if client is None else remembered(client)
            return correction.term(state.correction, state.trained, own, scale)

        tasks = [replace(task, statistics=self.statistics) for task in cohort.tasks]
        if self.own:
            tasks = [replace(task, own=remembered(task.client)) for task in tasks]
        if correction is None:
            return tasks
        return [
            replace(
                task,
                correction=term(
                    self.local.scale(task.steps, task.lr),
                    task.client if correction.client_states else None,
                ),
            )
            for task in tasks
        ]


class _RoundUpdates:
    """The updates of one round as they come in: checked, measured, aggregated, let go."""

    def __init__(self, algorithm: FederatedAlgorithm, state: ServerState, round_: int) -> None:
        self.algorithm = algorithm
        self.start = state.trained
        stream = Stream(algorithm.seed, ("merge", round_))
        self.aggregator = algorithm.aggregator(self.start, stream)
        if isinstance(self.aggregator, UnpacksUpdates):
            self.aggregator.unpack_with(state.packing, state.base)
        self.mean = self._mean(stream)
        self.measured = {name: make(self.start) for name, make in algorithm.diagnostics.items()}
        self.correction = (
            None
            if algorithm.correction is None
            else algorithm.correction.begin(state.correction, self.start)
        )
        self.carried = [rule.begin(state.carried) for rule in algorithm.carried]
        beside = [name for rule in algorithm.carried if rule.returned for name in rule.names]
        self.expected = {**self.start, **{name: state.carried[name] for name in beside}}
        self.beside = beside
        self.own: dict[int, dict[str, torch.Tensor]] = {}
        self.delta = Delta(self.start)
        self.tally: Tally | None = Tally()
        self.losses: list[float] = []
        self.accepted: list[int] = []
        self.rejected: dict[int, str] = {}
        self.individual = True

    def _mean(self, stream: Stream) -> Aggregator | None:
        """What diagnostics compare updates with: the weighted mean, whatever is aggregated."""
        if type(self.aggregator) is FedAvg:
            return self.aggregator
        return WeightedMean(self.start, stream) if self.algorithm.diagnostics else None

    def add(self, update: ClientUpdate) -> bool:
        """Whether the update was accepted."""
        task, local = update.task, self.algorithm.local
        update = replace(update, parameters=params.with_float64(update.parameters))
        norm = math.nan
        fault = update.fault or params.mismatch(self.expected, update.parameters)
        if not fault:
            norm = self.delta.measure(update.parameters)
            beside = all(update.parameters[name].isfinite().all() for name in self.beside)
            if not (math.isfinite(norm) and beside):
                fault = "it holds values that are not finite"
            else:
                fault = _statistics_fault(self.algorithm.statistics, update.statistics)
        if fault:
            self._reject(update, fault)
            return False
        weight = 1 if self.algorithm.weighting == "uniform" else task.examples
        steps = local.effective_steps(task.steps)
        trained = {name: update.parameters[name] for name in self.start}
        one = Contribution(task.client, trained, weight, steps, norm, statistics=update.statistics)
        self.aggregator.add(one)
        if self.mean is not None and self.mean is not self.aggregator:
            self.mean.add(one)
        self.individual &= update.individual
        if self.individual:
            for diagnostic in self.measured.values():
                diagnostic.add(self.delta.values, norm, weight)
        for rule in self.carried:
            rule.add(update.parameters, weight)
        if self.algorithm.own:
            kept = {name: update.parameters[name] for name in self.algorithm.own}
            self.own[task.client] = params.copy(kept)
        if self.correction is not None:
            self.correction.add(task, trained, local.scale(task.steps, task.lr))
        self._count(update.tally)
        self.accepted.append(task.client)
        return True

    def change(self) -> dict[str, torch.Tensor]:
        return self._mean_change if self.aggregator is self.mean else self.aggregator.change()

    def diagnostics(self) -> dict[str, float | list[float] | None]:
        """None of them where no valid update came, or where updates are not individual."""
        if not (self.measured and self.accepted and self.individual):
            return {}
        return {name: one.result(self._mean_change) for name, one in self.measured.items()}

    @cached_property
    def _mean_change(self) -> dict[str, torch.Tensor]:
        """Once all updates are in."""
        assert self.mean is not None
        return self.mean.change()

    def _count(self, tally: Tally | None) -> None:
        if tally is None or self.tally is None:
            self.tally, self.losses = None, []
            return
        self.tally += tally
        self.losses.append(tally.loss / tally.seen)

    def _reject(self, update: ClientUpdate, fault: str) -> None:
        if self.algorithm.bad_update == "raise":
            raise BadUpdate(update, fault)
        log.warning("%s", _rejection(update, fault))
        self.rejected[update.task.client] = fault


def _statistics_fault(layout: Params, statistics: Params) -> str | None:
    if not layout:
        return None
    if fault := params.mismatch(layout, statistics):
        return f"its statistics do not fit: {fault}"
    if not all(bool(value.isfinite().all()) for value in statistics.values()):
        return "its statistics are not finite"
    return None


def _rejection(update: ClientUpdate, fault: str) -> str:
    task = update.task
    return f"The update of client {task.client} in round {task.round} was rejected: {fault}"
