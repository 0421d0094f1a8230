"""A ClientApp that stays: one process answers a SuperNode's messages, one after another.

Flower starts a process per message, which would import torch, read the data and build the model
each time. A SuperNode in `--isolation process` leaves its tasks to whoever asks for them; this asks
over its Runtime API, with the inner parts of flwr that its own process is made of.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx
from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode, SubStatus
from flwr.common.serde import context_from_proto
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    pull_and_inflate_object_from_tree,
)
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.protobuf.client import ProtobufClientInterceptor
from flwr.supercore.retry import RetryInvoker, exponential
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import push_message, push_task_output

from fedlens.errors import FedlensError

SIGNED = frozenset({"/flwr.proto.Runtime/AcquireTask"})  # asked with the secret, the rest by token
SOON = 0.02  # seconds, between two looks for what is already on its way
LATE = 2.0  # seconds, after which it is asked whether it will come at all
AWAITED = 600.0  # seconds, for a message whose task is there: it may be long, and the line slow

log = logging.getLogger(__name__)


def serve(
    client_app: ClientApp,
    *,
    runtime_api_address: str,
    secret_file: Path | None = None,
    poll: float = 0.1,
    patience: float = 60.0,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Answers until `stop`, which is asked between messages and between attempts to connect.

    A SuperNode that cannot be reached for `patience` seconds, be it at the start, is lost. It is on
    this host, so there is no TLS; the secret keeps others from its tasks.
    """
    signed: list[ProtobufClientInterceptor] = []
    if secret_file is not None:
        secret = secret_file.read_bytes()
        signed = [SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=SIGNED)]

    def hopeless(error: Exception) -> bool:
        refused = isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500
        return refused or stop()

    connect = partial(
        RuntimeHttpClient.from_server_address,
        runtime_api_address,
        insecure=True,
        root_certificates=None,
        # Flower's own way to retry has no end, and interrupts the process when it is refused.
        retry_invoker=RetryInvoker(
            lambda: exponential(base_delay=0.1, max_delay=2),
            (httpx.TransportError, httpx.HTTPStatusError),
            max_tries=None,
            max_time=patience,
            jitter=None,
            should_giveup=hopeless,
        ),
    )
    wanted = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
    tokens: deque[str] = deque()
    with connect(interceptors=signed) as asking:

        def announced() -> bool:
            """Whether a task is there that nobody has begun."""
            if token := asking.AcquireTask(wanted).token:
                tokens.append(token)
            return bool(tokens)

        while not stop():
            try:
                if not tokens and not announced():
                    time.sleep(poll)
                    continue
            except httpx.HTTPError as error:
                if stop():
                    return
                raise FedlensError(_lost(runtime_api_address, error, patience)) from error
            with connect(interceptors=[RuntimeTokenHttpInterceptor(tokens.popleft())]) as client:
                try:
                    _answer(client_app, client, announced)
                except Exception:  # the SuperNode says of a task without heartbeats that it failed
                    log.exception("a message could not be taken or its answer not be given")


class _Dropped(Exception):
    """A task whose message will never come."""


def _answer(
    client_app: ClientApp, client: RuntimeHttpClient, announced: Callable[[], bool]
) -> None:
    """One message and its reply; whatever the app raises is an error reply."""
    heartbeats = HeartbeatSender(partial(_beat, client))
    heartbeats.start()
    try:
        context = context_from_proto(client.PullTaskInput(PullTaskInputRequest()).context)
        try:
            message = _message(client, context, announced)
        except _Dropped as reason:
            # A task left without a word would be answered by the SuperNode, in another's place.
            push_task_output(client, context, SubStatus.FAILED, str(reason))
            log.info("%s", reason)
            return
        try:
            reply = client_app(message=message, context=context)
            status, why = SubStatus.COMPLETED, ""
        except Exception as error:
            log.exception("the app failed")
            status, why = SubStatus.FAILED, f"{type(error).__name__}: {error}"
            reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, why), reply_to=message)
        push_message(client, reply, context)
        push_task_output(client, context, status, why)
    finally:
        heartbeats.stop()


def _message(client: RuntimeHttpClient, context: Context, announced: Callable[[], bool]) -> Message:
    """As Flower's own, but ready to be earlier than the message, or than all of it.

    A SuperNode announces a task before it has stored, or even received, what the task is about. A
    process that is yet to start never notices; one that waits for tasks does. If the run ends
    meanwhile the SuperNode forgets the message, though not the task; it works on one at a time, so
    when another is announced this one is no more.
    """
    begun = time.monotonic()

    def wait(seconds: float) -> None:
        waited = time.monotonic() - begun
        if waited > AWAITED or (waited > LATE and announced()):
            raise _Dropped("a message was dropped on its way: its run has ended")
        time.sleep(seconds)

    while not (found := client.PullMessages(PullAppMessagesRequest())).messages_list:
        wait(SOON)
    tree = found.message_object_trees[0]
    whose = Node(node_id=context.node_id), context.run_id
    while True:
        try:
            message = pull_and_inflate_object_from_tree(
                tree,
                make_pull_object_fn_protobuf(client.PullObject, *whose),
                make_confirm_message_received_fn_protobuf(client.ConfirmMessageReceived, *whose),
                return_type=Message,
                max_time=LATE,
                max_tries_per_object=None,
                initial_backoff=SOON,
                backoff_cap=0.5,
            )
            break
        except ObjectPullError:
            wait(SOON)
    message.metadata.__dict__["_message_id"] = tree.object_id  # which does not travel inside it
    return message


def _beat(client: RuntimeHttpClient) -> bool:
    try:
        return client.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success
    except httpx.HTTPError:
        return False


def _lost(address: str, error: httpx.HTTPError, patience: float) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return (
            f"The SuperNode at {address} refuses its tasks to this executor (HTTP "
            f"{error.response.status_code}): give both the same secret file."
        )
    return (
        f"The SuperNode at {address} did not answer for {patience:g} s ({error}): start the node "
        "again."
    )
