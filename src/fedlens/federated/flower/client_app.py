"""The ClientApp: it decodes a message, calls the node's host, and encodes the reply.

A setup is stored on the node's disk, so that a later process, or another on the same machine, does
not need it sent again.
"""

import logging
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS

from fedlens import files
from fedlens.errors import FedlensError
from fedlens.federated.flower import messages
from fedlens.federated.flower.differential_privacy import PrivacySettings, private_training
from fedlens.federated.flower.messages import ARRAYS, CONFIG, UNPREPARED, InvalidMessage
from fedlens.federated.flower.node_host import NodeHost
from fedlens.federated.flower.secure_aggregation import secure_training
from fedlens.federated.flower.setup import Setup
from fedlens.federated.tasks import ClientUpdate

# Differential privacy, and whether secure aggregation is required.
Protection = tuple[PrivacySettings, bool]

log = logging.getLogger(__name__)


def client_app(
    host_of: Callable[[Context], NodeHost], protection_of: Callable[[Setup], Protection]
) -> ClientApp:
    """`host_of` returns the same host for every message of a node."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        secure = RECORD_KEY_CONFIGS in message.content
        handler = partial(_train, host_of=host_of, protection_of=protection_of, secure=secure)
        guarded = partial(_guarded, handler)
        return (secure_training(guarded) if secure else guarded)(message, context)

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return _guarded(
            lambda message, context: _query(message, host_of(context)), message, context
        )

    return app


def _guarded(handler: ClientAppCallable, message: Message, context: Context) -> Message:
    """Replies with the sentence of an expected error; Flower logs all others."""
    try:
        return handler(message, context)
    except (FedlensError, InvalidMessage) as fault:
        log.error("%s", fault)
        return Message(messages.encode_fault(str(fault)), reply_to=message)


def _train(
    message: Message,
    context: Context,
    *,
    host_of: Callable[[Context], NodeHost],
    protection_of: Callable[[Setup], Protection],
    secure: bool,
) -> Message:
    setup = _setup(message.content)
    if setup is None:
        return _unprepared(message)
    settings, secure_required = protection_of(setup)
    if secure_required and not secure:
        raise FedlensError("This experiment sends updates by secure aggregation only.")

    def train(message: Message, context: Context) -> Message:
        update = _update(message.content, host_of(context), setup)
        return Message(messages.encode_update(update), reply_to=message)

    return private_training(settings, train)(message, context)


def _update(content: RecordDict, host: NodeHost, setup: Setup) -> ClientUpdate:
    stage = messages.decode_stage(content)
    like = host.layout(setup, stage)
    corrected = host.layout(setup, "correction") if stage == "rounds" else like
    task = messages.decode_task(content, corrected)
    parameters = messages.decode_tensors(content.array_records[ARRAYS], like)
    return host.train(setup, stage, task, parameters)


def _query(message: Message, host: NodeHost) -> Message:
    config = cast(dict[str, Any], message.content.config_records[CONFIG])
    ask = str(config["ask"])
    if ask == "introduce":
        return Message(messages.encode_introduction(host.introduction()), reply_to=message)
    setup = _setup(message.content)
    if setup is None:
        return _unprepared(message)
    client = int(config["client"])
    if ask == "ready":
        reply = messages.query(ask)
    elif ask == "statistics":
        reply = messages.query(ask, arrays=host.statistics(setup, client).sent())
    elif ask == "sensitivity":
        like = host.layout(setup, "calibration")
        parameters = messages.decode_tensors(message.content.array_records[ARRAYS], like)
        scores = host.sensitivity(setup, client, int(config["number"]), parameters)
        reply = messages.query(ask, arrays=scores.sums, count=scores.count)
    elif ask == "ranking":
        orders = host.ranking(setup, client).orders
        numbered = {str(number): order for number, order in enumerate(orders.values())}
        reply = messages.query(ask, arrays=numbered)
    else:
        raise InvalidMessage(f"'{ask}' is not a known query")
    return Message(reply, reply_to=message)


def _setup(content: RecordDict) -> Setup | None:
    """The setup that a message names: attached to it, or stored on disk; None if neither."""
    digest = str(content.config_records[CONFIG][messages.SETUP])
    path = files.cache_dir() / "flower" / f"{digest}.safetensors"
    if setup := messages.pop_setup(content):
        with files.replacing(path) as temporary:
            temporary.write_bytes(setup.content)
        return setup
    try:
        return _stored(path)
    except (FileNotFoundError, InvalidMessage):  # the server sends a damaged one again
        return None


@lru_cache(maxsize=4)
def _stored(path: Path) -> Setup:
    """Cached, because a file named by its content's hash does not change."""
    if files.sha256(path) != path.stem:
        raise InvalidMessage(f"{path} is damaged")
    return Setup.of(path.read_bytes())


def _unprepared(message: Message) -> Message:
    return Message(RecordDict({UNPREPARED: ConfigRecord({"is": True})}), reply_to=message)
