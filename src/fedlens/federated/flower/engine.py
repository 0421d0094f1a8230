"""Rounds and questions over Flower, for the same loop that plays them in one process."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from flwr.app import MessageType, RecordDict
from flwr.serverapp import Grid

from fedlens.errors import FedlensError
from fedlens.federated.client import Task, Update
from fedlens.federated.engines.serial import Engine
from fedlens.federated.flower import messages
from fedlens.federated.flower.messages import ARRAYS, CONFIG, Garbled
from fedlens.federated.flower.roster import Fleet, Missing
from fedlens.federated.flower.secure_aggregation import FEWEST, SecureSettings, secure_round
from fedlens.federated.tasks import Setup
from fedlens.models.heads import Statistics
from fedlens.params import Params
from fedlens.sparse.fisher import Sensitivity
from fedlens.sparse.masks import Preference


class FlowerEngine:
    """Every task is a message; whoever does not answer well is an update with a fault."""

    def __init__(self, fleet: Fleet, stage: str, extra: Mapping[str, Any]) -> None:
        self.fleet = fleet
        self.stage = stage
        self.extra = extra

    def updates(self, parameters: Params, tasks: Sequence[Task]) -> Iterator[Update]:
        shared = messages.vector(parameters)
        contents = {
            task.client: messages.work(task, self.stage, shared, self.extra) for task in tasks
        }
        by_client = {task.client: task for task in tasks}
        silent: dict[int, str] = {}
        for client, reply in self.fleet.ask(MessageType.TRAIN, contents):
            task = by_client[client]
            if isinstance(reply, Missing):
                _refuse_dead_worker(reply.why)
                update = messages.lost(task, reply.why)
            else:
                update = messages.update_of(task, reply, parameters)
            if not update.parameters:
                silent[client] = str(update.fault).rstrip(".")
            if len(silent) == len(tasks):
                raise _nobody(tasks, next(iter(silent.values())))
            yield update

    def close(self) -> None:
        pass


class SecureEngine:
    """The cohort's sum by secure aggregation: every update is given as the mean of all."""

    def __init__(
        self, fleet: Fleet, stage: str, extra: Mapping[str, Any], settings: SecureSettings
    ) -> None:
        self.fleet = fleet
        self.stage = stage
        self.extra = extra
        self.settings = settings

    def updates(self, parameters: Params, tasks: Sequence[Task]) -> Iterator[Update]:
        ready = {task.client: messages.question("ready", client=task.client) for task in tasks}
        faults = {
            client: reply.why if isinstance(reply, Missing) else messages.refused(reply)
            for client, reply in self.fleet.ask(MessageType.QUERY, ready)
        }
        present = {self.fleet.host[t.client]: t for t in tasks if faults[t.client] is None}
        if tasks and not present:
            raise _nobody(tasks, str(faults[tasks[0].client]))
        if len(present) < len(tasks) - sum(fault is not None for fault in faults.values()):
            raise FedlensError(
                "Secure aggregation hides a node's clients from the server only if each has one: "
                "deal the data to as many nodes as there are clients."
            )
        if tasks and len(present) < FEWEST:
            raise _nobody(tasks, "too few clients are there to hide among each other")
        shared = messages.vector(parameters)
        contents = {
            node: messages.work(task, self.stage, shared, self.extra)
            for node, task in present.items()
        }
        for content in contents.values():
            self.fleet.stamp(content)
        found = secure_round(
            cast(Grid, self.fleet.grid),
            contents,
            start=parameters,
            round_=tasks[0].round,
            heaviest=self.settings.heaviest or max(len(task.shard) for task in tasks),
            settings=self.settings,
        )
        missing = {present[node].client: why for node, why in found.missing.items()}
        if found.change is None:
            raise _nobody(tasks, next(iter(missing.values())))
        mean = {
            name: (value.double() + found.change[name].to(value.device)).to(value.dtype)
            for name, value in parameters.items()
        }
        for task in tasks:
            if why := faults[task.client] or missing.get(task.client):
                yield messages.lost(task, why)
            else:
                yield Update(task, mean, found.tallies[self.fleet.host[task.client]])

    def close(self) -> None:
        pass


class FlowerCrowd:
    """The server's side of `crowd.Crowd`: before the rounds, every client asked must answer."""

    def __init__(
        self, fleet: Fleet, extra: Mapping[str, Any], sealed: SecureSettings | None = None
    ) -> None:
        """`extra` goes with every task of a round; `sealed`: rounds go by secure aggregation."""
        self.fleet = fleet
        self.extra = extra
        self.sealed = sealed

    def prepare(self, setup: Setup) -> None:
        self.fleet.setup = setup

    def engine(self, stage: str) -> Engine:
        extra = self.extra if stage == "rounds" else {}
        if self.sealed and stage == "rounds":
            return SecureEngine(self.fleet, stage, extra, self.sealed)
        return FlowerEngine(self.fleet, stage, extra)

    def statistics(self, width: int, classes: int) -> Iterator[Statistics]:
        shapes = {"xtx": (width, width), "class_sums": (classes, width), "counts": (classes,)}
        like = {
            name: torch.empty(shape, dtype=torch.float64, device="meta")
            for name, shape in shapes.items()
        }
        clients = range(self.fleet.clients)
        questions = {c: messages.question("statistics", client=c) for c in clients}
        for client, reply in self._insist("statistics", questions):
            yield Statistics(**_arrays(client, reply, like))

    def sensitivities(
        self, clients: Sequence[int], number: int, parameters: Params
    ) -> Iterator[Sensitivity]:
        like = {name: value.to("meta", torch.float64) for name, value in parameters.items()}
        questions = {c: messages.question("sensitivity", client=c, number=number) for c in clients}
        shared = messages.vector(parameters)
        for question in questions.values():
            question[ARRAYS] = shared
        for client, reply in self._insist("sensitivity", questions):
            yield Sensitivity(_arrays(client, reply, like), _count(client, reply))

    def ballots(self, clients: Sequence[int], like: Preference) -> Iterator[Preference]:
        questions = {c: messages.question("ballot", client=c) for c in clients}
        pools = {str(number): order for number, order in enumerate(like.orders.values())}
        for client, reply in self._insist("ballot", questions):
            found = _arrays(client, reply, pools)
            if not all(_is_ranking(order) for order in found.values()):
                raise FedlensError(f"Client {client} sent a ballot that ranks nothing: see to it.")
            yield Preference(like.shapes, dict(zip(like.orders, found.values(), strict=True)))

    def _insist(
        self, what: str, questions: Mapping[int, RecordDict]
    ) -> Iterator[tuple[int, RecordDict]]:
        """A sum without one client's part would be another sum: the run waits for whom it needs."""
        for client, reply in self.fleet.ask(MessageType.QUERY, questions):
            why = reply.why if isinstance(reply, Missing) else messages.refused(reply)
            if why is not None or isinstance(reply, Missing):
                raise FedlensError(
                    f"Client {client} did not send its {what} ({str(why).rstrip('.')}): see to its "
                    "node, then run the same command again."
                )
            yield client, reply


def _nobody(tasks: Sequence[Task], why: str) -> FedlensError:
    """Without this, a federation that has fallen silent would play its rounds to the end."""
    return FedlensError(
        f"None of the {len(tasks)} clients of round {tasks[0].round} gave an update "
        f"({why.rstrip('.')}): see to the nodes, then run the same command again; the rounds "
        "before are saved."
    )


def _refuse_dead_worker(why: str) -> None:
    """Flower would hand a simulation's next messages to the same dead process, round by round."""
    if "ActorDied" in why or "RayActorError" in why:
        raise FedlensError(
            "A worker of the simulation died, often for lack of memory: run the same command again "
            "with fewer engine.workers; the rounds before are saved."
        )


def _arrays(client: int, reply: RecordDict, like: Params) -> dict[str, torch.Tensor]:
    try:
        found = messages.tensors(reply.array_records[ARRAYS], like)
    except (Garbled, KeyError) as fault:
        raise FedlensError(f"Client {client} sent what cannot be used: {fault}.") from fault
    if any(value.is_floating_point() and not value.isfinite().all() for value in found.values()):
        raise FedlensError(f"Client {client} sent values that are not finite: see to its node.")
    return found


def _count(client: int, reply: RecordDict) -> int:
    """Over how many examples a client's scores are sums."""
    told = reply.config_records.get(CONFIG)
    count = None if told is None else told.get("count")
    if not isinstance(count, int) or count < 1:
        raise FedlensError(f"Client {client} sent what cannot be used: scores of no examples.")
    return count


def _is_ranking(order: torch.Tensor) -> bool:
    """Whether every place is there once."""
    if order.numel() and not 0 <= int(order.min()) <= int(order.max()) < len(order):
        return False
    seen = torch.zeros(len(order), dtype=torch.bool)
    seen[order] = True
    return bool(seen.all())
