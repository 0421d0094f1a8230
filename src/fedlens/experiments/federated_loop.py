"""Federated training: rounds of sampling, local training, aggregation and a server step.

A round is a pure function of the server's state and its number; what a checkpoint holds is the
global parameters, the server optimizer's moments and, for SCAFFOLD, the controls.
"""

import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from fedlens import params
from fedlens.arithmetic.merging import MergeSettings
from fedlens.config.schema import Config, cohort_size
from fedlens.experiments import privacy
from fedlens.experiments.build import Parts, local_rules
from fedlens.experiments.loop import Loop, Position
from fedlens.federated import aggregation, sampling, server, wire
from fedlens.federated.algorithms.scaffold import Controls
from fedlens.federated.client import Task, Update, effective_steps, trained
from fedlens.federated.engines.serial import Engine
from fedlens.federated.rounds import Gathering
from fedlens.rng import Stream
from fedlens.runtime.progress import bar
from fedlens.runtime.stop import Interrupted, StopRequest
from fedlens.runtime.threads import limited_threads
from fedlens.sparse.packing import Packing
from fedlens.store import model_state
from fedlens.store.checkpoints import Checkpoint
from fedlens.store.client_states import ClientStates
from fedlens.store.client_updates import KeptUpdates
from fedlens.store.run_folder import RunFolder

MOMENTS, CONTROL = "server/", "control/"


class Federation:
    """One federated run: `run` is the loop, the rest are its parts in the order they are used."""

    def __init__(
        self,
        config: Config,
        parts: Parts,
        engine: Engine,
        loop: Loop,
        stop: StopRequest,
        folder: RunFolder,
    ) -> None:
        """`folder` is the run's: clients' memories and kept updates go there."""
        assert parts.partition is not None
        self.config = config
        self.parts = parts
        self.partition = parts.partition
        self.engine = engine
        self.loop = loop
        self.stop = stop
        self.rules = local_rules(config, parts.precision)
        self.parameters = trained(parts.model)
        self.packing = Packing(self.parameters, parts.masks)
        chosen = config.algorithm
        settings = server.ServerSettings(
            lr=chosen.server_lr,
            momentum=chosen.server_momentum,
            beta2=chosen.server_beta2,
            tau=chosen.server_tau,
        )
        packed = self.packing.pack(self.parameters)
        self.server = server.Server(packed, server.TABLE[chosen.server], settings)
        self.memory = ClientStates(folder.path / "clients", parts.model.head.weight.device)
        self.controls = None
        if chosen.scaffold:
            self.controls = Controls(packed, len(self.partition), self.memory)
        self.kept = KeptUpdates(folder.updates, rounds=config.federated.keep_updates)
        self.noised = privacy.noise(config)

    def run(self) -> Position:
        """Plays all rounds, or raises `Interrupted` once it has saved where it stopped."""
        loop = self.loop
        try:
            loop.restore(self)
            loop.open(self, prepared=self.parts.prepared)
            with bar("rounds", self.stop) as update:
                while not loop.finished:
                    number = loop.position.done + 1
                    breathe = partial(update, loop.position.done, loop.total)
                    record, timing = self.play(number, breathe)
                    loop.close(self, record, timing)
        except Interrupted:
            loop.leave(self)
            raise
        self.memory.prune(self._tables())  # the last save let go of checkpoints too
        return loop.position

    def tensors(self) -> dict[str, torch.Tensor]:
        self._take_model_back()
        tensors = model_state.take(self.parts.model, None)
        for kind, values in self.server.moments.items():
            tensors |= {f"{MOMENTS}{kind}/{name}": value for name, value in values.items()}
        if self.controls:
            tensors |= {CONTROL + name: value for name, value in self.controls.mean.items()}
        return tensors

    def state(self, checkpoint: str) -> dict[str, Any]:
        table = self.memory.save(checkpoint)
        self.memory.prune([*self._tables(), table])
        return {"clients": table}

    def _tables(self) -> list[dict[str, str]]:
        """Of the checkpoints at hand: which file holds what a client remembers."""
        return [state["clients"] for state in self.loop.ledger.checkpoints.states()]

    def put_back(self, found: Checkpoint) -> None:
        model_state.put_back(found.tensors, self.parts.model)
        params.assign(self.server.parameters, self.packing.pack(self.parameters))
        for kind, values in self.server.moments.items():
            params.assign(values, _below(f"{MOMENTS}{kind}/", found.tensors))
        if self.controls:
            params.assign(self.controls.mean, _below(CONTROL, found.tensors))
        self.memory.put_back(found.state["clients"])

    def play(
        self, number: int, breathe: Callable[[], None]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """One round; `breathe` is called after every client. Returns its record and its timing."""
        began = time.monotonic()
        federated, seed, clients = self.config.federated, self.config.seed, len(self.partition)
        draw = sampling.COHORTS[self.config.algorithm.cohorts]
        cohort = draw(seed, number, clients=clients, size=cohort_size(federated))
        present = [
            client
            for client in cohort
            if sampling.answers(seed, number, client, dropout=federated.dropout)
        ]
        settings = self.config.train
        lr = settings.lr * settings.schedule.factor(number - 1, self.loop.total)
        tasks = [self._task(number, client, lr) for client in present]
        start = self.server.parameters
        gathering = Gathering(
            start,
            self.rules,
            aggregator=self.config.algorithm.aggregator,
            settings=self._aggregation(number),
            strict=federated.fail_on_bad_update,
            equal=self.config.privacy.name == "central",
            hidden=self.config.privacy.secure,
            untold=self.config.privacy.name == "local",
        )
        prepared = time.monotonic()
        aggregating = 0.0
        for update in self.engine.updates(start, tasks):
            arrived = time.monotonic()
            with limited_threads(1):  # the others are the workers', where there are any
                if gathering.add(update):
                    self._remember(update)
            aggregating += time.monotonic() - arrived
            breathe()
        trained_by = time.monotonic()
        observed = gathering.metrics()  # while `start` is still where the clients began
        if change := gathering.change():
            self.server.step(self.noised(change, len(gathering.clients)))
            if self.controls:
                self.controls.close_round()
        self._take_model_back()
        ended = time.monotonic()
        record = {
            "lr": lr,
            "participants": cohort,
            **({"dropped": sorted(set(cohort) - set(present))} if federated.dropout else {}),
            **({"local_steps": [t.steps for t in tasks]} if federated.fewest_local_steps else {}),
            **observed,
            **self._traffic(len(cohort), len(present)),
        }
        timing = {
            "prepare_seconds": prepared - began,
            "train_seconds": trained_by - prepared - aggregating,
            "aggregate_seconds": aggregating + ended - trained_by,
            "images_per_second": gathering.tally.seen / max(trained_by - prepared, 1e-9),
        }
        return record, timing

    def _task(self, number: int, client: int, lr: float) -> Task:
        federated = self.config.federated
        steps = sampling.local_steps(
            self.config.seed,
            number,
            client,
            fewest=federated.fewest_local_steps or federated.local_steps,
            most=federated.local_steps,
        )
        correction = self.controls.correction(client) if self.controls else None
        return Task(number, client, self.partition.shard(client), steps, lr, correction)

    def _take_model_back(self) -> None:
        """A client may have had the model."""
        self.packing.unpack(self.server.parameters, self.parameters)

    def _aggregation(self, number: int) -> aggregation.AggregatorSettings:
        chosen = self.config.algorithm
        return aggregation.AggregatorSettings(
            trim=chosen.trim,
            clip_norm=chosen.clip_norm,
            merge=MergeSettings(**asdict(chosen.merge)),
            stream=Stream(self.config.seed, ("merge", number)),
        )

    def _remember(self, update: Update) -> None:
        """What outlives the round: the client's control, and the update itself where it is kept."""
        self.kept.add(update, self.server.parameters)
        if self.controls:
            self._learn(self.controls, update)

    def _learn(self, controls: Controls, update: Update) -> None:
        task, rules = update.task, self.rules
        assert task.correction is not None
        steps = effective_steps(task.steps, rules.momentum, nesterov=rules.nesterov)
        start, end = self.server.parameters, update.parameters
        controls.learn(task.client, task.correction, start, end, scale=steps * task.lr)

    def _traffic(self, told: int, answered: int) -> dict[str, int]:
        """Bytes, as serialised; with SCAFFOLD the controls travel too, both ways."""
        size = wire.size(self.server.parameters, self.packing.index) * (2 if self.controls else 1)
        return {"bytes_down": told * size, "bytes_up": answered * size}


def _below(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)}
