"""Tasks, queries and replies as Flower messages; tensors travel as one vector, bit for bit.

Both sides know names and shapes, so neither is sent; of a masked parameter only the trained entries
are. One message is one client's task, so that Flower's own mods apply to it.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, cast, get_args

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedlens.federated.flower import plain
from fedlens.federated.flower.plain import one_line
from fedlens.federated.flower.setup import Setup
from fedlens.federated.tasks import ClientTask, ClientUpdate, Stage
from fedlens.params import Params
from fedlens.training.step import Tally

ARRAYS, CONFIG, METRICS, CORRECTION, SETUP = "arrays", "config", "metrics", "correction", "setup"
VALUES, FAULT, STATISTICS = "values", "fault", "statistics"
UNPREPARED = "unprepared"  # the reply of a node that does not have the setup

# Limits of what the other side sends.
LARGEST = 2**53  # of integers: a float holds them exactly
LARGEST_VALUE = 1e100  # of a loss or a statistic: far above any float32, and sums stay finite
MOST_CLIENTS, MOST_ROUNDS, MOST_STEPS = 2**31, 2**31, 10**7
INTRODUCTION_CHARACTERS = 2**24  # a million clients
HEADER_BYTES = 4096  # of an array, besides its values
MOST_SETUP_BYTES = 2**29  # a head of a hundred million weights, and masks of as many


class InvalidMessage(ValueError):
    """A message that cannot be decoded; the text says why."""


def encode_tensors(tensors: Params) -> ArrayRecord:
    flat = [value.detach().reshape(-1).cpu() for value in tensors.values()]
    return ArrayRecord({VALUES: Array(torch.cat(flat).numpy())})


def decode_tensors(record: ArrayRecord, like: Params) -> dict[str, torch.Tensor]:
    """The inverse of `encode_tensors`: new tensors with the names and shapes of `like`."""
    sizes = [value.numel() for value in like.values()]
    largest = HEADER_BYTES + 16 * sum(sizes)  # of the widest type
    try:
        if len(record[VALUES].data) > largest:
            raise ValueError(f"they have more than {largest} bytes")
        flat = torch.from_numpy(record[VALUES].numpy())
    except Exception as error:  # damaged bytes raise many types: EOFError, BadZipFile, …
        raise InvalidMessage(f"its values cannot be read ({one_line(error)})") from error
    dtypes = {value.dtype for value in like.values()}
    if flat.shape != (sum(sizes),):
        raise InvalidMessage(
            f"it has values of shape {tuple(flat.shape)} instead of ({sum(sizes)},)"
        )
    if {flat.dtype} != dtypes:
        raise InvalidMessage(f"its values are {flat.dtype}, not {' or '.join(map(str, dtypes))}")
    parts = zip(like.items(), torch.split(flat, sizes), strict=True)
    return {name: _to_device_of(value, part.view(value.shape)) for (name, value), part in parts}


def _to_device_of(like: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return value if like.is_meta else value.to(like.device)


def encode_task(
    task: ClientTask, stage: Stage, parameters: ArrayRecord, extra: Mapping[str, Any]
) -> RecordDict:
    """A training message; all messages of a round share the record `parameters`."""
    fields_sent = {
        "stage": stage,
        "round": task.round,
        "client": task.client,
        "steps": task.steps,
        "lr": task.lr,
    }
    content = RecordDict({ARRAYS: parameters, CONFIG: ConfigRecord({**fields_sent, **extra})})
    if task.correction:
        content[CORRECTION] = encode_tensors(task.correction)
    return content


def decode_stage(content: RecordDict) -> Stage:
    stage = decode_text(content, "stage")
    if stage not in get_args(Stage):
        raise InvalidMessage("its stage is not a known one")
    return cast(Stage, stage)


def decode_task(content: RecordDict, like: Params) -> ClientTask:
    """The task of a training message; `examples` is 0, since only the node's host knows it."""
    correction = None
    if CORRECTION in content:
        correction = decode_tensors(_arrays(content, CORRECTION), like)
    lr = _field(content, "lr")
    if type(lr) not in (int, float) or not 0 <= cast(float, lr) <= LARGEST_VALUE:
        raise InvalidMessage("its lr is not a finite number from 0 on")
    return ClientTask(
        round=decode_number(content, "round", most=MOST_ROUNDS),
        client=decode_number(content, "client", most=MOST_CLIENTS),
        steps=decode_number(content, "steps", least=1, most=MOST_STEPS),
        lr=cast(float, lr),
        examples=0,
        correction=correction,
    )


def decode_parameters(content: RecordDict, like: Params) -> dict[str, torch.Tensor]:
    """The tensors of a message or a reply."""
    return decode_tensors(_arrays(content, ARRAYS), like)


def decode_number(content: RecordDict, name: str, *, least: int = 0, most: int = LARGEST) -> int:
    """An integer from `least` to `most` of a message's config."""
    value = _field(content, name)
    if type(value) is not int or not least <= value <= most:
        raise InvalidMessage(f"its {name} is not an integer from {least} to {most}")
    return value


def decode_text(content: RecordDict, name: str) -> str:
    """A string of a message's config."""
    value = _field(content, name)
    if not isinstance(value, str):
        raise InvalidMessage(f"its {name} is not a text")
    return value


def decode_digest(content: RecordDict) -> str:
    """The SHA-256 that names a setup; as it also names a file, nothing else is let through."""
    digest = decode_text(content, SETUP)
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise InvalidMessage("it does not name a setup by its digest")
    return digest


def _field(content: RecordDict, name: str) -> object:
    config = content.config_records.get(CONFIG)
    if config is None or name not in config:
        raise InvalidMessage(f"it has no {name}")
    return config[name]


def _arrays(content: RecordDict, name: str) -> ArrayRecord:
    record = content.array_records.get(name)
    if record is None:
        raise InvalidMessage(f"it has no {name}")
    return record


def encode_update(update: ClientUpdate) -> RecordDict:
    assert update.tally is not None, "differential privacy removes losses after encoding"
    metrics = {**asdict(update.tally), "num-examples": update.task.examples}
    content = RecordDict(
        {ARRAYS: encode_tensors(update.parameters), METRICS: MetricRecord(metrics)}
    )
    if update.statistics:
        content[STATISTICS] = encode_tensors(update.statistics)
    if update.fault:
        content[CONFIG] = ConfigRecord({FAULT: update.fault})
    return content


def decode_update(
    task: ClientTask, content: RecordDict, like: Params, *, losses: bool = True
) -> ClientUpdate:
    """The update in a reply; anything wrong with it becomes the update's fault.

    `losses=False`: clients do not reveal their losses, so the update has no tally.
    """
    try:
        fault = decode_fault(content)
        if METRICS not in content:
            return failed_update(task, fault or "its reply is empty")
        tally = checked_tally(content.metric_records.get(METRICS), diverged=fault is not None)
        parameters = decode_parameters(content, like)
        statistics = {} if fault else _decode_statistics(content, task.statistics)
        tally_sent = tally if losses else None
        return ClientUpdate(task, parameters, tally_sent, fault, statistics=statistics)
    except InvalidMessage as error:
        return failed_update(task, f"its reply is invalid: {error}")


def checked_tally(metrics: Mapping[str, object] | None, *, diverged: bool = False) -> Tally:
    """The tally that a client reports: numbers that any cohort's can be added to, and divided by.

    A client that diverged may have seen no example.
    """
    if metrics is None:
        raise InvalidMessage("it has no metrics")
    loss, correct, seen = (metrics.get(name) for name in ("loss", "correct", "seen"))
    if any(isinstance(one, float) and not math.isfinite(one) for one in (loss, correct, seen)):
        raise InvalidMessage("its metrics are not finite")
    if type(loss) not in (int, float) or abs(loss) > LARGEST_VALUE:  # type: ignore[arg-type]
        raise InvalidMessage(f"its loss is not a number of at most {LARGEST_VALUE:g}")
    if type(correct) is not int or type(seen) is not int:
        raise InvalidMessage("its numbers of examples are not integers")
    if not (0 if diverged else 1) <= seen <= LARGEST:
        raise InvalidMessage("it saw no example" if seen <= 0 else "it saw too many examples")
    if not 0 <= correct <= seen:
        raise InvalidMessage("it has more correct answers than examples, or fewer than none")
    return Tally(cast(float, loss), correct, seen)


def _decode_statistics(content: RecordDict, layout: Params) -> dict[str, torch.Tensor]:
    """What the task asked for besides the parameters; anything that it did not is not read."""
    if not layout:
        return {}
    if STATISTICS not in content:
        raise InvalidMessage("it has no statistics")
    try:
        return decode_tensors(_arrays(content, STATISTICS), layout)
    except InvalidMessage as fault:
        raise InvalidMessage(f"in its statistics, {fault}") from fault


def failed_update(task: ClientTask, fault: str) -> ClientUpdate:
    """Stands for the update of a client that sent none."""
    return ClientUpdate(task, {}, Tally(), fault)


def encode_introduction(introduction: Mapping[str, Any]) -> RecordDict:
    return RecordDict({CONFIG: ConfigRecord({"introduction": json.dumps(introduction)})})


def decode_introduction(content: RecordDict) -> tuple[tuple[int, ...], Any]:
    """The clients a node hosts, and the identity of its dataset and partition."""
    if fault := decode_fault(content):
        raise InvalidMessage(fault)
    try:
        text = decode_text(content, "introduction")
        introduction = plain.parsed(text, limit=INTRODUCTION_CHARACTERS)
        clients = introduction["clients"]
        if type(clients) is not list or not all(_is_client(client) for client in clients):
            raise InvalidMessage("its clients are not numbers")
        return tuple(dict.fromkeys(clients)), introduction["identity"]
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidMessage("its introduction cannot be read") from error


def _is_client(value: object) -> bool:
    return type(value) is int and 0 <= value < MOST_CLIENTS


def encode_fault(fault: str) -> RecordDict:
    """A reply that only says why there is no result; a node says one of `Refusal`."""
    return RecordDict({CONFIG: ConfigRecord({FAULT: str(fault)})})


def decode_fault(content: RecordDict) -> str | None:
    """What a node says is wrong, as one line that is safe to show."""
    config = content.config_records.get(CONFIG)
    if config is None or FAULT not in config:
        return None
    return one_line(config[FAULT]) or "its node gives no reason"


def query(ask: str, *, arrays: Params | None = None, **values: str | float) -> RecordDict:
    """A query of the kind `ask`, or the reply to one."""
    content = RecordDict({CONFIG: ConfigRecord({"ask": ask, **values})})
    if arrays is not None:
        content[ARRAYS] = encode_tensors(arrays)
    return content


def with_setup(content: RecordDict, setup: Setup) -> RecordDict:
    """The same message with the whole setup attached."""
    values = Array(np.frombuffer(setup.content, dtype=np.uint8))
    return RecordDict({**content, SETUP: ArrayRecord({VALUES: values})})


def pop_setup(content: RecordDict) -> Setup | None:
    """Removes the attached setup from a message and returns it; None if there is none."""
    if SETUP not in content:
        return None
    record, digest = _arrays(content, SETUP), decode_digest(content)
    del content[SETUP]
    try:
        if len(record[VALUES].data) > MOST_SETUP_BYTES + HEADER_BYTES:
            raise ValueError(f"it has more than {MOST_SETUP_BYTES} bytes")
        data = record[VALUES].numpy().tobytes()
    except Exception as error:  # as in `decode_tensors`
        raise InvalidMessage(f"the attached setup cannot be read ({one_line(error)})") from error
    if hashlib.sha256(data).hexdigest() != digest:
        raise InvalidMessage("the attached setup does not have the digest that the message names")
    try:
        return Setup.of(data)
    except Exception as error:  # whatever the bytes of somebody else raise
        raise InvalidMessage(f"the attached setup cannot be read ({one_line(error)})") from error
