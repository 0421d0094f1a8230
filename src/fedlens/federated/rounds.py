"""The federated round: local training, aggregation and a server step, as a function of the state.

`init` gives a state and `apply(state, cohort)` the next one with a report; neither changes what it
is given. The experiment loop, the training of a head and the library all call this one round. In a
chain each client starts where the last stopped, and only the end of the chain is aggregated, with
the weight of all its clients (Zaccone et al., 2022, https://arxiv.org/abs/2201.10899).
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Literal

import torch

from fedlens import params
from fedlens.errors import FedlensError
from fedlens.federated import chains, wire
from fedlens.federated.algorithms.choice import MakeAggregator
from fedlens.federated.algorithms.fedavg import FedAvg
from fedlens.federated.algorithms.fedopt import ServerSgd
from fedlens.federated.algorithms.scaffold import ClientMemory, InMemory
from fedlens.federated.client import LocalTraining
from fedlens.federated.diagnostics import Delta, MakeDiagnostic
from fedlens.federated.server.aggregation import (
    Aggregator,
    Contribution,
    UnpacksUpdates,
    WeightedMean,
)
from fedlens.federated.server.carried import CarriedRule
from fedlens.federated.server.correction import Correction
from fedlens.federated.server.memory import Memory
from fedlens.federated.server.optimizers import Moments, ServerOptimizer, server_step
from fedlens.federated.tasks import ClientTask, ClientUpdate, Cohort, Engine, NoUpdates
from fedlens.params import Params
from fedlens.rng import Stream
from fedlens.runtime.threads import limited_threads
from fedlens.sparse.packing import Packing
from fedlens.training.step import Tally

OnUpdate = Callable[[ClientUpdate, bool], None]  # an update, and whether it was accepted
Release = Callable[[dict[str, torch.Tensor], int], dict[str, torch.Tensor]]
FaultOf = Callable[["ServerState"], str | None]  # why a model cannot be used

LARGEST_NORM = 1000  # of what a client sends, in norms of the initial model

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
    largest_norm: float = math.inf  # of parameters that a client may send

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
    fault: FaultOf | None = None  # of a new global model: the round is undone if it has one
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
            largest_norm=LARGEST_NORM * (params.norm(trained) + 1),
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

        `on_update` is called after every client, while its update's tensors may still be read. In a
        chain it is given each client's own change δ_k since the client before it, as w + δ_k.
        """
        if cohort.round != state.round + 1:
            raise FedlensError(
                f"The cohort is for round {cohort.round}, but the state is after round "
                f"{state.round}: draw a cohort for round {state.round + 1}."
            )
        self._check_chains(cohort)
        began = time.monotonic()
        tasks = self._tasks(cohort, state)
        updates = _RoundUpdates(self, state, cohort, on_update)
        sent = {**state.trained, **state.carried}
        start = {**sent, **self.local.beside(state.trained)}
        prepared = time.monotonic()
        if cohort.chains:
            self._run_chains(start, replace(cohort, tasks=tuple(tasks)), updates)
        else:
            for update in self.engine.updates(start, tasks):
                updates.add(update)
        trained = time.monotonic()
        diagnostics = updates.diagnostics()
        following = replace(self._checked_step(state, updates), round=cohort.round)
        local, masked, correction = self.local, state.packing.index, self.correction
        returned = correction is not None and correction.returned
        more_up = returned + local.carry_momentum  # tensors like the trained ones
        more_down = (correction is not None) + local.carry_momentum + (local.proximal_to == "round")
        again = wire.size(state.trained, masked)
        size_down = wire.size(sent, masked) + more_down * again
        size_up = wire.size(updates.returned, masked) + more_up * again
        statistics = wire.size(self.statistics) if self.statistics else 0
        report = RoundReport(
            cohort=cohort,
            accepted=tuple(updates.accepted),
            rejected=updates.rejected,
            tally=updates.tally,
            losses=tuple(updates.losses),
            diagnostics=diagnostics if updates.accepted else {},
            bytes_down=len(cohort.drawn) * size_down,
            bytes_up=len(cohort.tasks) * (size_up + statistics),
            seconds={
                "prepare": prepared - began,
                "train": trained - prepared - updates.seconds,
                "aggregate": updates.seconds,
                "server": time.monotonic() - trained,
            },
        )
        return following, report

    def measure(
        self, state: ServerState, tasks: Sequence[ClientTask]
    ) -> tuple[ServerState, dict[str, int]]:
        """What the correction remembers of these clients, from updates that are not kept.

        With tasks of one step for all clients, SCAFFOLD's controls are their gradients at the
        model before the first round. Returns the state, the model in it as it was, and the images
        seen and bytes sent.
        """
        correction = self.correction
        if correction is None or not correction.client_states:
            raise FedlensError("Only what clients remember can be measured: use SCAFFOLD.")
        assert state.clients is not None
        unknown = params.zeros_like(state.trained)
        tasks = [replace(task, correction=unknown) for task in tasks]
        asked = Cohort(state.round, tuple(task.client for task in tasks), tuple(tasks), lr=0.0)
        blank = replace(state, correction=correction.init(state.trained))  # also if measured before
        updates = _RoundUpdates(self, blank, asked, None)
        sent = {**state.trained, **state.carried}
        for update in self.engine.updates(sent, tasks):
            updates.remember(update)
        assert updates.correction is not None
        measured = updates.correction.result(unknown, self.population or 0)
        masked = state.packing.index
        cost = {
            "images": 0 if updates.tally is None else updates.tally.seen,
            "bytes_down": len(tasks) * wire.size(sent, masked),
            "bytes_up": len(tasks) * wire.size(state.trained, masked),
        }
        clients = state.clients.updated(measured.clients)
        return replace(state, correction=measured.memory, clients=clients), cost

    def _run_chains(self, start: Params, cohort: Cohort, updates: "_RoundUpdates") -> None:
        """Each chain link by link; a client whose update is rejected is passed over."""
        silent = 0
        for tasks in cohort.chains:
            chain = _Chain(start, updates.unmoved.most)
            for task in tasks:
                try:
                    for update in self.engine.updates(chain.parameters, [task]):
                        silent += not update.parameters
                        updates.add(update, chain)
                except NoUpdates as none:
                    silent += 1
                    if silent == len(cohort.tasks):
                        raise NoUpdates(cohort.tasks, none.reason) from none
                    updates.add(ClientUpdate(task, {}, None, none.reason), chain)
            updates.finish(chain)

    def _check_chains(self, cohort: Cohort) -> None:
        """Refuses what does not go with chains, or without them."""
        if not cohort.tasks:
            return
        if not cohort.chains:
            if self.local.chained:
                raise FedlensError(
                    "carry_momentum and proximal_to='round' are for chains: sample the cohort with "
                    "sampling='chain', or leave them out."
                )
            return
        for used, what in [
            (
                self.correction is not None and not self.correction.along_chains,
                f"{type(self.correction).__name__} needs",
            ),
            (
                self._client_states and self.local.carry_momentum,
                "What clients remember of their own gradients, with momentum carried along, needs",
            ),
            (self.own, "Layers that every client keeps for itself (FedBN) need"),
            (self.statistics, "The aggregator's statistics of each client need"),
            (self.release is not None, "Central differential privacy needs"),
        ]:
            if used:
                raise FedlensError(
                    f"{what} clients that all start from the global model, and in a chain each "
                    "starts where the last stopped: sample the cohort in another way."
                )

    def _checked_step(self, state: ServerState, updates: "_RoundUpdates") -> ServerState:
        """The state after the server's step, or the one before if the new model has a fault."""
        following = self._step(state, updates)
        if self.fault is None or self.bad_update == "raise" or not updates.accepted:
            return following
        if fault := self.fault(following):
            updates.reject_all(fault)
            return state
        return following

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


@dataclass
class _Chain:
    """Clients of a round that train one after another, and what those accepted add up to."""

    parameters: Params  # what the next client starts from
    most: float  # their norm is at most this
    weight: float = 0.0
    steps: int = 0
    effective_steps: float = 0.0
    client: int | None = None  # the last one accepted

    def extend(self, parameters: Params, one: Contribution, steps: int) -> None:
        self.parameters = {**self.parameters, **params.copy(parameters)}
        self.most += one.norm
        self.weight += one.weight
        self.steps += steps
        self.effective_steps += one.effective_steps or 0.0
        self.client = one.client


class _RoundUpdates:
    """The updates of one round as they come in: checked, measured, aggregated, let go."""

    def __init__(
        self,
        algorithm: FederatedAlgorithm,
        state: ServerState,
        cohort: Cohort,
        on_update: OnUpdate | None,
    ) -> None:
        self.algorithm = algorithm
        self.start = state.trained
        self.largest_norm = state.largest_norm
        self.unmoved = _Chain(self.start, most=params.norm(self.start))
        self.round = cohort.round
        self.chained = bool(cohort.chains)
        self.on_update = on_update
        stream = Stream(algorithm.seed, ("merge", cohort.round))
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
        self.returned = {**self.start, **{name: state.carried[name] for name in beside}}
        self.expected = dict(self.returned)
        if algorithm.local.carry_momentum:
            self.expected |= chains.prefixed(chains.MOMENTUM, self.start)
        self.own: dict[int, dict[str, torch.Tensor]] = {}
        self.delta = Delta(self.start)
        self.tally: Tally | None = Tally()
        self.losses: list[float] = []
        self.accepted: list[int] = []
        self.rejected: dict[int, str] = {}
        self.individual = True
        self.seconds = 0.0  # spent here

    def _mean(self, stream: Stream) -> Aggregator | None:
        """What diagnostics compare updates with: the weighted mean, whatever is aggregated.

        In chains updates have different starts, so it is the mean of their changes: from 0.
        """
        if type(self.aggregator) is FedAvg and not self.chained:
            return self.aggregator
        if not self.algorithm.diagnostics:
            return None
        return WeightedMean(params.zeros_like(self.start) if self.chained else self.start, stream)

    def add(self, update: ClientUpdate, chain: _Chain | None = None) -> None:
        """One client's update, from the global model or from where its chain has come to."""
        arrived = time.monotonic()
        update = replace(update, parameters=params.with_float64(update.parameters))
        with limited_threads(1):  # the other threads are the workers', where there are any
            one = self._checked(update, chain or self.unmoved)
            if one is not None:
                self._measure(one, update)
                if chain is None:
                    self._aggregate(one, update.parameters)
                    self._remember(one, update, self.start)
                else:
                    self._remember(one, update, chain.parameters)
                    chain.extend(update.parameters, one, update.task.steps)
        self.seconds += time.monotonic() - arrived
        if self.on_update is not None:
            if chain is not None and one is not None:
                moved = {name: self.start[name] + self.delta.values[name] for name in self.start}
                update = replace(update, parameters=moved)
            self.on_update(update, one is not None)

    def remember(self, update: ClientUpdate) -> None:
        """What a client keeps of an update from the global model that is not aggregated."""
        update = replace(update, parameters=params.with_float64(update.parameters))
        with limited_threads(1):
            one = self._checked(update, self.unmoved)
            if one is not None:
                self._remember(one, update, self.start)
                self._count(update.tally)

    def finish(self, chain: _Chain) -> None:
        """Aggregates the end of a chain, unless none of its clients was accepted."""
        if chain.client is None:
            return
        arrived, local = time.monotonic(), self.algorithm.local
        with limited_threads(1):
            trained = {name: chain.parameters[name] for name in self.start}
            steps = local.effective_steps(chain.steps)  # of one client that does all of them
            if steps is not None and not local.carry_momentum:
                steps = chain.effective_steps
            norm = self.delta.measure(trained)
            end = Contribution(chain.client, trained, chain.weight, steps, norm)
            self._aggregate(end, chain.parameters)
        self.seconds += time.monotonic() - arrived

    def _checked(self, update: ClientUpdate, chain: _Chain) -> Contribution | None:
        """The contribution of an update from where the chain is; None if it is rejected."""
        task = update.task
        norm = math.nan
        fault = update.fault or params.mismatch(self.expected, update.parameters)
        if not fault:
            norm = self.delta.measure(update.parameters, chain.parameters)
            beside = (value for name, value in update.parameters.items() if name not in self.start)
            if not (math.isfinite(norm) and all(value.isfinite().all() for value in beside)):
                fault = "it holds values that are not finite"
            elif self._too_large(update.parameters, chain.most + norm):
                fault = f"its norm is more than {LARGEST_NORM} times that of the initial model"
            else:
                fault = _statistics_fault(self.algorithm.statistics, update.statistics)
        if fault:
            self._reject(update, fault)
            return None
        weight = 1 if self.algorithm.weighting == "uniform" else task.examples
        steps = self.algorithm.local.effective_steps(task.steps)
        trained = {name: update.parameters[name] for name in self.start}
        return Contribution(task.client, trained, weight, steps, norm, statistics=update.statistics)

    def _too_large(self, parameters: Params, most: float) -> bool:
        """Whether training cannot have come to parameters of this norm, which is `most` at most."""
        if most <= self.largest_norm:
            return False  # and the norm need not be computed
        return params.norm({name: parameters[name] for name in self.start}) > self.largest_norm

    def _measure(self, one: Contribution, update: ClientUpdate) -> None:
        """Of one client, for diagnostics and for the record."""
        if self.mean is not None and self.mean is not self.aggregator:
            self.mean.add(replace(one, parameters=self.delta.values) if self.chained else one)
        self.individual &= update.individual
        if self.individual:
            for diagnostic in self.measured.values():
                diagnostic.add(self.delta.values, one.norm, one.weight)
        self._count(update.tally)
        self.accepted.append(one.client)

    def _aggregate(self, one: Contribution, parameters: Params) -> None:
        """A client's parameters, or those at the end of a chain."""
        self.aggregator.add(one)
        for rule in self.carried:
            rule.add(parameters, one.weight)

    def _remember(self, one: Contribution, update: ClientUpdate, start: Params) -> None:
        """What a client that began at `start` keeps for itself until its next round."""
        if self.algorithm.own:
            kept = {name: update.parameters[name] for name in self.algorithm.own}
            self.own[one.client] = params.copy(kept)
        if self.correction is not None:
            task = update.task
            scale = self.algorithm.local.scale(task.steps, task.lr)
            self.correction.add(task, start, one.parameters, scale)

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

    def reject_all(self, fault: str) -> None:
        """Takes back what was accepted."""
        log.warning("All updates of round %d were rejected: %s", self.round, fault)
        self.rejected |= dict.fromkeys(self.accepted, fault)
        self.accepted, self.tally, self.losses = [], None, []


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
