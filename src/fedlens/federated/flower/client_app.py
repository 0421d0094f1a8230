"""The ClientApp: it decodes a message, calls the node's host, and encodes the reply.

A server is not trusted: whatever is wrong with a message, or fails, gives a reply with one of the
sentences of `Refusal`. A setup is stored on the node's disk, so that a later process, or another on
the same machine, does not need it sent again.
"""

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS

from fedlens import files
from fedlens.errors import FedlensError
from fedlens.federated.flower import messages
from fedlens.federated.flower.differential_privacy import PrivacySettings, private_training
from fedlens.federated.flower.messages import UNPREPARED, InvalidMessage
from fedlens.federated.flower.node_host import NodeHost
from fedlens.federated.flower.refusals import Refusal, Refused
from fedlens.federated.flower.secure_aggregation import secure_training
from fedlens.federated.flower.setup import Setup
from fedlens.federated.tasks import ClientUpdate
from fedlens.models.architectures.weights import WrongWeights
from fedlens.plugins import PluginError

# Differential privacy, and whether secure aggregation is required.
Protection = tuple[PrivacySettings, bool]

# Why an expected error refuses a message; the first kind that it is.
REASONS: tuple[tuple[type[Exception], Refusal], ...] = (
    (PluginError, Refusal.PLUGIN),
    (WrongWeights, Refusal.WEIGHTS),
    (InvalidMessage, Refusal.MESSAGE),
    (FedlensError, Refusal.SETUP),
)
SETUPS_KEPT, BYTES_KEPT = 8, 2**30  # of setups on disk; the ones used last are kept

log = logging.getLogger(__name__)


def client_app(
    host_of: Callable[[Context], NodeHost], protection_of: Callable[[Setup], Protection]
) -> ClientApp:
    """`host_of` returns the same host for every message of a node."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        secure = RECORD_KEY_CONFIGS in message.content
        handler: ClientAppCallable = partial(
            _train, host_of=host_of, protection_of=protection_of, secure=secure
        )
        if secure:  # inside the protocol a refusal withholds the update, outside it is the reply
            handler = secure_training(partial(_guarded, handler))
        return _guarded(handler, message, context)

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return _guarded(
            lambda message, context: _query(message, host_of(context)), message, context
        )

    return app


def _guarded(handler: ClientAppCallable, message: Message, context: Context) -> Message:
    """Replies with a refusal to whatever raises; only this node's log says what it was."""
    try:
        return handler(message, context)
    except Refused as refused:
        reason = refused.reason
        log.error("%s", refused)
    except Exception as fault:
        expected = (reason for kind, reason in REASONS if isinstance(fault, kind))
        reason = next(expected, Refusal.FAILED)
        log.error("%s", fault, exc_info=reason is Refusal.FAILED)
    return Message(messages.encode_fault(reason), reply_to=message)


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
        raise Refused(Refusal.SECURE_ONLY)

    def train(message: Message, context: Context) -> Message:
        update = _update(message.content, host_of(context), setup)
        return Message(messages.encode_update(update), reply_to=message)

    return private_training(settings, train)(message, context)


def _update(content: RecordDict, host: NodeHost, setup: Setup) -> ClientUpdate:
    stage = messages.decode_stage(content)
    like = host.layout(setup, stage)
    corrected = host.layout(setup, "correction") if stage == "rounds" else like
    task = messages.decode_task(content, corrected)
    parameters = messages.decode_parameters(content, like)
    return host.train(setup, stage, task, parameters)


def _query(message: Message, host: NodeHost) -> Message:
    content = message.content
    ask = messages.decode_text(content, "ask")
    if ask == "introduce":
        return Message(messages.encode_introduction(host.introduction()), reply_to=message)
    setup = _setup(content)
    if setup is None:
        return _unprepared(message)
    client = messages.decode_number(content, "client", most=messages.MOST_CLIENTS)
    if ask == "ready":
        reply = messages.query(ask)
    elif ask == "statistics":
        reply = messages.query(ask, arrays=host.statistics(setup, client).sent())
    elif ask == "sensitivity":
        like = host.layout(setup, "calibration")
        parameters = messages.decode_parameters(content, like)
        number = messages.decode_number(content, "number", most=messages.MOST_ROUNDS)
        scores = host.sensitivity(setup, client, number, parameters)
        reply = messages.query(ask, arrays=scores.sums, count=scores.count)
    elif ask == "ranking":
        orders = host.ranking(setup, client).orders
        numbered = {str(number): order for number, order in enumerate(orders.values())}
        reply = messages.query(ask, arrays=numbered)
    else:
        raise InvalidMessage("it is not a known query")
    return Message(reply, reply_to=message)


def _setup(content: RecordDict) -> Setup | None:
    """The setup that a message names: attached to it, or stored on disk; None if neither."""
    digest = messages.decode_digest(content)
    path = files.cache_dir() / "flower" / f"{digest}.safetensors"
    if setup := messages.pop_setup(content):
        with files.replacing(path) as temporary:
            temporary.touch(mode=0o600)
            temporary.write_bytes(setup.content)
        _prune(path.parent)
        return setup
    try:
        return _stored(path)
    except (FileNotFoundError, InvalidMessage):  # the server sends a damaged one again
        return None


def _prune(folder: Path) -> None:
    """Removes all setups but those used last: a server that needs one again sends it again."""
    used: list[tuple[float, int, Path]] = []
    for path in folder.glob("*.safetensors"):
        with suppress(FileNotFoundError):  # another process removed it
            status = path.stat()
            used.append((status.st_mtime, status.st_size, path))
    total = 0
    for number, (_, size, path) in enumerate(sorted(used, reverse=True)):
        total += size
        if number and (number >= SETUPS_KEPT or total > BYTES_KEPT):
            path.unlink(missing_ok=True)


@lru_cache(maxsize=4)
def _stored(path: Path) -> Setup:
    """Cached, because a file named by its content's hash does not change."""
    if files.sha256(path) != path.stem:
        raise InvalidMessage(f"{path} is damaged")
    os.utime(path)  # it is in use
    return Setup.of(path.read_bytes())


def _unprepared(message: Message) -> Message:
    return Message(RecordDict({UNPREPARED: ConfigRecord({"is": True})}), reply_to=message)
