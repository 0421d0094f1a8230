"""A real SuperNode's Runtime API over HTTP; the tests take the part of the network."""

import contextlib
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
from fedlens.federated.flower.refusals import Refusal
from tests.federated.flower import echo
from tests.federated.flower.links import free_port

RUN, NODE = 7, 11
T = TypeVar("T")


class SuperNode:
    """The part of a SuperNode that serves its app worker."""

    def __init__(self, secret: bytes | None = None) -> None:
        factory = NodeStateFactory(ObjectStoreFactory())
        self.state = factory.state()
        self.state.set_node_id(NODE)
        run = Run.create_empty(RUN)
        run.fab_hash = self.fab = self.state.store_fab(Fab("", b"", {}))
        self.state.store_run(run)
        context = Context(RUN, NODE, {}, RecordDict(), {"text": "from the settings"})
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
        metadata = _wait_for(lambda: self.state.get_messages_legacy(is_reply=True))[0].metadata
        identity = metadata.message_id
        tree = self.state.object_store.get_object_tree(identity)
        contents: dict[str, bytes] = {}
        for part in [tree, *_descendants(tree)]:
            get = partial(self.state.object_store.get, part.object_id)
            contents[part.object_id] = _wait_for(get)
        reply = inflate_object_from_contents(identity, contents)
        assert isinstance(reply, Message)
        return reply


@contextlib.contextmanager
def running(node: SuperNode) -> Iterator[SuperNode]:
    node.thread.start()
    _wait_for(lambda: node.server.started)
    try:
        yield node
    finally:
        node.server.should_exit = True
        node.thread.join(10)


@contextlib.contextmanager
def serving(node: SuperNode, app: ClientApp) -> Iterator[None]:
    done = threading.Event()
    options = {"runtime_api_address": node.address, "poll": 0.01}
    thread = threading.Thread(target=serve, args=(app,), kwargs={**options, "stop": done.is_set})
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(10)
        assert not thread.is_alive()


def message_with(*values: float) -> Message:
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


def test_messages_are_answered_in_order_even_after_a_failure() -> None:
    with running(SuperNode()) as node, serving(node, echo.client):
        node.give(message_with(1.0, 2.0))
        first = node.reply()
        node.give(message_with(-1.0))
        failed = node.reply()
        node.give(message_with(3.0))
        last = node.reply()
    assert values_of(first) == [2.0, 4.0]
    assert failed.error.reason == Refusal.FAILED  # what it was is for the node's own log
    assert values_of(last) == [6.0]
    counts = [reply.content.config_records["info"]["answered"] for reply in (first, last)]
    assert counts[1] == counts[0] + 1
    assert last.content.config_records["info"]["text"] == "from the settings"


def test_a_task_may_be_announced_before_its_message_arrives() -> None:
    with running(SuperNode()) as node, serving(node, echo.client):
        node.announce()
        time.sleep(0.3)
        message = message_with(4.0)
        node.store(message)
        time.sleep(1.3)
        filled = time.monotonic()
        node.fill(message)
        assert values_of(node.reply()) == [8.0]
    assert time.monotonic() - filled < 1.0  # Flower's own retries may take seconds


def test_the_context_keeps_its_state_between_messages() -> None:
    app = ClientApp()

    @app.train()
    def count(message: Message, context: Context) -> Message:
        before = int(context.state["seen"]["n"]) if "seen" in context.state else 0  # type: ignore[call-overload, index]
        context.state["seen"] = ConfigRecord({"n": before + 1})
        return Message(RecordDict({"info": ConfigRecord({"before": before})}), reply_to=message)

    with running(SuperNode()) as node, serving(node, app):
        counts = []
        for value in (1.0, 2.0):
            node.give(message_with(value))
            counts.append(node.reply().content.config_records["info"]["before"])
            _wait_for(lambda: all(t.status.status == "finished" for t in node.state.get_tasks()))
    assert counts == [0, 1]


def test_a_long_task_sends_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
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
            node.give(message_with(1.0))
            node.reply()
            _wait_for(lambda: node.state.get_tasks()[0].status.status == "finished")
            count = len(beats)
            time.sleep(0.3)
    assert count >= 4
    assert len(beats) == count


def test_an_unreachable_supernode_is_an_error_after_a_timeout() -> None:
    start = time.monotonic()
    with pytest.raises(FedlensError, match=r"did not answer for 0\.5 s .*: start the node again\."):
        serve(
            echo.client,
            runtime_api_address=f"127.0.0.1:{free_port()}",
            timeout=0.5,
        )
    assert 0.4 < time.monotonic() - start < 5


def test_a_supernode_that_ends_is_an_error_after_a_timeout() -> None:
    errors: list[str] = []

    def attempt() -> None:
        try:
            serve(echo.client, runtime_api_address=node.address, timeout=0.5)
        except FedlensError as error:
            errors.append(str(error))

    thread = threading.Thread(target=attempt)
    with running(SuperNode()) as node:
        thread.start()
        node.give(message_with(1.0))
        node.reply()
    thread.join(15)
    assert len(errors) == 1
    assert "did not answer" in errors[0]


def test_waiting_for_a_supernode_can_be_stopped() -> None:
    start = time.monotonic()
    serve(
        echo.client,
        runtime_api_address=f"127.0.0.1:{free_port()}",
        stop=lambda: time.monotonic() > start + 0.3,
    )
    assert time.monotonic() - start < 5


def test_a_worker_without_the_secret_is_refused(tmp_path: Path) -> None:
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
        node.give(message_with(1.0))

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


def _wait_for(get: Callable[[], T], timeout: float = 20.0) -> T:
    """The first result of `get` that is true."""
    until = time.monotonic() + timeout
    while not (result := get()):
        assert time.monotonic() < until, "timeout"
        time.sleep(0.01)
    return result


def _descendants(tree: object) -> list[object]:
    return [part for child in tree.children for part in (child, *_descendants(child))]  # type: ignore[attr-defined]
