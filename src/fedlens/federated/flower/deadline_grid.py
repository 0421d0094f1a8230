"""Flower's HTTP grid with waits that end: no call outlasts a deadline, no reply waits for another.

Flower pulls the replies of a round one after another, and waits up to two hours for a reply whose
node was killed while it sent it. A SuperLink delivers each reply once, so those behind it are lost.
Here calls go through a thread of their own, incomplete replies are kept until the rest of them is
there, and a reply that cannot be read concerns its own client alone.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

from flwr.app import Error, Message, Metadata
from flwr.app.message import make_message
from flwr.common.constant import ErrorCode
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.constant import SYSTEM_MESSAGE_TYPE
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, pull_objects
from flwr.superlink.grid.http_grid import HttpGrid

from fedlens.federated.flower import inflating
from fedlens.federated.flower.inflating import TooLarge, inflated

POLL_S = 0.1  # between two checks for replies, or for a request to stop
PULL_S = 1.0  # a pull returns after so long at the latest, with what has arrived
MOST_OBJECTS = 4096  # of one reply
TOO_LARGE = "its reply is larger than any that is expected"
UNREADABLE = "its reply cannot be read"
INCOMPLETE = "its node ended while it sent the reply"

T = TypeVar("T")


@dataclass
class _Arriving:
    """A reply that the SuperLink has announced; its parts may still be on their way."""

    metadata: Any  # as the SuperLink checked it: that of the message itself is the node's word
    objects: list[str]
    contents: dict[str, bytes] = field(default_factory=dict)
    size: int = 0  # bytes of `contents`
    fault: str | None = None  # why it will never be complete


class DeadlineGrid:
    """The methods of an `HttpGrid` that are used here; each returns or raises by the deadline."""

    def __init__(self, grid: HttpGrid, deadline: float, check: Callable[[], None]) -> None:
        """`check` may raise to stop waiting."""
        self.grid = grid
        self.deadline = deadline
        self.check = check
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._pulling: Future[None] | None = None
        self._expires: dict[str, float] = {}  # message → when its reply is of no use any more
        self._arriving: dict[str, _Arriving] = {}  # message → its reply
        self._arrived: dict[str, Message] = {}  # message → its reply
        threading.Thread(target=self._work, name="flower-grid", daemon=True).start()

    def get_node_ids(self) -> Iterable[int]:
        return self._within_deadline(lambda: list(self.grid.get_node_ids()))

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        outgoing = list(messages)
        pushed = self._within_deadline(lambda: list(self.grid.push_messages(outgoing)))
        now = time.monotonic()
        for message, identity in zip(outgoing, pushed, strict=False):
            if identity:
                self._expires[identity] = now + message.metadata.ttl
        return pushed

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies that have arrived completely, after a second at the latest."""
        asked = list(message_ids)
        if self._pulling is None:
            self._pulling = self._start(lambda: self._pull(asked))
        wait([self._pulling], timeout=PULL_S)
        if self._pulling.done():
            done, self._pulling = self._pulling, None
            done.result()
        return [self._arrived.pop(one) for one in asked if one in self._arrived]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        until = time.monotonic() + (self.deadline if timeout is None else timeout)
        waiting = {one for one in self.push_messages(messages) if one}
        replies: list[Message] = []
        while waiting and time.monotonic() < until:
            arrived = list(self.pull_messages(waiting))
            replies += arrived
            waiting -= {reply.metadata.reply_to_message_id for reply in arrived}
            self.check()
            time.sleep(POLL_S if waiting else 0)
        return replies

    def _work(self) -> None:
        """One call after another, in a thread that may be left behind in one of them."""
        while True:
            call, future = self._calls.get()
            try:
                future.set_result(call())
            except BaseException as error:  # RunNotRunningException is no Exception
                future.set_exception(error)

    def _start(self, call: Callable[[], T]) -> "Future[T]":
        future: Future[T] = Future()
        self._calls.put((call, future))
        return future

    def _within_deadline(self, call: Callable[[], T]) -> T:
        future = self._start(call)
        until = time.monotonic() + self.deadline
        while not wait([future], timeout=POLL_S).done:
            self.check()
            if time.monotonic() > until:
                raise TimeoutError(f"no answer within {self.deadline:g} s")
        return future.result()

    def _pull(self, asked: list[str]) -> None:
        """Asks for replies, and for the parts of those that were not complete before."""
        self._forget_expired()
        known = self._arriving.keys() | self._arrived.keys()
        if new := [one for one in asked if one not in known]:
            request = PullAppMessagesRequest(message_ids=new)
            response = self.grid._runtime_client.PullMessages(request)
            announced = zip(response.messages_list, response.message_object_trees, strict=True)
            for message, tree in announced:
                objects = [part.object_id for part in iterate_object_tree(tree)]
                reply = _Arriving(message.metadata, objects)
                self._arriving[message.metadata.reply_to_message_id] = reply
        for identity, reply in list(self._arriving.items()):
            message = self._received(reply)
            if message is not None:
                self._arrived[identity] = message
                del self._arriving[identity]

    def _forget_expired(self) -> None:
        now = time.monotonic()
        for identity in [one for one, expiry in self._expires.items() if expiry < now]:
            del self._expires[identity]
            self._arriving.pop(identity, None)
            self._arrived.pop(identity, None)

    def _received(self, reply: _Arriving) -> Message | None:
        """The reply, or an error in its place; None while parts of it are missing."""
        if len(reply.objects) > MOST_OBJECTS:
            return self._error(reply, TOO_LARGE)
        missing = [one for one in reply.objects if one not in reply.contents]
        try:
            pull_objects(missing, lambda one: self._part(reply, one), max_tries_per_object=1)
        except ObjectPullError:
            return self._error(reply, reply.fault) if reply.fault else None
        identity = reply.metadata.message_id
        self.grid._runtime_client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(
                node=self.grid.node, run_id=self.grid.run.run_id, message_object_id=identity
            )
        )
        try:
            message = inflated(identity, reply.contents)
            message.metadata.__dict__.update(
                _message_id=identity,
                _src_node_id=reply.metadata.src_node_id,
                _reply_to_message_id=reply.metadata.reply_to_message_id,
            )
        except TooLarge:
            return self._error(reply, TOO_LARGE)
        except Exception:  # a node may send any bytes
            return self._error(reply, UNREADABLE)
        return message

    def _part(self, reply: _Arriving, identity: str) -> bytes:
        pull = make_pull_object_fn_protobuf(
            self.grid._runtime_client.PullObject, self.grid.node, self.grid.run.run_id
        )
        try:
            content = pull(identity)
            reply.size += len(content)
            if reply.size > inflating.MOST_BYTES:
                raise ObjectPullError(identity, TOO_LARGE)
        except ObjectPullError:  # `ObjectUnavailableError`: not yet
            reply.fault = TOO_LARGE if reply.size > inflating.MOST_BYTES else INCOMPLETE
            raise
        reply.contents[identity] = content
        return content

    def _error(self, reply: _Arriving, reason: str) -> Message:
        about = reply.metadata
        metadata = Metadata(
            run_id=about.run_id,
            message_id="",
            src_node_id=about.src_node_id,
            dst_node_id=about.dst_node_id,
            message_type=SYSTEM_MESSAGE_TYPE,
            group_id="",
            ttl=0,
            reply_to_message_id=about.reply_to_message_id,
            created_at=time.time(),
        )
        return make_message(metadata, error=Error(ErrorCode.MESSAGE_UNAVAILABLE, reason))


def within_deadline(grid: Any, deadline: float, check: Callable[[], None]) -> Any:
    """The grid with waits that end; grids without a network have none."""
    return DeadlineGrid(grid, deadline, check) if isinstance(grid, HttpGrid) else grid
