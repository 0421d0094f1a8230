"""A persistent ClientApp: one process answers a SuperNode's messages, one after another.

Flower starts a process per message, which would import torch, read the data and build the model
each time. A SuperNode in `--isolation process` offers its tasks over its Runtime API instead.
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
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, pull_objects
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.protobuf.client import ProtobufClientInterceptor
from flwr.supercore.retry import RetryInvoker, exponential
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import push_message, push_task_output

from fedlens.errors import FedlensError
from fedlens.federated.flower.inflating import inflated
from fedlens.federated.flower.refusals import Refusal

# Flower's client has no public way to serve tasks, so this uses internal modules of flwr.
SIGNED_METHODS = frozenset({"/flwr.proto.Runtime/AcquireTask"})  # the others are called by token
POLL_S = 0.02  # between two checks for a message that is on its way
LATE_AFTER_S = 2.0  # after which a message may have been dropped
MESSAGE_TIMEOUT_S = 600.0  # for a message whose task is there: it may be long, the network slow

log = logging.getLogger(__name__)


def serve(
    client_app: ClientApp,
    *,
    runtime_api_address: str,
    secret_file: Path | None = None,
    poll: float = 0.1,
    timeout: float = 60.0,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Answers messages until `stop()`, which is checked between messages and between retries.

    Raises `FedlensError` if the SuperNode cannot be reached for `timeout` seconds. The SuperNode
    is on this host, so there is no TLS; the secret keeps other processes from its tasks.
    """
    signing: list[ProtobufClientInterceptor] = []
    if secret_file is not None:
        secret = secret_file.read_bytes()
        signing = [
            SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=SIGNED_METHODS)
        ]

    def give_up(error: Exception) -> bool:
        refused = isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500
        return refused or stop()

    connect = partial(
        RuntimeHttpClient.from_server_address,
        runtime_api_address,
        insecure=True,
        root_certificates=None,
        # Flower's default retries for ever, and interrupts the process when it is refused.
        retry_invoker=RetryInvoker(
            lambda: exponential(base_delay=0.1, max_delay=2),
            (httpx.TransportError, httpx.HTTPStatusError),
            max_tries=None,
            max_time=timeout,
            jitter=None,
            should_giveup=give_up,
        ),
    )
    request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
    tokens: deque[str] = deque()
    with connect(interceptors=signing) as acquiring:

        def has_task() -> bool:
            """Whether there is a task that has not been started."""
            if token := acquiring.AcquireTask(request).token:
                tokens.append(token)
            return bool(tokens)

        while not stop():
            try:
                if not tokens and not has_task():
                    time.sleep(poll)
                    continue
            except httpx.HTTPError as error:
                if stop():
                    return
                raise _connection_error(runtime_api_address, error, timeout) from error
            with connect(interceptors=[RuntimeTokenHttpInterceptor(tokens.popleft())]) as client:
                try:
                    _answer(client_app, client, has_task)
                except Exception:  # the SuperNode reports a task without heartbeats as failed
                    log.exception("a message could not be received or its reply not be sent")


class _MessageDropped(Exception):
    """The message of a task will never arrive."""


def _answer(client_app: ClientApp, client: RuntimeHttpClient, has_task: Callable[[], bool]) -> None:
    """Receives one message and sends the reply; if the app raises, the reply is a refusal."""
    heartbeats = HeartbeatSender(partial(_send_heartbeat, client))
    heartbeats.start()
    try:
        context = context_from_proto(client.PullTaskInput(PullTaskInputRequest()).context)
        try:
            message = _message(client, context, has_task)
        except _MessageDropped as reason:
            # Otherwise the SuperNode would report the failure in place of another task's reply.
            push_task_output(client, context, SubStatus.FAILED, str(reason))
            log.info("%s", reason)
            return
        try:
            reply = client_app(message=message, context=context)
            status, detail = SubStatus.COMPLETED, ""
        except Exception:
            log.exception("the app failed")
            status, detail = SubStatus.FAILED, str(Refusal.FAILED)
            reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, detail), reply_to=message)
        push_message(client, reply, context)
        push_task_output(client, context, status, detail)
    finally:
        heartbeats.stop()


def _message(client: RuntimeHttpClient, context: Context, has_task: Callable[[], bool]) -> Message:
    """Like Flower's own function, but waits for a message that is not, or not fully, there yet.

    A SuperNode announces a task before it has stored, or even received, the message. A process
    that has yet to start never notices; one that waits for tasks does. If the run ends meanwhile,
    the SuperNode deletes the message but not the task. It works on one task at a time, so a new
    task means that this one's message was deleted.
    """
    started = time.monotonic()

    def wait(seconds: float) -> None:
        waited = time.monotonic() - started
        if waited > MESSAGE_TIMEOUT_S or (waited > LATE_AFTER_S and has_task()):
            raise _MessageDropped("a message was dropped because its run has ended")
        time.sleep(seconds)

    while not (response := client.PullMessages(PullAppMessagesRequest())).messages_list:
        wait(POLL_S)
    tree = response.message_object_trees[0]
    receiver = Node(node_id=context.node_id), context.run_id
    while True:
        try:
            contents = pull_objects(
                [part.object_id for part in iterate_object_tree(tree)],
                make_pull_object_fn_protobuf(client.PullObject, *receiver),
                max_time=LATE_AFTER_S,
                max_tries_per_object=None,
                initial_backoff=POLL_S,
                backoff_cap=0.5,
            )
            break
        except ObjectPullError:
            wait(POLL_S)
    make_confirm_message_received_fn_protobuf(client.ConfirmMessageReceived, *receiver)(
        tree.object_id
    )
    message = inflated(tree.object_id, contents)
    message.metadata.__dict__["_message_id"] = tree.object_id  # it is not part of what is sent
    return message


def _send_heartbeat(client: RuntimeHttpClient) -> bool:
    try:
        return client.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success
    except httpx.HTTPError:
        return False


def _connection_error(address: str, error: httpx.HTTPError, timeout: float) -> FedlensError:
    if isinstance(error, httpx.HTTPStatusError):
        return FedlensError(
            f"The SuperNode at {address} refuses its tasks to this executor (HTTP "
            f"{error.response.status_code}): give both the same secret file."
        )
    return FedlensError(
        f"The SuperNode at {address} did not answer for {timeout:g} s ({error}): start the node "
        "again."
    )
