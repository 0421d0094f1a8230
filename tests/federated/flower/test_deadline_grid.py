"""Waits end by the deadline, and no client's reply is lost to another's.

Flower's HTTP grid is real; the SuperLink behind it is a script.
"""

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedlens[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid

from fedlens.errors import FedlensError
from fedlens.federated.flower import deadline_grid, inflating
from fedlens.federated.flower.deadline_grid import DeadlineGrid, within_deadline
from fedlens.federated.flower.grid import GuardedGrid
from fedlens.federated.flower.roster import NoReply, Roster
from fedlens.federated.flower.setup import Setup
from tests.federated.flower.inprocess import InProcessGrid

DEADLINE = 1.5
TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1


@dataclass
class ScriptedLink:
    """Delivers each reply once; of some, parts are missing, damaged, or gone."""

    replies: dict[str, Message] = field(default_factory=dict)  # message → reply
    missing: set[str] = field(default_factory=set)  # objects that are not there yet
    gone: set[str] = field(default_factory=set)  # objects that will never be
    objects: dict[str, bytes] = field(default_factory=dict)
    confirmed: list[str] = field(default_factory=list)
    stalled: threading.Event = field(default_factory=threading.Event)

    def add(self, asked: str, reply: Message) -> list[str]:
        """Stores a reply; returns the names of its objects, the last one is the message."""
        reply.metadata.__dict__["_message_id"] = reply.object_id
        nested = get_all_nested_objects(reply)
        self.objects |= {name: one.deflate() for name, one in nested.items()}
        self.replies[asked] = reply
        return list(nested)

    def PullMessages(self, request: Any) -> Any:  # noqa: N802
        while self.stalled.is_set():
            time.sleep(0.01)
        found = [self.replies.pop(one) for one in request.message_ids if one in self.replies]
        return SimpleNamespace(
            messages_list=[message_to_proto(remove_content_from_message(one)) for one in found],
            message_object_trees=[get_object_tree(one) for one in found],
        )

    def PullObject(self, request: Any) -> Any:  # noqa: N802
        name = request.object_id
        return SimpleNamespace(
            object_found=name not in self.gone,
            object_available=name not in self.missing,
            object_content=self.objects[name],
        )

    def ConfirmMessageReceived(self, request: Any) -> None:  # noqa: N802
        self.confirmed.append(request.message_object_id)

    def GetNodes(self, request: Any) -> Any:  # noqa: N802
        while self.stalled.is_set():
            time.sleep(0.01)
        return SimpleNamespace(nodes=[SimpleNamespace(node_id=7)])


def reply_to(asked: str, node: int, number: float, *, claims: str | None = None) -> Message:
    query = Message(RecordDict(), dst_node_id=node, message_type=MessageType.QUERY)
    query.metadata.__dict__["_message_id"] = claims or asked
    values = ArrayRecord({"values": Array(np.full(4, number))})
    reply = Message(RecordDict({"arrays": values}), reply_to=query)
    reply.metadata.__dict__["_src_node_id"] = node
    return reply


def value(reply: Message) -> float:
    return float(reply.content.array_records["arrays"]["values"].numpy()[0])


@pytest.fixture
def link() -> Iterator[ScriptedLink]:
    link = ScriptedLink()
    yield link
    link.stalled.clear()


@pytest.fixture
def grid(link: ScriptedLink) -> DeadlineGrid:
    flower = HttpGrid("127.0.0.1:1", insecure=True, token="none")
    flower.set_run(Run.create_empty(1))
    flower._client = link  # type: ignore[assignment]
    made = within_deadline(flower, DEADLINE, lambda: None)
    assert isinstance(made, DeadlineGrid)
    return made


def test_complete_replies_do_not_wait_for_one_that_is_cut_off(
    link: ScriptedLink, grid: DeadlineGrid
) -> None:
    parts = link.add("a", reply_to("a", 1, 1.0))
    link.add("b", reply_to("b", 2, 2.0))
    link.missing = {parts[0]}
    started = time.monotonic()
    (first,) = grid.pull_messages(["a", "b"])
    assert value(first) == 2.0
    assert list(grid.pull_messages(["a"])) == []
    assert time.monotonic() - started < DEADLINE
    link.missing = set()  # the rest of it arrives
    (late,) = grid.pull_messages(["a"])
    assert value(late) == 1.0
    assert len(link.confirmed) == 2


def test_a_part_that_never_comes_is_an_error_of_its_client(
    link: ScriptedLink, grid: DeadlineGrid
) -> None:
    link.gone = {link.add("a", reply_to("a", 1, 1.0))[0]}
    link.add("b", reply_to("b", 2, 2.0))
    replies = {one.metadata.src_node_id: one for one in grid.pull_messages(["a", "b"])}
    assert replies[1].error.reason == deadline_grid.INCOMPLETE
    assert value(replies[2]) == 2.0


@pytest.mark.parametrize("damage", [b"", b"nonsense", b"Message 3 1\x00x", b"Nothing  0\x00"])
@pytest.mark.parametrize("which", [0, -1])
def test_a_reply_of_any_bytes_is_an_error_of_its_client(
    link: ScriptedLink, grid: DeadlineGrid, damage: bytes, which: int
) -> None:
    link.objects[link.add("a", reply_to("a", 1, 1.0))[which]] = damage
    link.add("b", reply_to("b", 2, 2.0))
    replies = {one.metadata.src_node_id: one for one in grid.pull_messages(["a", "b"])}
    assert replies[1].error.reason == deadline_grid.UNREADABLE
    assert value(replies[2]) == 2.0


def test_a_reply_beyond_all_limits_is_an_error(
    link: ScriptedLink, grid: DeadlineGrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inflating, "MOST_BYTES", 10)
    link.add("a", reply_to("a", 1, 1.0))
    (reply,) = grid.pull_messages(["a"])
    assert reply.error.reason == deadline_grid.TOO_LARGE
    monkeypatch.setattr(deadline_grid, "MOST_OBJECTS", 1)
    link.add("b", reply_to("b", 1, 1.0))
    (reply,) = grid.pull_messages(["b"])
    assert reply.error.reason == deadline_grid.TOO_LARGE


@pytest.mark.parametrize(("times", "refused"), [(2**20, True), (2, False)])
def test_a_chunk_that_is_listed_again_and_again_counts_as_often(
    times: int,
    refused: bool,
    link: ScriptedLink,
    grid: DeadlineGrid,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reply of a few megabytes that stands for 160: the server must not make the latter."""
    monkeypatch.setattr(inflating, "MOST_BYTES", 2**23)
    made: list[bytes] = []
    make = Array.inflate
    monkeypatch.setattr(
        Array,
        "inflate",
        lambda content, **options: made.append(content) or make(content, **options),
    )
    link.add("a", reply_to("a", 1, 1.0))
    (name,) = [name for name, content in link.objects.items() if content.startswith(b"Array ")]
    head, _, body = link.objects[name].partition(b"\0")
    listed = {**json.loads(body), "arraychunk_ids": [0] * times}
    body = json.dumps(listed, separators=(",", ":")).encode()
    kind, children, _ = head.split(b" ")
    link.objects[name] = b"%s %s %d\0%s" % (kind, children, len(body), body)
    (reply,) = grid.pull_messages(["a"])
    if refused:
        assert reply.error.reason == deadline_grid.TOO_LARGE
    assert (reply.has_error(), len(made)) == (refused, 0 if refused else 1)


def test_a_superlink_that_stalls_ends_no_wait_later_than_the_deadline(
    link: ScriptedLink, grid: DeadlineGrid
) -> None:
    link.stalled.set()
    started = time.monotonic()
    assert list(grid.pull_messages(["a"])) == []
    assert time.monotonic() - started < deadline_grid.PULL_S + 0.5
    guarded = GuardedGrid(grid, lambda: None)  # type: ignore[arg-type]
    with pytest.raises(FedlensError, match=r"no answer within 1\.5 s"):
        guarded.get_node_ids()
    assert time.monotonic() - started < deadline_grid.PULL_S + DEADLINE + 1
    link.stalled.clear()
    assert list(grid.get_node_ids()) == [7]


def test_a_request_to_stop_ends_a_wait_at_once(link: ScriptedLink, grid: DeadlineGrid) -> None:
    class Stopped(Exception): ...

    def check() -> None:
        raise Stopped

    grid.check = check
    link.stalled.set()
    started = time.monotonic()
    with pytest.raises(Stopped):
        grid.get_node_ids()
    assert time.monotonic() - started < 1


def test_a_round_ends_by_its_deadline_and_keeps_the_healthy_clients_reply(
    link: ScriptedLink, grid: DeadlineGrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Client 0's node is killed while it sends; client 1's reply comes after it."""
    monkeypatch.setattr(Roster, "refresh", lambda self: None)
    roster = Roster(grid, clients=2, identity=None, deadline=DEADLINE, check=lambda: None)  # type: ignore[arg-type]
    roster.setup = Setup("", {})
    roster.host = {0: 10, 1: 11}

    def push(outgoing: list[Message]) -> list[str]:
        for message in outgoing:
            node = message.metadata.dst_node_id
            parts = link.add(f"to {node}", reply_to(f"to {node}", node, float(node)))
            if node == 10:
                link.missing = {parts[0]}
        return [f"to {message.metadata.dst_node_id}" for message in outgoing]

    monkeypatch.setattr(grid.grid, "push_messages", push)
    contents = {client: RecordDict({"config": ConfigRecord()}) for client in (0, 1)}
    started = time.monotonic()
    replies = dict(roster.ask(MessageType.TRAIN, contents))
    assert DEADLINE <= time.monotonic() - started < DEADLINE + 1.5
    assert replies[0] == NoReply("no answer came within 1.5 s")
    healthy = replies[1]
    assert isinstance(healthy, RecordDict)
    assert healthy.array_records["arrays"]["values"].numpy()[0] == 11


def test_messages_are_sent_and_received_within_a_timeout(
    link: ScriptedLink, grid: DeadlineGrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    link.missing = {link.add("a", reply_to("a", 1, 1.0))[0]}
    link.add("b", reply_to("b", 2, 2.0))
    monkeypatch.setattr(grid.grid, "push_messages", lambda outgoing: ["a", "b", ""])
    started = time.monotonic()
    (reply,) = grid.send_and_receive([], timeout=0.5)
    assert value(reply) == 2.0
    assert time.monotonic() - started < 2


def test_a_node_cannot_answer_for_another(link: ScriptedLink, grid: DeadlineGrid) -> None:
    """The SuperLink knows whom a reply is from; what the reply itself says does not count."""
    reply = reply_to("a", 1, 1.0)
    link.add("a", reply)
    inner = reply_to("a", 2, 3.0, claims="b")
    inner.metadata.__dict__["_message_id"] = reply.object_id
    link.objects |= {name: one.deflate() for name, one in get_all_nested_objects(inner).items()}
    link.objects[reply.object_id] = link.objects[list(get_all_nested_objects(inner))[-1]]
    for arrived in grid.pull_messages(["a"]):
        assert arrived.metadata.src_node_id == 1
        assert arrived.metadata.reply_to_message_id == "a"


def test_errors_of_nodes_pass_through_and_other_grids_stay_as_they_are(
    link: ScriptedLink, grid: DeadlineGrid
) -> None:
    query = Message(RecordDict(), dst_node_id=1, message_type=MessageType.QUERY)
    query.metadata.__dict__["_message_id"] = "a"
    link.add("a", Message(Error(0, "no shard"), reply_to=query))
    (reply,) = grid.pull_messages(["a"])
    assert reply.error.reason == "no shard"
    plain = InProcessGrid(None, {})  # type: ignore[arg-type]
    assert within_deadline(plain, 1.0, lambda: None) is plain
