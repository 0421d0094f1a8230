"""A real SuperNode's Runtime API over HTTP, with the network side played by hand."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

pytest.importorskip("flwr")
import uvicorn
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.clientapp import ClientApp
from flwr.supercore import heartbeat
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supernode.main import create_app
from flwr.supernode.nodestate import NodeStateFactory

from fedlens.errors import FedlensError
from fedlens.federated.flower.deployment.app_worker import serve
from tests.federated.flower import echo
from tests.federated.flower.links import Link, free_port

RUN, NODE = 7, 11
T = TypeVar("T")


class SuperNode:
    """The half of a SuperNode that faces its executor."""

    def __init__(self, secret: bytes | None = None) -> None:
        factory = NodeStateFactory(ObjectStoreFactory())
        self.state = factory.state()
        self.state.set_node_id(NODE)
        run = Run.create_empty(RUN)
        run.fab_hash = self.fab = self.state.store_fab(Fab("", b"", {}))
        self.state.store_run(run)
        context = Context(RUN, NODE, {}, RecordDict(), {"text": "as told"})
        self.state.set_run_series_context(run.series_id, context)
        self.address = f"127.0.0.1:{free_port()}"
        settings = uvicorn.Config(
            create_app(factory, secret),
            host="127.0.0.1",
            port=int(self.address.split(":")[1]),
            lifespan="off",
            ws="none",
            log_level="error",
        )
        self.server = uvicorn.Server(settings)
        self.thread = threading.Thread(target=self.server.run)

    def announce(self) -> None:
        self.state.create_task(TaskType.CLIENT_APP, RUN, self.fab)

    def store(self, message: Message) -> None:
        message.metadata.__dict__["_message_id"] = message.object_id
        self.state.object_store.preregister(RUN, get_object_tree(message))
        self.state.store_message(message)

    def fill(self, message: Message) -> None:
        for identity, part in get_all_nested_objects(message).items():
            self.state.object_store.put(identity, part.deflate())

    def give(self, message: Message) -> None:
        self.store(message)
        self.fill(message)
        self.announce()

    def reply(self) -> Message:
        found = _soon(lambda: self.state.get_messages_legacy(is_reply=True))[0]
        identity = found.metadata.message_id
        tree = self.state.object_store.get_object_tree(identity)
        contents: dict[str, bytes] = {}
        for part in [tree, *_below(tree)]:
            find = partial(self.state.object_store.get, part.object_id)
            contents[part.object_id] = _soon(find)
        reply = inflate_object_from_contents(identity, contents)
        assert isinstance(reply, Message)
        return reply


@contextlib.contextmanager
def running(node: SuperNode) -> Iterator[SuperNode]:
    node.thread.start()
    _soon(lambda: node.server.started)
    try:
        yield node
    finally:
        node.server.should_exit = True
        node.thread.join(10)


@contextlib.contextmanager
def serving(node: SuperNode, app: ClientApp) -> Iterator[None]:
    over = threading.Event()
    told = {"runtime_api_address": node.address, "poll": 0.01}
    thread = threading.Thread(target=serve, args=(app,), kwargs={**told, "stop": over.is_set})
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(10)
        assert not thread.is_alive()


def work(*values: float) -> Message:
    metadata = Metadata(
        run_id=RUN,
        message_id="",
        src_node_id=1,
        dst_node_id=NODE,
        reply_to_message_id="",
        group_id="",
        created_at=time.time(),
        ttl=60.0,
        message_type="train",
    )
    arrays = ArrayRecord({"values": Array(np.array(values))})
    return make_message(metadata, content=RecordDict({"arrays": arrays}))


def values_of(reply: Message) -> list[float]:
    return reply.content.array_records["arrays"]["values"].numpy().tolist()


def test_messages_are_answered_in_turn_also_after_one_that_fails() -> None:
    with running(SuperNode()) as node, serving(node, echo.client):
        node.give(work(1.0, 2.0))
        first = node.reply()
        node.give(work(-1.0))
        failed = node.reply()
        node.give(work(3.0))
        last = node.reply()
    assert values_of(first) == [2.0, 4.0]
    assert failed.error.reason == "ArithmeticError: there is nothing below zero"
    assert values_of(last) == [6.0]
    counts = [reply.content.config_records["told"]["answered"] for reply in (first, last)]
    assert counts[1] == counts[0] + 1
    assert last.content.config_records["told"]["text"] == "as told"


def test_a_task_may_be_announced_before_its_message_is_there() -> None:
    with running(SuperNode()) as node, serving(node, echo.client):
        node.announce()
        time.sleep(0.3)
        message = work(4.0)
        node.store(message)
        time.sleep(1.3)
        filled = time.monotonic()
        node.fill(message)
        assert values_of(node.reply()) == [8.0]
    assert time.monotonic() - filled < 1.0  # by Flower's own way to wait it may be seconds


def test_what_an_app_leaves_in_its_context_is_there_for_the_next_message() -> None:
    app = ClientApp()

    @app.train()
    def count(message: Message, context: Context) -> Message:
        before = int(context.state["seen"]["n"]) if "seen" in context.state else 0  # type: ignore[call-overload, index]
        context.state["seen"] = ConfigRecord({"n": before + 1})
        return Message(RecordDict({"told": ConfigRecord({"before": before})}), reply_to=message)

    with running(SuperNode()) as node, serving(node, app):
        found = []
        for value in (1.0, 2.0):
            node.give(work(value))
            found.append(node.reply().content.config_records["told"]["before"])
            _soon(lambda: all(t.status.status == "finished" for t in node.state.get_tasks()))
    assert found == [0, 1]


def test_a_long_task_is_kept_alive_by_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "HEARTBEAT_DEFAULT_INTERVAL", 5.1)  # a beat every tenth second
    app = ClientApp()

    @app.train()
    def linger(message: Message, context: Context) -> Message:
        time.sleep(1.0)
        return Message(RecordDict(), reply_to=message)

    with running(SuperNode()) as node:
        beats: list[int] = []
        acknowledge = node.state.acknowledge_task_heartbeat

        def counted(task_id: int) -> bool:
            beats.append(task_id)
            return acknowledge(task_id)

        monkeypatch.setattr(node.state, "acknowledge_task_heartbeat", counted)
        with serving(node, app):
            node.give(work(1.0))
            node.reply()
            _soon(lambda: node.state.get_tasks()[0].status.status == "finished")
            heard = len(beats)
            time.sleep(0.3)
    assert heard >= 4
    assert len(beats) == heard


def test_a_silent_supernode_is_lost_after_some_patience() -> None:
    start = time.monotonic()
    with pytest.raises(FedlensError, match=r"did not answer for 0\.5 s .*: start the node again\."):
        serve(
            echo.client,
            runtime_api_address=f"127.0.0.1:{free_port()}",
            patience=0.5,
        )
    assert 0.4 < time.monotonic() - start < 5


def test_a_supernode_that_goes_away_is_lost_too() -> None:
    found: list[str] = []

    def attempt() -> None:
        try:
            serve(echo.client, runtime_api_address=node.address, patience=0.5)
        except FedlensError as error:
            found.append(str(error))

    thread = threading.Thread(target=attempt)
    with running(SuperNode()) as node:
        thread.start()
        node.give(work(1.0))
        node.reply()
    thread.join(15)
    assert len(found) == 1
    assert "did not answer" in found[0]


def test_waiting_for_a_supernode_ends_when_told_to_stop() -> None:
    start = time.monotonic()
    serve(
        echo.client,
        runtime_api_address=f"127.0.0.1:{free_port()}",
        stop=lambda: time.monotonic() > start + 0.3,
    )
    assert time.monotonic() - start < 5


def test_an_executor_without_the_secret_is_refused(tmp_path: Path) -> None:
    (tmp_path / "right").write_bytes(b"open sesame")
    (tmp_path / "wrong").write_bytes(b"open barley")
    with running(SuperNode(b"open sesame")) as node:
        for secret_file in (None, tmp_path / "wrong"):
            with pytest.raises(FedlensError, match="give both the same secret file"):
                serve(
                    echo.client,
                    runtime_api_address=node.address,
                    secret_file=secret_file,
                )
        answered = threading.Event()
        node.give(work(1.0))

        def listen() -> None:
            node.reply()
            answered.set()

        listener = threading.Thread(target=listen)
        listener.start()
        serve(
            echo.client,
            runtime_api_address=node.address,
            secret_file=tmp_path / "right",
            stop=answered.is_set,
        )
        listener.join(10)


def test_one_process_serves_a_whole_federation(link: Link) -> None:
    """With a real SuperLink, SuperNode and ServerApp; a process that stays keeps its count."""
    text = 'seed: 1\r\nname: "ünï"\n'
    ended, lines = link.run(values="[[1.5, 2.5], [-1.0], [4.0]]", text=text)
    assert ended.status == "completed"
    first, failed, last = [json.loads(line) for line in lines if line.startswith("{")][1:]
    assert first["values"] == [3.0, 5.0]
    assert failed["error"] == "ArithmeticError: there is nothing below zero"
    assert last["values"] == [8.0]
    assert first["pid"] == last["pid"] == link.executor
    assert first["text"] == last["text"] == text
    assert abs(last["answered"] - first["answered"]) == 1


def _soon(look: Callable[[], T], seconds: float = 20.0) -> T:
    until = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.01)
    return found


def _below(tree: object) -> list[object]:
    return [part for child in tree.children for part in (child, *_below(child))]  # type: ignore[attr-defined]
