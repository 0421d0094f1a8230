"""Tasks, queries and replies as Flower messages; tensors travel as one vector, bit for bit.

Both sides know names and shapes, so neither is sent; of a masked parameter only the trained entries
are. One message is one client's task, so that Flower's own mods apply to it.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, cast

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedlens.federated.flower.setup import Setup
from fedlens.federated.tasks import ClientTask, ClientUpdate, Stage
from fedlens.params import Params
from fedlens.training.step import Tally

ARRAYS, CONFIG, METRICS, CORRECTION, SETUP = "arrays", "config", "metrics", "correction", "setup"
VALUES, FAULT, STATISTICS = "values", "fault", "statistics"
UNPREPARED = "unprepared"  # the reply of a node that does not have the setup


class InvalidMessage(ValueError):
    """A message that cannot be decoded; the text says why."""


def encode_tensors(tensors: Params) -> ArrayRecord:
    flat = [value.detach().reshape(-1).cpu() for value in tensors.values()]
    return ArrayRecord({VALUES: Array(torch.cat(flat).numpy())})


def decode_tensors(record: ArrayRecord, like: Params) -> dict[str, torch.Tensor]:
    """The inverse of `encode_tensors`: new tensors with the names and shapes of `like`."""
    try:
        flat = torch.from_numpy(record[VALUES].numpy())
    except Exception as error:  # damaged bytes raise many types: EOFError, BadZipFile, …
        raise InvalidMessage(f"its values cannot be read ({error})") from error
    sizes = [value.numel() for value in like.values()]
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
    return cast(Stage, content.config_records[CONFIG]["stage"])


def decode_task(content: RecordDict, like: Params) -> ClientTask:
    """The task of a training message; `examples` is 0, since only the node's host knows it."""
    config = cast(dict[str, Any], content.config_records[CONFIG])
    correction = None
    if CORRECTION in content:
        correction = decode_tensors(content.array_records[CORRECTION], like)
    return ClientTask(
        round=config["round"],
        client=config["client"],
        steps=config["steps"],
        lr=config["lr"],
        examples=0,
        correction=correction,
    )


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
        metrics = cast(dict[str, Any], content.metric_records[METRICS])
        tally = Tally(**{field.name: metrics[field.name] for field in fields(Tally)})
        if not all(math.isfinite(number) for number in vars(tally).values()):
            raise InvalidMessage("its metrics are not finite")
        if tally.seen <= 0 and not fault:
            raise InvalidMessage("it saw no example")
        parameters = decode_tensors(content.array_records[ARRAYS], like)
        statistics = {} if fault else _decode_statistics(content, task.statistics)
        tally_sent = tally if losses else None
        return ClientUpdate(task, parameters, tally_sent, fault, statistics=statistics)
    except (InvalidMessage, KeyError, TypeError) as error:
        return failed_update(task, f"its reply is invalid: {error}")


def _decode_statistics(content: RecordDict, layout: Params) -> dict[str, torch.Tensor]:
    """What the task asked for besides the parameters; anything that it did not is not read."""
    if not layout:
        return {}
    if STATISTICS not in content:
        raise InvalidMessage("it has no statistics")
    try:
        return decode_tensors(content.array_records[STATISTICS], layout)
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
        introduction = json.loads(str(content.config_records[CONFIG]["introduction"]))
        clients = tuple(int(client) for client in introduction["clients"])
        return clients, introduction["identity"]
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidMessage("its introduction cannot be read") from error


def encode_fault(fault: str) -> RecordDict:
    """A reply that only says why there is no result."""
    return RecordDict({CONFIG: ConfigRecord({FAULT: fault})})


def decode_fault(content: RecordDict) -> str | None:
    config = content.config_records.get(CONFIG)
    return str(config[FAULT]) if config is not None and FAULT in config else None


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
    data = content.array_records[SETUP][VALUES].numpy().tobytes()
    del content[SETUP]
    if hashlib.sha256(data).hexdigest() != content.config_records[CONFIG][SETUP]:
        raise InvalidMessage("the attached setup does not have the digest that the message names")
    return Setup.of(data)
