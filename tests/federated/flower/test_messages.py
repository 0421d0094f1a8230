"""Messages decode to what was encoded, bit for bit; damaged messages give a clear error."""

import io
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedlens[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedlens.federated.flower import messages, plain
from fedlens.federated.flower.messages import (
    ARRAYS,
    CONFIG,
    METRICS,
    SETUP,
    VALUES,
    InvalidMessage,
)
from fedlens.federated.flower.setup import Setup
from fedlens.federated.tasks import ClientTask, ClientUpdate
from fedlens.params import Params
from fedlens.training.step import Tally

TASK = ClientTask(round=3, client=7, steps=4, lr=0.1, examples=11)
START = {"weight": torch.arange(6.0).view(2, 3), "bias": torch.tensor(0.5)}
UPDATE = ClientUpdate(TASK, {name: value + 1 for name, value in START.items()}, Tally(1.5, 2, 8))


def npy(values: object) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.asarray(values))
    return stream.getvalue()


def header(size: int) -> bytes:
    """The header of an array without its values."""
    stream = io.BytesIO()
    fields = {"descr": "<f4", "fortran_order": False, "shape": (size,)}
    np.lib.format.write_array_header_1_0(stream, fields)
    return stream.getvalue()


def archive() -> bytes:
    stream = io.BytesIO()
    np.savez(stream, values=np.zeros(7, dtype=np.float32))
    return stream.getvalue()


def record(data: bytes, stype: str = "numpy.ndarray") -> ArrayRecord:
    return ArrayRecord({VALUES: Array("float32", (7,), stype, data)})


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Tensors of one type with arbitrary bytes: infinities, NaNs with payloads, minus zero."""
    kind = draw(st.sampled_from([np.float32, np.float64, np.int32]))
    shapes = draw(st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=4))
    tensors = {}
    for number, shape in enumerate(shapes):
        size = math.prod(shape) * np.dtype(kind).itemsize
        data = bytearray(draw(st.binary(min_size=size, max_size=size)))
        tensors[f"tensor {number}"] = torch.from_numpy(np.frombuffer(data, kind).reshape(shape))
    return tensors


@settings(max_examples=60)
@given(layouts())
def test_tensors_round_trip_bit_for_bit(tensors: dict[str, torch.Tensor]) -> None:
    like = {name: value.to("meta") for name, value in tensors.items()}
    decoded = messages.decode_tensors(messages.encode_tensors(tensors), like)
    assert list(decoded) == list(tensors)
    for name, value in tensors.items():
        assert decoded[name].dtype == value.dtype
        assert decoded[name].shape == value.shape
        assert bits(decoded[name]) == bits(value)


STATISTICS = {"weight": torch.arange(9.0).view(3, 3), "bias": torch.ones(2)}
ASKED = replace(TASK, statistics={name: value.to("meta") for name, value in STATISTICS.items()})


def test_statistics_travel_beside_the_update_bit_for_bit() -> None:
    sent = messages.encode_update(replace(UPDATE, statistics=STATISTICS))
    found = messages.decode_update(ASKED, sent, START)
    assert found.fault is None
    assert list(found.statistics) == list(STATISTICS)
    for name, value in STATISTICS.items():
        assert bits(found.statistics[name]) == bits(value)
    assert not messages.decode_update(TASK, sent, START).statistics  # they were not asked for


@pytest.mark.parametrize(
    ("sent", "fault"),
    [
        ({}, "its reply is invalid: it has no statistics"),
        ({"weight": torch.ones(4)}, "in its statistics, it has values of shape (4,) instead of"),
        ({"weight": torch.ones(11).double()}, "in its statistics, its values are torch.float64"),
    ],
)
def test_statistics_of_another_layout_reject_the_client(sent: Params, fault: str) -> None:
    content = messages.encode_update(replace(UPDATE, statistics=sent))
    found = messages.decode_update(ASKED, content, START)
    assert fault in str(found.fault)
    assert not found.parameters


def test_memory_layout_does_not_matter() -> None:
    value = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    image = torch.arange(16.0).view(1, 2, 2, 4).to(memory_format=torch.channels_last)
    tensors: Params = {"transposed": value.t(), "channels last": image}
    decoded = messages.decode_tensors(messages.encode_tensors(tensors), tensors)
    assert all(torch.equal(decoded[name], one) for name, one in tensors.items())


def test_decoded_tensors_do_not_share_memory_with_the_message() -> None:
    record = messages.encode_tensors(START)
    messages.decode_tensors(record, START)["weight"].zero_()
    assert torch.equal(messages.decode_tensors(record, START)["weight"], START["weight"])


def test_tensors_are_sent_as_one_vector_without_names() -> None:
    assert list(messages.encode_tensors(START)) == [VALUES]
    assert messages.encode_tensors(START)[VALUES].shape == (7,)


DAMAGED = {
    "too short": (record(npy(np.zeros(6, dtype=np.float32))), r"shape \(6,\) instead of \(7,\)"),
    "too long": (record(npy(np.zeros(8, dtype=np.float32))), r"shape \(8,\) instead of \(7,\)"),
    "a matrix": (record(npy(np.zeros((1, 7), dtype=np.float32))), r"shape \(1, 7\)"),
    "doubles": (record(npy(np.zeros(7))), "torch.float64, not torch.float32"),
    "integers": (record(npy(np.zeros(7, dtype=np.int32))), "torch.int32, not torch.float32"),
    "words": (record(npy(["a"] * 7)), "cannot be read"),
    "the other byte order": (record(npy(np.zeros(7, dtype=">f4"))), "cannot be read"),
    "objects": (record(b"\x80\x04N."), "cannot be read"),
    "nothing": (record(b""), "cannot be read"),
    "half of it": (record(npy(np.zeros(7, dtype=np.float32))[:-5]), "cannot be read"),
    "a broken header": (record(b"\x93NUMPY\x01\x00\x06\x00{'a':\n"), "cannot be read"),
    "an archive": (record(archive()), "cannot be read"),
    "half an archive": (record(archive()[:40]), "cannot be read"),
    "another type of bytes": (record(b"abc", "torch.tensor"), "cannot be read"),
    "more than any memory holds": (record(header(2**45)), "cannot be read"),
    "no values": (ArrayRecord({"other": Array(np.zeros(7, dtype=np.float32))}), "cannot be read"),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_damaged_values_give_an_update_with_a_fault(how: str) -> None:
    arrays, reason = DAMAGED[how]
    with pytest.raises(InvalidMessage, match=reason):
        messages.decode_tensors(arrays, START)
    content = messages.encode_update(UPDATE)
    content[ARRAYS] = arrays
    update = messages.decode_update(TASK, content, START)
    assert update.parameters == {}
    assert update.fault is not None
    assert update.fault.startswith("its reply is invalid: ")


def test_a_task_round_trips_without_the_number_of_examples() -> None:
    task = replace(TASK, lr=0.1 + 0.2)
    parameters = messages.encode_tensors(START)
    content = messages.encode_task(task, "rounds", parameters, {"clipping_norm": 1.0})
    assert messages.decode_stage(content) == "rounds"
    assert messages.decode_task(content, START) == replace(task, examples=0)
    assert list(content.config_records[CONFIG].items()) == [
        *(("stage", "rounds"), ("round", 3), ("client", 7), ("steps", 4), ("lr", 0.1 + 0.2)),
        ("clipping_norm", 1.0),
    ]
    assert messages.CORRECTION not in content


def test_a_correction_is_sent_with_the_parameters() -> None:
    correction = {name: -value / 3 for name, value in START.items()}
    task = replace(TASK, correction=correction)
    content = messages.encode_task(task, "rounds", messages.encode_tensors(START), {})
    decoded = messages.decode_task(content, START).correction
    assert decoded is not None
    assert all(torch.equal(decoded[name], value) for name, value in correction.items())
    parameters = messages.decode_tensors(content.array_records[ARRAYS], START)
    assert all(torch.equal(parameters[name], value) for name, value in START.items())


@given(st.floats(-1e100, 1e100), st.integers(0, 8), st.integers(1, 2**53))
@settings(max_examples=30)
def test_an_update_round_trips_bit_for_bit(loss: float, correct: int, seen: int) -> None:
    sent = replace(UPDATE, tally=Tally(loss, min(correct, seen), seen))
    decoded = messages.decode_update(TASK, messages.encode_update(sent), START)
    assert decoded.task is TASK
    assert decoded.tally == sent.tally
    assert decoded.fault is None
    assert decoded.individual
    assert all(bits(decoded.parameters[n]) == bits(v) for n, v in UPDATE.parameters.items())


def test_an_update_without_losses_has_no_tally() -> None:
    decoded = messages.decode_update(TASK, messages.encode_update(UPDATE), START, losses=False)
    assert decoded.tally is None
    assert decoded.parameters


def test_an_update_contains_the_number_of_examples() -> None:
    assert messages.encode_update(UPDATE).metric_records[METRICS]["num-examples"] == 11


def test_a_fault_of_training_is_sent() -> None:
    diverged = replace(UPDATE, tally=Tally(), fault="The loss became nan at step 1.")
    decoded = messages.decode_update(TASK, messages.encode_update(diverged), START)
    assert decoded.fault == diverged.fault


def test_a_reply_may_contain_only_a_fault() -> None:
    content = messages.encode_fault("This node does not host client 7.")
    update = messages.decode_update(TASK, content, START)
    assert (update.parameters, update.fault) == ({}, "This node does not host client 7.")
    assert messages.decode_fault(content) == update.fault
    assert messages.decode_fault(messages.encode_update(UPDATE)) is None


@given(st.text(max_size=2000))
@settings(max_examples=100)
def test_a_fault_is_shown_as_one_line_without_control_characters(text: str) -> None:
    fault = messages.decode_fault(messages.encode_fault(text))
    assert fault is not None
    assert 0 < len(fault) <= plain.SHOWN
    assert fault.isprintable()


Value = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.lists(st.floats(), max_size=3),
)
Hostile = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("loss", "correct", "seen", "num-examples", "other"), Value)
)


@pytest.mark.slow
@given(st.lists(Hostile, min_size=1, max_size=4))
@settings(max_examples=200)
def test_whatever_clients_report_the_sum_of_what_is_accepted_can_be_recorded(
    reports: list[dict[str, Any]],
) -> None:
    total, losses = Tally(), []
    for metrics in reports:
        content = messages.encode_update(UPDATE)
        content[METRICS] = MetricRecord(metrics)
        update = messages.decode_update(TASK, content, START)
        if update.fault is None:
            assert update.tally is not None
            total += update.tally
            losses.append(update.tally.loss / update.tally.seen)
    if total.seen:
        json.dumps([losses, total.metrics()], allow_nan=False)


Json = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
)


@pytest.mark.slow
@given(
    st.one_of(
        Json.map(json.dumps),
        st.fixed_dictionaries({"clients": Json, "identity": Json}).map(json.dumps),
        st.text(),
    )
)
@settings(max_examples=200)
def test_any_introduction_is_read_or_rejected(text: str) -> None:
    content = RecordDict({CONFIG: ConfigRecord({"introduction": text})})
    try:
        clients, _ = messages.decode_introduction(content)
    except InvalidMessage:
        return
    assert all(type(client) is int and client >= 0 for client in clients)
    assert len(set(clients)) == len(clients)


@pytest.mark.slow
@given(
    st.dictionaries(
        st.sampled_from(["stage", "round", "client", "steps", "lr", "other"]),
        st.one_of(Value, st.text(max_size=9), st.booleans(), st.binary(max_size=9)),
    )
)
@settings(max_examples=200)
def test_any_task_is_read_within_its_limits_or_rejected(config: dict[str, Any]) -> None:
    content = messages.encode_task(TASK, "rounds", messages.encode_tensors(START), config)
    try:
        stage, task = messages.decode_stage(content), messages.decode_task(content, START)
    except InvalidMessage:
        return
    assert stage in ("head", "rounds")
    assert type(task.round) is type(task.client) is type(task.steps) is int
    assert task.round >= 0
    assert task.client >= 0
    assert 1 <= task.steps <= messages.MOST_STEPS
    assert math.isfinite(task.lr)


INCOMPLETE = {
    "nothing at all": RecordDict(),
    "no metrics": RecordDict({ARRAYS: messages.encode_tensors(START)}),
    "no arrays": RecordDict({METRICS: messages.encode_update(UPDATE)[METRICS]}),
    "metrics that are a config": RecordDict(
        {ARRAYS: messages.encode_tensors(START), METRICS: ConfigRecord({"loss": 1.0})}
    ),
    "arrays that are metrics": RecordDict(
        {ARRAYS: MetricRecord({"loss": 1.0}), METRICS: messages.encode_update(UPDATE)[METRICS]}
    ),
}


@pytest.mark.parametrize("what", INCOMPLETE)
def test_an_incomplete_update_has_a_fault(what: str) -> None:
    update = messages.decode_update(TASK, INCOMPLETE[what], START)
    assert update.parameters == {}
    assert update.fault


INVALID_METRICS = {
    "no loss": {"correct": 1, "seen": 8},
    "a loss that is not a number": {"loss": math.nan, "correct": 1, "seen": 8},
    "an infinite loss": {"loss": math.inf, "correct": 1, "seen": 8},
    "many losses": {"loss": [1.0, 2.0], "correct": 1, "seen": 8},
    "no example": {"loss": 0.0, "correct": 0, "seen": 0},
    "a negative number of examples": {"loss": 0.0, "correct": 0, "seen": -8},
    "an infinite number of examples": {"loss": 1.0, "correct": 1, "seen": math.inf},
    "examples that are not a number": {"loss": 1.0, "correct": 1, "seen": math.nan},
    "less than an example": {"loss": 1e10, "correct": 0, "seen": 5e-324},
    "a loss whose sums overflow": {"loss": 1.7e308, "correct": 0, "seen": 8},
    "more examples than there are": {"loss": 1.0, "correct": 0, "seen": 2**60},
    "a negative number of correct ones": {"loss": 1.0, "correct": -1, "seen": 8},
    "more correct ones than examples": {"loss": 1.0, "correct": 9, "seen": 8},
    "half an example correct": {"loss": 1.0, "correct": 0.5, "seen": 8},
}


@pytest.mark.parametrize("losses", [True, False])
@pytest.mark.parametrize("what", INVALID_METRICS)
def test_invalid_metrics_are_a_fault(what: str, losses: bool) -> None:
    content = messages.encode_update(UPDATE)
    content[METRICS] = MetricRecord(INVALID_METRICS[what])  # type: ignore[arg-type]
    update = messages.decode_update(TASK, content, START, losses=losses)
    assert update.parameters == {}
    assert update.fault
    assert update.tally == Tally()


def test_an_introduction_round_trips() -> None:
    sent = {"clients": [3, 4], "identity": {"dataset": "abc", "partition": None}}
    content = messages.encode_introduction(sent)
    assert messages.decode_introduction(content) == ((3, 4), sent["identity"])


INVALID_INTRODUCTIONS = {
    "nothing": RecordDict(),
    "a fault": messages.encode_fault("The shard is damaged."),
    "no JSON": RecordDict({CONFIG: ConfigRecord({"introduction": "clients 1 to 3"})}),
    "a list": RecordDict({CONFIG: ConfigRecord({"introduction": "[1, 2, 3]"})}),
    "no clients": messages.encode_introduction({"identity": None}),
    "clients that are text": messages.encode_introduction({"clients": ["a"], "identity": None}),
    "clients that are a number": messages.encode_introduction({"clients": 3, "identity": None}),
    "an infinite client": messages.encode_introduction({"clients": [math.inf], "identity": None}),
    "a negative client": messages.encode_introduction({"clients": [-1], "identity": None}),
    "half a client": messages.encode_introduction({"clients": [0.5], "identity": None}),
    "a client that is true": messages.encode_introduction({"clients": [True], "identity": None}),
    "deep nesting": RecordDict({CONFIG: ConfigRecord({"introduction": "[" * 200_000})}),
    "bytes": RecordDict({CONFIG: ConfigRecord({"introduction": b"{}"})}),
}


@pytest.mark.parametrize("what", INVALID_INTRODUCTIONS)
def test_an_invalid_introduction_is_rejected(what: str) -> None:
    reason = "The shard is damaged." if what == "a fault" else "introduction cannot be read"
    with pytest.raises(InvalidMessage, match=reason):
        messages.decode_introduction(INVALID_INTRODUCTIONS[what])


SETUP_SENT = Setup("seed: 0\nname: größer\n", {"head/weight": torch.tensor([[1.5, -0.0]])})


def query() -> RecordDict:
    return messages.query("statistics", client=1, **{SETUP: SETUP_SENT.digest})


def test_pop_setup_removes_the_setup_from_its_message() -> None:
    content = messages.with_setup(query(), SETUP_SENT)
    setup = messages.pop_setup(content)
    assert setup is not None
    assert setup == SETUP_SENT
    assert setup.config == SETUP_SENT.config
    assert bits(setup.tensors["head/weight"]) == bits(SETUP_SENT.tensors["head/weight"])
    assert SETUP not in content
    assert messages.pop_setup(content) is None


def test_attaching_a_setup_does_not_change_the_message() -> None:
    content = query()
    messages.with_setup(content, SETUP_SENT)
    assert SETUP not in content


@pytest.mark.parametrize("position", [0, 40, -1])
def test_a_changed_setup_is_rejected(position: int) -> None:
    content = messages.with_setup(query(), SETUP_SENT)
    changed = bytearray(SETUP_SENT.content)
    changed[position] ^= 1
    content[SETUP] = ArrayRecord({VALUES: Array(np.frombuffer(bytes(changed), dtype=np.uint8))})
    with pytest.raises(InvalidMessage, match="setup"):
        messages.pop_setup(content)


def test_the_digest_depends_on_every_bit_of_tensors_and_config() -> None:
    other_sign = Setup(SETUP_SENT.config, {"head/weight": torch.tensor([[1.5, 0.0]])})
    other_seed = Setup("seed: 1\nname: größer\n", SETUP_SENT.tensors)
    assert len({SETUP_SENT.digest, other_sign.digest, other_seed.digest}) == 3
    assert Setup(SETUP_SENT.config, dict(SETUP_SENT.tensors)) == SETUP_SENT
