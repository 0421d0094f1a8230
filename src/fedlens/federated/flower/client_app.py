"""The ClientApp: it reads a message, lets the host do the work, and writes the answer.

What a host was set up with stays on its disk, so that a new process, or another on the same
machine, need not be told again.
"""

import logging
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS as SEALED

from fedlens import files
from fedlens.errors import FedlensError
from fedlens.federated.client import Update
from fedlens.federated.flower import messages
from fedlens.federated.flower.differential_privacy import PrivacySettings, wrapped
from fedlens.federated.flower.messages import ARRAYS, CONFIG, CORRECTION, UNPREPARED, Garbled
from fedlens.federated.flower.secure_aggregation import secure
from fedlens.federated.tasks import Host, Setup

Protection = tuple[PrivacySettings, bool]  # and whether updates leave in secure sums only

log = logging.getLogger(__name__)


def client_app(
    host_of: Callable[[Context], Host], protection_of: Callable[[Setup], Protection]
) -> ClientApp:
    """`host_of` gives the same host to every message of a node."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        sealed = SEALED in message.content
        work = partial(_train, host_of=host_of, protection_of=protection_of, sealed=sealed)
        guarded = partial(_guarded, work)
        return (secure(guarded) if sealed else guarded)(message, context)

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return _guarded(
            lambda message, context: _query(message, host_of(context)), message, context
        )

    return app


def _guarded(work: ClientAppCallable, message: Message, context: Context) -> Message:
    """What a user can mend is told in one sentence; the rest goes to Flower's log."""
    try:
        return work(message, context)
    except (FedlensError, Garbled) as fault:
        log.error("%s", fault)
        return Message(messages.refusal(str(fault)), reply_to=message)


def _train(
    message: Message,
    context: Context,
    *,
    host_of: Callable[[Context], Host],
    protection_of: Callable[[Setup], Protection],
    sealed: bool,
) -> Message:
    setup = _setup(message.content)
    if setup is None:
        return _unprepared(message)
    settings, only_sealed = protection_of(setup)
    if only_sealed and not sealed:
        raise FedlensError("This experiment's updates leave in secure sums only.")

    def trained(asked: Message, context: Context) -> Message:
        update = _update(asked.content, host_of(context), setup)
        return Message(messages.answer(update), reply_to=asked)

    return wrapped(settings, trained)(message, context)


def _update(content: RecordDict, host: Host, setup: Setup) -> Update:
    work = messages.work_of(content)
    like = host.layout(setup, work.stage)
    correction = None
    if CORRECTION in content:
        correction = messages.tensors(content.array_records[CORRECTION], like)
    parameters = messages.tensors(content.array_records[ARRAYS], like)
    return host.train(setup, work, parameters, correction)


def _query(message: Message, host: Host) -> Message:
    told = message.content.config_records[CONFIG]
    ask = str(told["ask"])
    if ask == "introduce":
        return Message(messages.introduction(host.introduction()), reply_to=message)
    setup = _setup(message.content)
    if setup is None:
        return _unprepared(message)
    client = int(told["client"])  # type: ignore[arg-type]
    if ask == "ready":
        found = messages.question(ask)
    elif ask == "statistics":
        found = messages.question(ask, arrays=vars(host.statistics(setup, client)))
    elif ask == "sensitivity":
        like = host.layout(setup, "calibration")
        parameters = messages.tensors(message.content.array_records[ARRAYS], like)
        part = host.sensitivity(setup, client, int(told["number"]), parameters)  # type: ignore[arg-type]
        found = messages.question(ask, arrays=part.sums, count=part.count)
    elif ask == "ballot":
        orders = host.ballot(setup, client).orders
        named = {str(number): order for number, order in enumerate(orders.values())}
        found = messages.question(ask, arrays=named)
    else:
        raise Garbled(f"nobody can answer '{ask}'")
    return Message(found, reply_to=message)


def _setup(content: RecordDict) -> Setup | None:
    """From the message, or from the disk; None if it is in neither."""
    name = str(content.config_records[CONFIG][messages.SETUP])
    path = files.cache_dir() / "flower" / f"{name}.safetensors"
    if setup := messages.detached(content):
        with files.replacing(path) as temporary:
            temporary.write_bytes(setup.content)
        return setup
    try:
        return _stored(path)
    except (FileNotFoundError, Garbled):  # a damaged one is sent again
        return None


@lru_cache(maxsize=4)
def _stored(path: Path) -> Setup:
    """A setup is named by its content, so what was read once stays true."""
    if files.sha256(path) != path.stem:
        raise Garbled(f"{path} is damaged")
    return Setup.of(path.read_bytes())


def _unprepared(message: Message) -> Message:
    return Message(RecordDict({UNPREPARED: ConfigRecord({"is": True})}), reply_to=message)
