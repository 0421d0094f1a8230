"""Federated training: rounds of `FederatedAlgorithm.apply`, recorded, evaluated and saved.

A checkpoint holds the server's state: global parameters, the server optimizer's moments and what
a correction (SCAFFOLD, GHBM, …) remembers. Where an average of global models is evaluated, the
model in a checkpoint is the average, so that selection and export read it as any other; what
training continues from, and what the average remembers, are beside it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch

from fedlens import params
from fedlens.errors import FedlensError
from fedlens.experiments.build import Experiment
from fedlens.experiments.loops.loop import Loop, Position
from fedlens.experiments.preparation.refit import HeadRefit
from fedlens.federated.algorithms.choice import MakeAggregator
from fedlens.federated.client import LocalTraining, in_training_layout, trainable_parameters
from fedlens.federated.client_statistics import ClientStatistic
from fedlens.federated.diagnostics import MakeDiagnostic
from fedlens.federated.rounds import BadUpdate, FederatedAlgorithm, Release, ServerState
from fedlens.federated.server import carried
from fedlens.federated.server.correction import Correction
from fedlens.federated.server.memory import Memory
from fedlens.federated.server.model_average import ModelAverage
from fedlens.federated.server.optimizers import ServerOptimizer
from fedlens.federated.tasks import Clients, ClientTask, ClientUpdate, Cohort, Engine
from fedlens.models import classifier
from fedlens.models.architectures.batch_norm import own_names
from fedlens.params import Params
from fedlens.runtime.progress import progress_bar
from fedlens.runtime.stop import Interrupted, StopRequest
from fedlens.sparse.packing import Packing
from fedlens.store import hashes, model_state
from fedlens.store.checkpoints import Checkpoint
from fedlens.store.client_states import ClientStates
from fedlens.store.client_updates import KeptUpdates
from fedlens.store.hashes import Hashes
from fedlens.store.run_folder import RunFolder
from fedlens.training.schedules import Schedule

MOMENTS, CORRECTION, AVERAGE = "server/", "correction/", "average/"
RAW = "raw/"  # the global model, where its average is evaluated

DrawCohort = Callable[..., Cohort]  # (round, sizes, lr=…)


@dataclass(frozen=True)
class FederatedSettings:
    """What a federated run needs besides the clients and the model."""

    lr: float
    schedule: Schedule
    local: LocalTraining
    draw_cohort: DrawCohort
    aggregator: MakeAggregator
    server: ServerOptimizer
    server_lr: float
    seed: int
    correction: Correction | None = None
    measure_controls: bool = False  # before the first round
    average: ModelAverage | None = None  # evaluated in place of the global model
    diagnostics: Mapping[str, MakeDiagnostic] = field(default_factory=dict)
    weighting: Literal["examples", "uniform"] = "examples"
    release: Release | None = None
    bad_update: Literal["skip", "raise"] = "skip"
    check_rounds: bool = False  # undo one whose model has no finite loss: clients are elsewhere
    keep_updates: int = 0  # rounds, the last ones, whose client updates are kept on disk
    statistic: ClientStatistic | None = None  # what clients send beside their updates


class FederatedLoop:
    """One federated run: `run` is the loop, the rest are its parts in the order they are used."""

    def __init__(
        self,
        settings: FederatedSettings,
        experiment: Experiment,
        clients: Clients,
        engine: Engine,
        loop: Loop,
        stop: StopRequest,
        folder: RunFolder,
        *,
        refit: HeadRefit | None = None,
    ) -> None:
        """Client states and kept updates are written into `folder`.

        `refit` solves the head again every few rounds.
        """
        self.refit = refit
        self.settings = settings
        self.experiment = experiment
        self.clients = clients
        self.loop = loop
        self.stop = stop
        model = in_training_layout(experiment.model)
        mode = experiment.model.batch_norm
        self.algorithm = FederatedAlgorithm(
            engine,
            settings.local,
            aggregator=settings.aggregator,
            server=settings.server,
            server_lr=settings.server_lr,
            correction=settings.correction,
            carried=carried.rules(model, mode),
            own=tuple(own_names(model)) if mode == "local" else (),
            population=len(clients.sizes),
            diagnostics=settings.diagnostics,
            weighting=settings.weighting,
            release=settings.release,
            bad_update=settings.bad_update,
            fault=self._fault if settings.check_rounds else None,
            statistics=_statistics_layout(settings.statistic, experiment),
            seed=settings.seed,
        )
        self.states = ClientStates(
            folder.path / "clients", params.float64_device(experiment.device)
        )
        self.server = self.algorithm.init(
            trainable_parameters(model),
            masks=experiment.masks,
            memory=self.states,
            carried=classifier.carried(model, mode),
        )
        self.past: Memory = {}  # what the average remembers
        self.kept = KeptUpdates(folder.updates, rounds=settings.keep_updates)
        self.folder = folder
        self.hashes: Hashes = {}  # of the client states and kept updates of the last checkpoint

    def run(self) -> Position:
        """Runs all rounds, or raises `Interrupted` once it has saved where it stopped."""
        loop = self.loop
        try:
            loop.restore(self)
            loop.evaluate_start(self, head_is_fitted=self.experiment.head_is_fitted)
            with progress_bar("rounds", self.stop) as update:
                while not loop.finished:
                    on_progress = partial(update, loop.position.done, loop.total)
                    record, timings = self.run_round(loop.position.done + 1, on_progress)
                    loop.finish_unit(self, record, timings)
        except Interrupted:
            loop.save_interrupted(self)
            raise
        self._prune([])  # the last save removed checkpoints too
        return loop.position

    def run_round(
        self, number: int, on_progress: Callable[[], None]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """One round; `on_progress` is called after every client. Returns its record and timings."""
        settings = self.settings
        lr = settings.lr * settings.schedule.factor(number - 1, self.loop.total)
        cohort = settings.draw_cohort(number, self.clients.sizes, lr=lr)
        measured = self._measure_controls(lr) if self.server.round == 0 else {}
        before, start = self.server, self.server.trained

        def on_update(update: ClientUpdate, accepted: bool) -> None:
            if accepted:
                task = update.task
                self.kept.add(
                    number,
                    task.client,
                    {name: update.parameters[name] for name in start},
                    examples=task.examples,
                    start=start,
                    chain=task.chain,
                )
            on_progress()

        try:
            self.server, report = self.algorithm.apply(self.server, cohort, on_update=on_update)
        except BadUpdate as bad:
            raise FedlensError(
                f"{bad.rejection}: set federated.fail_on_bad_update=false to leave such updates "
                "out, or lower train.lr."
            ) from bad
        if not report.accepted:
            self.kept.forget(number)
        record = report.record()
        if measured:
            record |= {"controls": measured}
            record |= {key: record[key] + measured[key] for key in ("bytes_down", "bytes_up")}
        if self.refit is not None and self.refit.due(number, self.loop.total):
            try:
                record |= self._solve_head(self.refit, record)
            except Interrupted:
                self.server = before  # a round ends with its head: this one is run again
                raise
        if settings.average is not None:
            self.past = settings.average.updated(self.past, self._raw)
        self._load_into_model()
        return record, report.timings()

    def _measure_controls(self, lr: float) -> dict[str, int]:
        """Control variates of all clients, where they are asked for; what that cost."""
        if not self.settings.measure_controls:
            return {}
        tasks = [
            ClientTask(round=0, client=client, steps=1, lr=lr, examples=int(size))
            for client, size in enumerate(self.clients.sizes)
        ]
        self.server, cost = self.algorithm.measure(self.server, tasks)
        return cost

    def _solve_head(self, refit: HeadRefit, record: dict[str, Any]) -> dict[str, Any]:
        """Solves the head on the present model; what that adds to the round's record."""
        self._load(self._raw)
        last = self.server.round == self.loop.total
        head, facts = refit.solve(len(self.clients.sizes), last=last)
        solved = {f"head.{name}": value.detach() for name, value in head.named_parameters()}
        self.server = replace(
            self.server, carried={**self.server.carried, **params.with_float64(solved)}
        )
        return {"refit": facts, "bytes_up": record["bytes_up"] + facts["bytes_up"]}

    def _fault(self, state: ServerState) -> str | None:
        self._load({**state.trained, **state.carried})
        if self.loop.evaluator.has_finite_loss():
            return None
        return "together they give a global model whose loss is not finite"

    @property
    def _raw(self) -> dict[str, torch.Tensor]:
        """The global model that training continues from, as it travels."""
        return {**self.server.trained, **self.server.carried}

    def _load_into_model(self) -> None:
        """The model to evaluate. The engine may have trained clients in the same instance."""
        average = self.settings.average
        self._load(average.value(self.past) if average is not None and self.past else self._raw)

    def _load(self, values: Params) -> None:
        model, server = self.experiment.model, self.server
        trained = {name: values[name] for name in server.trained}
        server.packing.unpack(
            {name: value.to(server.trained[name].dtype) for name, value in trained.items()},
            trainable_parameters(model),
        )
        params.assign(
            classifier.carried(model, model.batch_norm),
            {name: values[name] for name in server.carried},
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        self._load_into_model()
        tensors = model_state.state_tensors(self.experiment.model, None)
        for prefix, memory in {
            MOMENTS: self.server.moments,
            CORRECTION: self.server.correction,
            AVERAGE: self.past,
            RAW: {"model": self._raw} if self.past else {},
        }.items():
            for kind, values in memory.items():
                tensors |= {f"{prefix}{kind}/{name}": value for name, value in values.items()}
        return tensors

    def state(self, checkpoint: str) -> dict[str, Any]:
        table: dict[str, str] = {}
        if isinstance(self.server.clients, ClientStates):
            table = self.server.clients.save(checkpoint)
            self.server = replace(self.server, clients=self.states.restored(table))
        self._prune([table])
        return {"clients": table, "round": self.server.round}

    def files(self) -> Hashes:
        """Client states and kept updates; each is read once, after it was written."""
        states = self.server.clients
        table = states.table if isinstance(states, ClientStates) else {}
        names = {f"{self.states.folder.name}/{name}" for name in table.values()}
        names |= self.kept.files(self.server.round, known=self.hashes)
        self.hashes = {
            name: self.hashes.get(name) or hashes.of_file(self.folder.path / name)
            for name in sorted(names)
        }
        return self.hashes

    def _prune(self, tables: list[dict[str, str]]) -> None:
        """Removes the client states that no checkpoint refers to."""
        kept = [state["clients"] for state in self.loop.journals.checkpoints.states()]
        self.states.prune([*kept, *tables])

    def load_state(self, checkpoint: Checkpoint) -> None:
        self.hashes = checkpoint.files
        model_state.load_state(checkpoint.tensors, self.experiment.model)
        server, tensors, model = self.server, checkpoint.tensors, self.experiment.model
        packed = server.packing.pack(trainable_parameters(model))
        carried_now = classifier.carried(model, model.batch_norm)
        evaluated = params.with_float64(params.copy({**packed, **carried_now}))
        self.past = _loaded(evaluated, AVERAGE, tensors)
        raw = _loaded(evaluated, RAW, tensors).get("model", evaluated)
        trained = {name: raw[name] for name in server.trained}
        self.server = replace(
            server,
            round=checkpoint.state["round"],  # may be one that is not evaluated yet
            trained=trained,
            carried={name: raw[name] for name in server.carried},
            moments=_loaded(trained, MOMENTS, tensors),
            correction=_loaded(trained, CORRECTION, tensors),
            clients=None
            if server.clients is None
            else self.states.restored(checkpoint.state["clients"]),
        )


def _statistics_layout(statistic: ClientStatistic | None, experiment: Experiment) -> Params:
    if statistic is None:
        return {}
    packing = Packing(trainable_parameters(experiment.model), experiment.masks)
    return statistic.layout(experiment.model, packing)


def _loaded(like: Params, prefix: str, tensors: Params) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors below a prefix, by kind and by the names of `like`, in its memory layout."""
    kinds = sorted(
        {name.removeprefix(prefix).partition("/")[0] for name in tensors if name.startswith(prefix)}
    )
    return {
        kind: {
            name: torch.empty_like(value, dtype=stored.dtype).copy_(stored)
            for name, value in like.items()
            for stored in [tensors[f"{prefix}{kind}/{name}"]]
        }
        for kind in kinds
    }
