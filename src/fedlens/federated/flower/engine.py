"""Flower's remote clients, behind the same interfaces as clients in this process."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any, TypeVar, cast

import torch
from flwr.app import MessageType, RecordDict
from flwr.serverapp import Grid
from torch import nn

from fedlens.errors import FedlensError
from fedlens.federated.flower import messages
from fedlens.federated.flower.messages import ARRAYS, InvalidMessage
from fedlens.federated.flower.roster import NoReply, Reply, Roster
from fedlens.federated.flower.secure_aggregation import MIN_CLIENTS, SecureSettings, secure_round
from fedlens.federated.flower.setup import Setup
from fedlens.federated.tasks import ClientTask, ClientUpdate, Engine, NoUpdates, Stage
from fedlens.models.heads import Statistics
from fedlens.params import Params
from fedlens.sparse.masks import Masks, Ranking
from fedlens.sparse.sensitivity.fisher import Sensitivity

LARGEST_FEATURES = 1000  # of what a client sums, in norms of the largest features known here

T = TypeVar("T")

log = logging.getLogger(__name__)


class FlowerEngine:
    """Sends every task as a message; a client without a valid reply yields a fault.

    It raises `NoUpdates` where no update came and most nodes have failed since the last one that
    did; otherwise the remaining rounds would all pass without an update. One node alone, whichever
    clients it hosts, ends nothing.
    """

    def __init__(
        self,
        roster: Roster,
        stage: Stage,
        extra: Mapping[str, Any],
        *,
        losses: bool = True,
        only_sent: Collection[str] = (),
    ) -> None:
        """`losses=False`: clients do not reveal their losses, so updates have no tally.

        Clients do not send back the tensors named in `only_sent`.
        """
        self.roster = roster
        self.stage = stage
        self.extra = extra
        self.losses = losses
        self.only_sent = frozenset(only_sent)
        self._failed: set[int | None] = set()  # nodes that did since an update came

    def updates(self, parameters: Params, tasks: Sequence[ClientTask]) -> Iterator[ClientUpdate]:
        shared = messages.encode_tensors(parameters)
        like = {name: one for name, one in parameters.items() if name not in self.only_sent}
        contents = {
            task.client: messages.encode_task(task, self.stage, shared, self.extra)
            for task in tasks
        }
        task_of = {task.client: task for task in tasks}
        faults: dict[int, str] = {}
        for client, reply in self.roster.ask(MessageType.TRAIN, contents):
            task = task_of[client]
            if isinstance(reply, NoReply):
                _raise_if_worker_died(reply.reason)
                update = messages.failed_update(task, reply.reason)
            else:
                update = messages.decode_update(task, reply, like, losses=self.losses)
            if update.parameters:
                self._failed.clear()
            else:
                faults[client] = str(update.fault).rstrip(".")
                self._failed.add(self.roster.host.get(client))
            if len(faults) == len(tasks) and self._most_failed():
                raise NoUpdates(tasks, next(iter(faults.values())))
            yield update

    def _most_failed(self) -> bool:
        """Whether more than half of the connected nodes did, or none is connected."""
        connected = set(self.roster.host.values())
        return 2 * len(self._failed & connected) > len(connected) or not connected

    def close(self) -> None:
        pass


class SecureEngine:
    """Sums the cohort's updates by secure aggregation; every update yielded is their mean.

    If nodes break the protocol or leave it, or too few answer, the sum is lost: all clients of the
    round are rejected, and the next starts from the same parameters. A second such round in a row
    raises `NoUpdates`.
    """

    def __init__(
        self,
        roster: Roster,
        stage: Stage,
        extra: Mapping[str, Any],
        settings: SecureSettings,
        *,
        losses: bool = True,
    ) -> None:
        self.roster = roster
        self.stage = stage
        self.extra = extra
        self.settings = settings
        self.losses = losses
        self._last_was_lost = False

    def updates(self, parameters: Params, tasks: Sequence[ClientTask]) -> Iterator[ClientUpdate]:
        ready = {task.client: messages.query("ready", client=task.client) for task in tasks}
        faults = {
            client: _fault(reply) for client, reply in self.roster.ask(MessageType.QUERY, ready)
        }
        present = {self.roster.host[t.client]: t for t in tasks if faults[t.client] is None}
        if tasks and not present:
            raise NoUpdates(tasks, str(faults[tasks[0].client]))
        if len(present) < len(tasks) - sum(fault is not None for fault in faults.values()):
            raise FedlensError(
                "Secure aggregation hides updates only if every client has a node of its own: "
                "split the data over as many nodes as there are clients."
            )
        if tasks and len(present) < MIN_CLIENTS:
            few = f"secure aggregation needs at least {MIN_CLIENTS} clients to answer"
            yield from self._lost(tasks, {client: fault or few for client, fault in faults.items()})
            return
        shared = messages.encode_tensors(parameters)
        contents = {
            node: messages.encode_task(task, self.stage, shared, self.extra)
            for node, task in present.items()
        }
        for content in contents.values():
            self.roster.name_setup(content)
        result = secure_round(
            cast(Grid, self.roster.grid),
            contents,
            start=parameters,
            round_=tasks[0].round,
            max_weight=self.settings.max_weight or max(task.examples for task in tasks),
            settings=self.settings,
        )
        missing = {present[node].client: reason for node, reason in result.missing.items()}
        if result.change is None:
            if not result.lost:
                raise NoUpdates(tasks, next(iter(missing.values())))
            reasons = {task.client: faults[task.client] or missing[task.client] for task in tasks}
            yield from self._lost(tasks, reasons)
            return
        self._last_was_lost = False
        mean = {
            name: (value.double() + result.change[name].to(value.device)).to(value.dtype)
            for name, value in parameters.items()
        }
        for task in tasks:
            if fault := faults[task.client] or missing.get(task.client):
                yield messages.failed_update(task, fault)
            else:
                tally = result.tallies[self.roster.host[task.client]]
                yield ClientUpdate(task, mean, tally if self.losses else None, individual=False)

    def _lost(
        self, tasks: Sequence[ClientTask], reasons: Mapping[int, str]
    ) -> Iterator[ClientUpdate]:
        if self._last_was_lost:
            raise NoUpdates(tasks, next(iter(reasons.values())))
        self._last_was_lost = True
        for task in tasks:
            yield messages.failed_update(task, reasons[task.client])

    def close(self) -> None:
        pass


class FlowerClients:
    """`federated.tasks.Clients` over Flower.

    Before the rounds, clients whose answers cannot be used are left out, as in a round.
    """

    def __init__(
        self,
        roster: Roster,
        sizes: Sequence[int],
        *,
        encode: Callable[[nn.Linear | None, Masks | None], Setup],
        extra: Mapping[str, Any],
        secure: SecureSettings | None = None,
        losses: bool = True,
        only_sent: Collection[str] = (),
    ) -> None:
        """`encode` makes the setup that nodes need from the head and the masks shared so far.

        `extra` is added to every task of a round; `secure`: rounds use secure aggregation;
        `losses=False`: clients do not reveal their losses; `only_sent` as in `FlowerEngine`.
        """
        self.roster = roster
        self.extra = extra
        self.secure = secure
        self.losses = losses
        self.only_sent = only_sent
        self._sizes = sizes
        self._encode = encode
        self._head: nn.Linear | None = None
        self._masks: Masks | None = None
        self._left_out: dict[int, str] = {}

    @property
    def sizes(self) -> Sequence[int]:
        return self._sizes

    @property
    def repeatable(self) -> bool:
        return False

    @property
    def left_out(self) -> Mapping[int, str]:
        return self._left_out

    def share(self, *, head: nn.Linear | None = None, masks: Masks | None = None) -> None:
        """Adds a head or masks to the setup; nodes are sent it with their next message."""
        self._head = self._head if head is None else head
        self._masks = self._masks if masks is None else masks
        self.roster.setup = self._encode(self._head, self._masks)

    def engine(self, stage: Stage) -> Engine:
        self._ensure_setup()
        extra = self.extra if stage == "rounds" else {}
        if self.secure and stage == "rounds":
            return SecureEngine(self.roster, stage, extra, self.secure, losses=self.losses)
        only_sent = self.only_sent if stage == "rounds" else ()
        return FlowerEngine(self.roster, stage, extra, losses=self.losses, only_sent=only_sent)

    def statistics(self, known: torch.Tensor, classes: int) -> Statistics:
        like = {
            name: torch.empty(shape, dtype=torch.float64, device="meta")
            for name, shape in Statistics.sent_shapes(known.shape[1], classes).items()
        }
        norms = known.double().norm(dim=1)
        largest = LARGEST_FEATURES * (float(norms.max()) if len(known) else 1.0)
        queries = {
            client: messages.query("statistics", client=client)
            for client in range(self.roster.clients)
        }

        def read(client: int, reply: RecordDict) -> Statistics:
            statistics = Statistics.received(_tensors(reply, like))
            if fault := statistics.fault(self._sizes[client], largest):
                raise InvalidMessage(fault)
            return statistics

        return reduce(add, self._answers("statistics", queries, read))

    def sensitivities(
        self, clients: Sequence[int], round_: int, parameters: Params
    ) -> Iterator[Sensitivity]:
        like = {name: value.to("meta", torch.float64) for name, value in parameters.items()}
        queries = {
            client: messages.query("sensitivity", client=client, number=round_)
            for client in clients
        }
        shared = messages.encode_tensors(parameters)
        for query in queries.values():
            query[ARRAYS] = shared

        def read(_: int, reply: RecordDict) -> Sensitivity:
            count = messages.decode_number(reply, "count", least=1)
            return Sensitivity(_tensors(reply, like), count)

        yield from self._answers("sensitivity", queries, read)

    def rankings(self, clients: Sequence[int], like: Ranking) -> Iterator[Ranking]:
        queries = {client: messages.query("ranking", client=client) for client in clients}
        numbered = {str(number): order for number, order in enumerate(like.orders.values())}

        def read(_: int, reply: RecordDict) -> Ranking:
            orders = _tensors(reply, numbered)
            if not all(_is_permutation(order) for order in orders.values()):
                raise InvalidMessage("it is not a permutation of the weights")
            return Ranking(like.shapes, dict(zip(like.orders, orders.values(), strict=True)))

        yield from self._answers("ranking", queries, read)

    def _ensure_setup(self) -> None:
        if self.roster.setup is None:
            self.share()

    def _answers(
        self, what: str, queries: Mapping[int, RecordDict], read: Callable[[int, RecordDict], T]
    ) -> Iterator[T]:
        """What `read` makes of the replies, without those for which it raises InvalidMessage.

        Raises if no client is left, or if most nodes fail: that is not the fault of one of them.
        """
        self._ensure_setup()
        host, failed, used = dict(self.roster.host), set[int | None](), 0
        for client, reply in self.roster.ask(MessageType.QUERY, queries):
            try:
                fault = _fault(reply)
                if fault is not None or isinstance(reply, NoReply):
                    raise InvalidMessage(fault)
                answer = read(client, reply)
            except InvalidMessage as error:
                reason = str(error).rstrip(".")
                failed.add(host.get(client))
                if 2 * len(failed) > len({*host.values()}):
                    raise FedlensError(
                        f"More than half of the nodes did not send a {what} that can be used "
                        f"(client {client}: {reason}): check the nodes, then run the same command "
                        "again."
                    ) from error
                log.warning("Client %d is left out (%s: %s)", client, what, reason)
                self._left_out[client] = f"{what}: {reason}"
                continue
            used += 1
            yield answer
        if queries and not used:
            raise FedlensError(
                f"None of the {len(queries)} clients that were asked sent a {what} that can be "
                f"used (client {client}: {reason}): check the nodes, then run the same command "
                "again."
            )


def _fault(reply: Reply) -> str | None:
    return reply.reason if isinstance(reply, NoReply) else messages.decode_fault(reply)


def _raise_if_worker_died(reason: str) -> None:
    """Flower would keep sending a simulation's messages to the same dead process."""
    if "ActorDied" in reason or "RayActorError" in reason:
        raise FedlensError(
            "A worker of the simulation died, often for lack of memory: run the same command again "
            "with fewer workers to resume."
        )


def _tensors(reply: RecordDict, like: Params) -> dict[str, torch.Tensor]:
    """The tensors of a reply, whose sums with those of others are finite."""
    tensors = messages.decode_parameters(reply, like)
    numbers = [value for value in tensors.values() if value.is_floating_point() and value.numel()]
    if not all(value.isfinite().all() for value in numbers):
        raise InvalidMessage("it holds values that are not finite")
    if any(value.abs().max() > messages.LARGEST_VALUE for value in numbers):
        raise InvalidMessage(f"it holds values above {messages.LARGEST_VALUE:g}")
    return tensors


def _is_permutation(order: torch.Tensor) -> bool:
    """Whether every position occurs once."""
    if order.numel() and not 0 <= int(order.min()) <= int(order.max()) < len(order):
        return False
    seen = torch.zeros(len(order), dtype=torch.bool)
    seen[order] = True
    return bool(seen.all())
