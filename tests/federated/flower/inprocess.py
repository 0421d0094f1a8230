"""Flower's grid without a network: messages go directly to a ClientApp with a node's context."""

from collections.abc import Callable, Iterable
from copy import deepcopy

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

Spoil = Callable[[int, Message, Message], Message | None]  # (node, message, reply) → what arrives


TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1


def delivered(message: Message, identity: str) -> Message:
    """The message as it is received: with an id, and with a copy of the content."""
    content = deepcopy(message.content)
    metadata = message.metadata
    received = Message(
        content, dst_node_id=metadata.dst_node_id, message_type=metadata.message_type
    )
    received.metadata.__dict__["_message_id"] = identity
    return received


class InProcessGrid(Grid):
    def __init__(
        self, app: ClientApp, nodes: dict[int, dict[str, str | int]], spoil: Spoil | None = None
    ) -> None:
        self.app = app
        self.spoil = spoil
        self.contexts = {
            node: Context(
                run_id=1, node_id=node, node_config=dict(config), state=RecordDict(), run_config={}
            )
            for node, config in nodes.items()
        }
        self.replies: dict[str, Message] = {}
        self.sent: list[tuple[int, Message]] = []

    def set_run(self, run: Run) -> None: ...

    @property
    def run(self) -> Run:
        return Run.create_empty(1)

    def create_message(self, *args: object, **kwargs: object) -> Message:
        raise AssertionError("messages are made by their constructor")

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node) for node in self.contexts]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        identities = []
        for message in messages:
            node, identity = message.metadata.dst_node_id, f"message-{len(self.sent)}"
            self.sent.append((node, message))
            identities.append(identity)
            received = delivered(message, identity)
            try:
                reply: Message | None = self.app(received, self.contexts[node])
            except Exception as error:
                reply = Message(Error(code=0, reason=str(error)), reply_to=received)
            if reply is not None and self.spoil:
                reply = self.spoil(node, message, reply)
            if reply is not None:
                self.replies[identity] = reply
        return identities

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.replies.pop(one) for one in list(message_ids) if one in self.replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))
