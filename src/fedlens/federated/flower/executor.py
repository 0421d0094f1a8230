"""A ClientApp that stays: one process answers a SuperNode's messages, one after another.

Flower starts a process per message, which would import torch, read the data and build the model
each time. A SuperNode in `--isolation process` leaves its tasks to whoever asks for them; this asks
over its Runtime API, with the inner parts of flwr that its own process is made of.
"""

import logging
import os
import threading
import time
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
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.protobuf.client import ProtobufClientInterceptor
from flwr.supercore.retry import RetryInvoker, exponential
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import push_message, push_task_output

from fedlens.errors import FedlensError

SIGNED = frozenset({"/flwr.proto.Runtime/AcquireTask"})  # asked with the secret, the rest by token
SOON = 0.02  # seconds, between two looks for what is already on its way
AWAITED = 30.0  # seconds, for a message whose task is there

log = logging.getLogger(__name__)


def serve(
    client_app: ClientApp,
    *,
    runtime_api_address: str,
    secret_file: Path | None = None,
    root_certificates: Path | None = None,
    insecure: bool = False,
    poll: float = 0.1,
    patience: float = 60.0,
    stop: Callable[[], bool] = lambda: False,
    parent: int | None = None,
) -> None:
    """Answers until `stop`, which is asked between messages and between attempts to connect.

    A SuperNode that cannot be reached for `patience` seconds, be it at the start, is lost. With the
    process id of its `parent`, this process ends when that one does, whatever it is doing.
    """
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
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
        insecure,
        root_certificates.read_bytes() if root_certificates else None,
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
    with connect(signed) as asking:
        while not stop():
            try:
                token = asking.AcquireTask(wanted).token
            except httpx.HTTPError as error:
                if stop():
                    return
                raise FedlensError(_lost(runtime_api_address, error, patience)) from error
            if not token:
                time.sleep(poll)
                continue
            with connect([RuntimeTokenHttpInterceptor(token)]) as client:
                try:
                    _answer(client_app, client)
                except Exception:  # the SuperNode says of a task without heartbeats that it failed
                    log.exception("a message could not be taken or its answer not be given")


def _answer(client_app: ClientApp, client: RuntimeHttpClient) -> None:
    """One message and its reply; whatever the app raises is an error reply."""
    heartbeats = HeartbeatSender(partial(_beat, client))
    heartbeats.start()
    try:
        message, context = _pull(client)
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


def _pull(client: RuntimeHttpClient) -> tuple[Message, Context]:
    """As Flower's own, but ready to be earlier than the message.

    A SuperNode announces a task before it has stored, or even received, what the task is about. A
    process that is yet to start never notices; one that waits for tasks does.
    """
    context = context_from_proto(client.PullTaskInput(PullTaskInputRequest()).context)
    until = time.monotonic() + AWAITED
    while not (found := client.PullMessages(PullAppMessagesRequest())).messages_list:
        if time.monotonic() > until:
            raise TimeoutError(f"the message of a task did not come within {AWAITED:g} s")
        time.sleep(SOON)
    tree = found.message_object_trees[0]
    whose = Node(node_id=context.node_id), context.run_id
    message = pull_and_inflate_object_from_tree(
        tree,
        make_pull_object_fn_protobuf(client.PullObject, *whose),
        make_confirm_message_received_fn_protobuf(client.ConfirmMessageReceived, *whose),
        return_type=Message,
        max_tries_per_object=None,
        initial_backoff=SOON,
        backoff_cap=0.5,
    )
    message.metadata.__dict__["_message_id"] = tree.object_id  # which does not travel inside it
    return message, context


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)  # an exception would have to wait for the app, or for the network


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
