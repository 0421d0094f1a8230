"""Which nodes are connected, which clients each hosts, and queries to them with a deadline.

A node introduces itself once. A node whose data are of a different dataset or partition is ignored;
of two nodes that host the same client, the first is used.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import Error, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedlens.errors import FedlensError
from fedlens.federated.flower import messages
from fedlens.federated.flower.grid import GuardedGrid
from fedlens.federated.flower.messages import CONFIG, UNPREPARED, InvalidMessage
from fedlens.federated.flower.plain import one_line
from fedlens.federated.flower.setup import Setup

POLL_S = 0.1  # between two checks for replies
NODE_POLL_S = 1.0  # between two checks for new nodes, while clients are missing
START_TIMEOUT_S = 120.0  # the least time for nodes to connect before a run: they may be starting
MESSAGE_GRACE_S = 5.0  # a message outlives its deadline by this, so that the roster times out first
INTRODUCTION_TIMEOUT_S = 30.0  # how long a round waits for a node that may host a missing client
RETRY_S = 60.0  # until a node that failed to introduce itself is asked again

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NoReply:
    """Stands for the reply of a client that sent none."""

    reason: str


Reply = RecordDict | NoReply


class Roster:
    """Assigns every client to a connected node and exchanges messages with them."""

    def __init__(
        self,
        grid: Grid,
        *,
        clients: int,
        identity: Mapping[str, Any] | None,
        deadline: float,
        check: Callable[[], None],
    ) -> None:
        """`identity` is that of the dataset and partition, which nodes must report (None: any).

        A reply must arrive within `deadline` seconds; `check` may raise to stop waiting.
        """
        self.grid = GuardedGrid(grid, check)
        self.clients = clients
        self.identity = identity
        self.deadline = deadline
        self.check = check
        self.setup: Setup | None = None
        self.hosted: dict[int, tuple[int, ...]] = {}  # node → clients
        self.host: dict[int, int] = {}  # client → node
        self.setup_sent: dict[int, str] = {}  # node → digest of the setup it was sent last
        self.pending_introductions: dict[str, int] = {}  # message → node
        self.asked_at: dict[int, float] = {}  # node → when it was first asked to introduce itself
        self.retry_at: dict[int, float] = {}  # node → when it is asked again

    def wait_for_all(self) -> None:
        """Waits until a connected node hosts every client."""
        timeout = max(self.deadline, START_TIMEOUT_S)
        until = time.monotonic() + timeout
        logged = -1
        while missing := self._missing(range(self.clients)):
            if time.monotonic() > until:
                raise FedlensError(
                    f"{len(missing)} of {self.clients} clients were hosted by no connected node "
                    f"for {timeout:g} s ({_listed(missing)}): start their nodes, then run the same "
                    "command again."
                )
            if len(missing) != logged:
                logged = len(missing)
                log.info("waiting for nodes: %d of %d clients are missing", logged, self.clients)
            self._sleep(POLL_S if self.pending_introductions else NODE_POLL_S)
        log.info("%d nodes host all %d clients", len(self.hosted), self.clients)

    def refresh(self) -> None:
        """Updates which nodes are connected and which clients they host, without waiting."""
        connected = set(self.grid.get_node_ids())
        for node in self.hosted.keys() - connected:
            clients = [client for client, host in self.host.items() if host == node]
            log.warning("node %d, which hosts clients %s, disconnected", node, _listed(clients))
            del self.hosted[node]
            self.setup_sent.pop(node, None)
        now = time.monotonic()
        unregistered = connected - self.hosted.keys()
        due = sorted(node for node in unregistered if now >= self.retry_at.get(node, now))
        waiting = unregistered - set(due)
        until = now + max(self.deadline, START_TIMEOUT_S)
        self.pending_introductions = {
            message: node for message, node in self.pending_introductions.items() if node in waiting
        }
        self.asked_at = {node: self.asked_at.get(node, now) for node in unregistered}
        self.retry_at = {node: self.retry_at[node] for node in waiting} | dict.fromkeys(due, until)
        queries = {node: messages.query("introduce") for node in due}
        replies: dict[int, Reply] = {}
        self._push(
            MessageType.QUERY,
            queries,
            {node: node for node in due},
            until,
            self.pending_introductions,
            replies,
        )
        self._pull(self.pending_introductions, replies)
        for node in sorted(replies):
            self._register(node, replies[node])
        self._assign()

    def _missing(self, clients: Iterable[int]) -> list[int]:
        """Those of `clients` that no connected node hosts now."""
        self.refresh()
        return [client for client in clients if client not in self.host]

    def _expects_introductions(self) -> bool:
        """Whether a node that was asked recently has not introduced itself yet."""
        earliest = time.monotonic() - min(INTRODUCTION_TIMEOUT_S, self.deadline)
        return any(self.asked_at[node] > earliest for node in self.pending_introductions.values())

    def ask(self, kind: str, contents: Mapping[int, RecordDict]) -> Iterator[tuple[int, Reply]]:
        """Sends each client its message of type `kind`; yields the replies in the same order."""
        while self._missing(contents) and self._expects_introductions():
            self._sleep(POLL_S)
        for content in contents.values():
            self.name_setup(content)
        yield from self._exchange(kind, contents)

    def name_setup(self, content: RecordDict) -> None:
        """Writes the digest of the current setup into a message."""
        assert self.setup is not None
        content.config_records[CONFIG][messages.SETUP] = self.setup.digest

    def _exchange(
        self, kind: str, contents: Mapping[int, RecordDict]
    ) -> Iterator[tuple[int, Reply]]:
        until = time.monotonic() + self.deadline
        replies: dict[int, Reply] = {}
        waiting: dict[str, int] = {}  # message → client
        nodes = {client: self.host.get(client) for client in contents}
        setup_attached = self._nodes_without_setup(nodes)
        outgoing = {
            client: self._with_setup(content) if client in setup_attached else content
            for client, content in contents.items()
        }
        self._push(kind, outgoing, nodes, until, waiting, replies)
        for client in contents:
            while client not in replies:
                self._pull(waiting, replies)
                unprepared = {one for one, reply in replies.items() if _is_unprepared(reply)}
                not_stored = NoReply("its node does not keep the setup it is sent")
                replies |= dict.fromkeys(unprepared & setup_attached, not_stored)
                if resend := unprepared - setup_attached:
                    outgoing = {one: self._with_setup(contents[one]) for one in sorted(resend)}
                    for one in resend:
                        del replies[one]
                    self._push(kind, outgoing, nodes, until, waiting, replies)
                    setup_attached |= resend
                if time.monotonic() > until:
                    late = NoReply(f"no answer came within {self.deadline:g} s")
                    replies |= dict.fromkeys(waiting.values(), late)
                    waiting.clear()
                if client not in replies:
                    self._sleep(POLL_S)
            yield client, replies.pop(client)

    def _nodes_without_setup(self, nodes: Mapping[int, int | None]) -> set[int]:
        """The first client of each node without the current setup; marks the setup as sent."""
        assert self.setup is not None
        first: set[int] = set()
        for client, node in nodes.items():
            if node is not None and self.setup_sent.get(node) != self.setup.digest:
                self.setup_sent[node] = self.setup.digest
                first.add(client)
        return first

    def _with_setup(self, content: RecordDict) -> RecordDict:
        assert self.setup is not None
        return messages.with_setup(content, self.setup)

    def _push(
        self,
        kind: str,
        contents: Mapping[int, RecordDict],
        nodes: Mapping[int, int | None],
        until: float,
        waiting: dict[str, int],
        replies: dict[int, Reply],
    ) -> None:
        ttl = max(0.0, until - time.monotonic()) + MESSAGE_GRACE_S
        outgoing: list[Message] = []
        keys: list[int] = []
        for key, content in contents.items():
            node = nodes[key]
            if node is None:
                replies[key] = NoReply("no connected node hosts it")
                continue
            outgoing.append(Message(content, dst_node_id=node, message_type=kind, ttl=ttl))
            keys.append(key)
        if not outgoing:
            return
        for key, message_id in zip(keys, self.grid.push_messages(outgoing), strict=True):
            if message_id:
                waiting[message_id] = key
            else:
                replies[key] = NoReply("the message could not be sent to its node")

    def _pull(self, waiting: dict[str, int], replies: dict[int, Reply]) -> None:
        if not waiting:
            return
        for reply in self.grid.pull_messages(list(waiting)):
            key = waiting.pop(reply.metadata.reply_to_message_id, None)
            if key is not None:
                failed = reply.has_error()
                replies[key] = NoReply(_reason(reply.error)) if failed else reply.content

    def _register(self, node: int, reply: Reply) -> None:
        try:
            if isinstance(reply, NoReply):
                raise InvalidMessage(reply.reason)
            clients, identity = messages.decode_introduction(reply)
        except InvalidMessage as fault:
            log.warning("node %d did not introduce itself: %s", node, fault)
            self.retry_at[node] = time.monotonic() + RETRY_S
            return
        if self.identity is not None and identity != self.identity:
            log.warning("node %d has a different dataset or partition and is ignored", node)
            clients = ()
        if duplicates := [client for client in clients if client in self.host]:
            log.warning(
                "node %d hosts clients that another node hosts too: %s", node, _listed(duplicates)
            )
        self.hosted[node] = clients
        self._assign()

    def _assign(self) -> None:
        """Assigns every client to the first node that hosts it."""
        self.host = {}
        for node in self.hosted:
            for client in self.hosted[node]:
                self.host.setdefault(client, node)

    def _sleep(self, seconds: float) -> None:
        self.check()
        time.sleep(seconds)


def _reason(error: Error) -> str:
    reason = one_line(error.reason or "")
    return f"its node failed ({reason})" if reason else "its node failed"


def _is_unprepared(reply: Reply) -> bool:
    return not isinstance(reply, NoReply) and UNPREPARED in reply


def _listed(clients: Sequence[int]) -> str:
    shown = ", ".join(map(str, clients[:5]))
    return shown if len(clients) <= 5 else f"{shown} and {len(clients) - 5} more"
