"""Who is connected, which clients each node hosts, and questions to them that end by a deadline.

A node introduces itself once; whoever hosts a client of another world, or one that another node
hosts already, is left out and said to be. No answer is waited for longer than the deadline, and a
node that does not say who it is for no longer than somebody is missing.
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
from fedlens.federated.flower.messages import CONFIG, UNPREPARED, Garbled
from fedlens.federated.tasks import Setup

POLL = 0.1  # seconds between two looks for answers
ROLL_CALL = 1.0  # seconds between two looks at who is connected, while some are missing
GATHERING = 120.0  # seconds that nodes have at least before a run begins: they may just start
GRACE = 5.0  # seconds that a message outlives its question, so that we are the first to give up
INTRODUCTION = 30.0  # seconds a round waits for the word of a node that may host who is missing
SILENCE = 60.0  # seconds before a node that could not introduce itself is asked again

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Missing:
    """Why a client gave no answer."""

    why: str


class Fleet:
    def __init__(
        self,
        grid: Grid,
        *,
        clients: int,
        identity: Mapping[str, Any] | None,
        deadline: float,
        check: Callable[[], None],
    ) -> None:
        """`identity` is what nodes must say of their data; `check` may raise to stop waiting."""
        self.grid = GuardedGrid(grid, check)
        self.clients = clients
        self.identity = identity
        self.deadline = deadline
        self.check = check
        self.setup: Setup | None = None
        self.hosted: dict[int, tuple[int, ...]] = {}  # node → clients
        self.host: dict[int, int] = {}  # client → node
        self.prepared: dict[int, str] = {}  # node → the setup it was sent last
        self.unheard: dict[str, int] = {}  # introductions asked for: message → node
        self.since: dict[int, float] = {}  # node → when it was first asked for one
        self.again: dict[int, float] = {}  # node → when it is asked again

    def gather(self) -> None:
        """Waits until every client is hosted by somebody."""
        patience = max(self.deadline, GATHERING)
        until = time.monotonic() + patience
        said = -1
        while absent := self._absent(range(self.clients)):
            if time.monotonic() > until:
                raise FedlensError(
                    f"{len(absent)} of {self.clients} clients were hosted by no connected node for "
                    f"{patience:g} s ({_some(absent)}): start their nodes, then run the same "
                    "command again."
                )
            if len(absent) != said:
                said = len(absent)
                log.info("waiting for nodes: %d of %d clients are missing", said, self.clients)
            self._sleep(POLL if self.unheard else ROLL_CALL)
        log.info("%d nodes host all %d clients", len(self.hosted), self.clients)

    def roll_call(self) -> None:
        """Takes note of who came, who went and who said what it hosts; waits for nobody."""
        connected = set(self.grid.get_node_ids())
        for gone in self.hosted.keys() - connected:
            lost = [client for client, node in self.host.items() if node == gone]
            log.warning("node %d, which hosts clients %s, is gone", gone, _some(lost))
            del self.hosted[gone]
            self.prepared.pop(gone, None)
        now = time.monotonic()
        strangers = connected - self.hosted.keys()
        new = sorted(node for node in strangers if now >= self.again.get(node, now))
        waited = strangers - set(new)
        until = now + max(self.deadline, GATHERING)
        self.unheard = {name: node for name, node in self.unheard.items() if node in waited}
        self.since = {node: self.since.get(node, now) for node in strangers}
        self.again = {node: self.again[node] for node in waited} | dict.fromkeys(new, until)
        asked = {node: messages.question("introduce") for node in new}
        answers: dict[int, RecordDict | Missing] = {}
        self._push(MessageType.QUERY, asked, {n: n for n in new}, until, self.unheard, answers)
        self._listen(self.unheard, answers)
        for node in sorted(answers):
            self._welcome(node, answers[node])
        self._assign()

    def _absent(self, clients: Iterable[int]) -> list[int]:
        """Whom of these nobody hosts, by a new roll call."""
        self.roll_call()
        return [client for client in clients if client not in self.host]

    def _expecting(self) -> bool:
        """Whether a node that was asked lately has yet to say what it hosts."""
        lately = time.monotonic() - min(INTRODUCTION, self.deadline)
        return any(self.since[node] > lately for node in self.unheard.values())

    def ask(
        self, kind: str, questions: Mapping[int, RecordDict]
    ) -> Iterator[tuple[int, RecordDict | Missing]]:
        """Client → question; answers come in the questions' order, whoever is faster."""
        while self._absent(questions) and self._expecting():
            self._sleep(POLL)
        for content in questions.values():
            self.stamp(content)
        yield from self._exchange(kind, questions)

    def stamp(self, content: RecordDict) -> None:
        """Says in a message under which setup it is meant."""
        assert self.setup is not None
        content.config_records[CONFIG][messages.SETUP] = self.setup.digest

    def _exchange(
        self, kind: str, contents: Mapping[int, RecordDict]
    ) -> Iterator[tuple[int, RecordDict | Missing]]:
        until = time.monotonic() + self.deadline
        answers: dict[int, RecordDict | Missing] = {}
        waiting: dict[str, int] = {}  # message → client
        nodes = {client: self.host.get(client) for client in contents}
        told = self._strangers(nodes)  # whose message brings the setup
        whole = {k: self._with_setup(c) if k in told else c for k, c in contents.items()}
        self._push(kind, whole, nodes, until, waiting, answers)
        for key in contents:
            while key not in answers:
                self._listen(waiting, answers)
                again = {k for k, reply in answers.items() if _unprepared(reply)}
                forgetful = Missing("its node does not keep what it is told")
                answers |= dict.fromkeys(again & told, forgetful)
                if new := again - told:
                    whole = {k: self._with_setup(contents[k]) for k in sorted(new)}
                    for k in new:
                        del answers[k]
                    self._push(kind, whole, nodes, until, waiting, answers)
                    told |= new
                if time.monotonic() > until:
                    late = Missing(f"no answer came within {self.deadline:g} s")
                    answers |= dict.fromkeys(waiting.values(), late)
                    waiting.clear()
                if key not in answers:
                    self._sleep(POLL)
            yield key, answers.pop(key)

    def _strangers(self, nodes: Mapping[int, int | None]) -> set[int]:
        """The first client of each node that has not been sent the setup yet; now it will be."""
        assert self.setup is not None
        first: set[int] = set()
        for client, node in nodes.items():
            if node is not None and self.prepared.get(node) != self.setup.digest:
                self.prepared[node] = self.setup.digest
                first.add(client)
        return first

    def _with_setup(self, content: RecordDict) -> RecordDict:
        assert self.setup is not None
        return messages.attached(content, self.setup)

    def _push(
        self,
        kind: str,
        contents: Mapping[int, RecordDict],
        nodes: Mapping[int, int | None],
        until: float,
        waiting: dict[str, int],
        answers: dict[int, RecordDict | Missing],
    ) -> None:
        left = max(0.0, until - time.monotonic()) + GRACE
        outgoing: list[Message] = []
        keys: list[int] = []
        for key, content in contents.items():
            node = nodes[key]
            if node is None:
                answers[key] = Missing("no connected node hosts it")
                continue
            outgoing.append(Message(content, dst_node_id=node, message_type=kind, ttl=left))
            keys.append(key)
        if not outgoing:
            return
        for key, name in zip(keys, self.grid.push_messages(outgoing), strict=True):
            if name:
                waiting[name] = key
            else:
                answers[key] = Missing("its node took no message")

    def _listen(self, waiting: dict[str, int], answers: dict[int, RecordDict | Missing]) -> None:
        if not waiting:
            return
        for reply in self.grid.pull_messages(list(waiting)):
            key = waiting.pop(reply.metadata.reply_to_message_id, None)
            if key is not None:
                failed = reply.has_error()
                answers[key] = Missing(_reason(reply.error)) if failed else reply.content

    def _welcome(self, node: int, reply: RecordDict | Missing) -> None:
        try:
            if isinstance(reply, Missing):
                raise Garbled(reply.why)
            claimed, identity = messages.introduction_of(reply)
        except Garbled as why:
            log.warning("node %d did not introduce itself: %s", node, why)
            self.again[node] = time.monotonic() + SILENCE
            return
        if self.identity is not None and identity != self.identity:
            log.warning("node %d has data of another world: it is left out", node)
            claimed = ()
        if taken := [client for client in claimed if client in self.host]:
            log.warning("node %d hosts clients that another node has: %s", node, _some(taken))
        self.hosted[node] = claimed
        self._assign()

    def _assign(self) -> None:
        """Every client to one node, the first that came of those that host it."""
        self.host = {}
        for node in self.hosted:
            for client in self.hosted[node]:
                self.host.setdefault(client, node)

    def _sleep(self, seconds: float) -> None:
        self.check()
        time.sleep(seconds)


def _reason(error: Error) -> str:
    return f"its node failed ({error.reason})" if error.reason else "its node failed"


def _unprepared(reply: RecordDict | Missing) -> bool:
    return not isinstance(reply, Missing) and UNPREPARED in reply


def _some(clients: Sequence[int]) -> str:
    shown = ", ".join(map(str, clients[:5]))
    return shown if len(clients) <= 5 else f"{shown} and {len(clients) - 5} more"
