"""Tasks, questions and answers as Flower messages; tensors travel as one vector, bit for bit.

Both sides know names and shapes, so none is sent; of a masked parameter only its trained values
are. One message is one client's work, so that Flower's own mods apply to it.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedlens.federated.client import Task, Update
from fedlens.federated.tasks import Setup, Work
from fedlens.params import Params
from fedlens.training.step import Tally

ARRAYS, CONFIG, METRICS, CORRECTION, SETUP = "arrays", "config", "metrics", "correction", "setup"
VALUES, FAULT = "values", "fault"
UNPREPARED = "unprepared"  # the answer of a host that does not have the setup


class Garbled(ValueError):
    """A message that does not say what it should, in words."""


def vector(tensors: Params) -> ArrayRecord:
    flat = [value.detach().reshape(-1).cpu() for value in tensors.values()]
    return ArrayRecord({VALUES: Array(torch.cat(flat).numpy())})


def tensors(record: ArrayRecord, like: Params) -> dict[str, torch.Tensor]:
    """The inverse of `vector`, for tensors of the layout of `like`; they are its own."""
    try:
        flat = torch.from_numpy(record[VALUES].numpy())
    except Exception as error:  # numpy names no type for damaged bytes: EOFError, BadZipFile, …
        raise Garbled(f"its values cannot be read ({error})") from error
    sizes = [value.numel() for value in like.values()]
    kinds = {value.dtype for value in like.values()}
    if flat.shape != (sum(sizes),):
        raise Garbled(f"it has values of shape {tuple(flat.shape)} instead of ({sum(sizes)},)")
    if {flat.dtype} != kinds:
        raise Garbled(f"its values are {flat.dtype}, not {' or '.join(map(str, kinds))}")
    parts = zip(like.items(), torch.split(flat, sizes), strict=True)
    return {name: _placed(part.view(value.shape), value) for (name, value), part in parts}


def _placed(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return value if like.is_meta else value.to(like.device)


def work(task: Task, stage: str, parameters: ArrayRecord, extra: Mapping[str, Any]) -> RecordDict:
    """What a client is told; `parameters` are shared by the messages of a round."""
    told = asdict(Work(stage, task.round, task.client, task.steps, task.lr))
    content = RecordDict({ARRAYS: parameters, CONFIG: ConfigRecord({**told, **extra})})
    if task.correction:
        content[CORRECTION] = vector(task.correction)
    return content


def work_of(content: RecordDict) -> Work:
    told = content.config_records[CONFIG]
    return Work(**{field.name: told[field.name] for field in fields(Work)})  # type: ignore[arg-type]


def answer(update: Update) -> RecordDict:
    metrics = {**asdict(update.tally), "num-examples": len(update.task.shard)}
    content = RecordDict({ARRAYS: vector(update.parameters), METRICS: MetricRecord(metrics)})
    if update.fault:
        content[CONFIG] = ConfigRecord({FAULT: update.fault})
    return content


def update_of(task: Task, content: RecordDict, like: Params) -> Update:
    """What came back; whatever is wrong with it becomes the update's fault."""
    try:
        fault = refused(content)
        if METRICS not in content:
            return lost(task, fault or "its answer says nothing")
        metrics = content.metric_records[METRICS]
        tally = Tally(**{field.name: metrics[field.name] for field in fields(Tally)})  # type: ignore[arg-type]
        if not all(math.isfinite(number) for number in vars(tally).values()):
            raise Garbled("its metrics are not finite")
        if tally.seen <= 0 and not fault:
            raise Garbled("it saw no example")
        return Update(task, tensors(content.array_records[ARRAYS], like), tally, fault)
    except (Garbled, KeyError, TypeError) as error:
        return lost(task, f"its answer is not one: {error}")


def introduction(told: Mapping[str, Any]) -> RecordDict:
    return RecordDict({CONFIG: ConfigRecord({"introduction": json.dumps(told)})})


def introduction_of(content: RecordDict) -> tuple[tuple[int, ...], Any]:
    """The clients a node hosts, and what its data are of."""
    if why := refused(content):
        raise Garbled(why)
    try:
        told = json.loads(str(content.config_records[CONFIG]["introduction"]))
        return tuple(int(client) for client in told["clients"]), told["identity"]
    except (KeyError, TypeError, ValueError) as error:
        raise Garbled("what it said is no introduction") from error


def refusal(why: str) -> RecordDict:
    """Instead of an answer, why there is none."""
    return RecordDict({CONFIG: ConfigRecord({FAULT: why})})


def refused(content: RecordDict) -> str | None:
    told = content.config_records.get(CONFIG)
    return str(told[FAULT]) if told is not None and FAULT in told else None


def lost(task: Task, why: str) -> Update:
    """The update of a client that gave none."""
    return Update(task, {}, Tally(), why)


def question(ask: str, *, arrays: Params | None = None, **told: str | float) -> RecordDict:
    content = RecordDict({CONFIG: ConfigRecord({"ask": ask, **told})})
    if arrays is not None:
        content[ARRAYS] = vector(arrays)
    return content


def attached(content: RecordDict, setup: Setup) -> RecordDict:
    """The same message with the setup it is meant under."""
    whole = Array(np.frombuffer(setup.content, dtype=np.uint8))
    return RecordDict({**content, SETUP: ArrayRecord({VALUES: whole})})


def detached(content: RecordDict) -> Setup | None:
    """Takes the setup out of a message that has one."""
    if SETUP not in content:
        return None
    found = content.array_records[SETUP][VALUES].numpy().tobytes()
    del content[SETUP]
    if hashlib.sha256(found).hexdigest() != content.config_records[CONFIG][SETUP]:
        raise Garbled("the setup is not the one the message speaks of")
    return Setup.of(found)
