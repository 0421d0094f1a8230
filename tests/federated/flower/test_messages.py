"""What goes into a message comes out of it bit for bit; what is damaged is told in words."""

import io
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedlens[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedlens.federated.client import Task, Update
from fedlens.federated.flower import messages
from fedlens.federated.flower.messages import ARRAYS, CONFIG, METRICS, SETUP, VALUES, Garbled
from fedlens.federated.tasks import Setup, Work
from fedlens.params import Params
from fedlens.training.step import Tally

TASK = Task(round=3, client=7, shard=torch.arange(11), steps=4, lr=0.1)
START = {"weight": torch.arange(6.0).view(2, 3), "bias": torch.tensor(0.5)}
UPDATE = Update(TASK, {name: value + 1 for name, value in START.items()}, Tally(1.5, 2, 8))


def npy(values: object) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.asarray(values))
    return stream.getvalue()


def promise(size: int) -> bytes:
    """A header alone."""
    stream = io.BytesIO()
    told = {"descr": "<f4", "fortran_order": False, "shape": (size,)}
    np.lib.format.write_array_header_1_0(stream, told)
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
    """Tensors of one type whose bytes are any: infinities, NaNs with payloads, minus zero."""
    kind = draw(st.sampled_from([np.float32, np.float64, np.int32]))
    shapes = draw(st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=4))
    found = {}
    for number, shape in enumerate(shapes):
        size = math.prod(shape) * np.dtype(kind).itemsize
        data = bytearray(draw(st.binary(min_size=size, max_size=size)))
        found[f"tensor {number}"] = torch.from_numpy(np.frombuffer(data, kind).reshape(shape))
    return found


@settings(max_examples=60)
@given(layouts())
def test_tensors_come_back_bit_for_bit(given_: dict[str, torch.Tensor]) -> None:
    like = {name: value.to("meta") for name, value in given_.items()}
    found = messages.tensors(messages.vector(given_), like)
    assert list(found) == list(given_)
    for name, value in given_.items():
        assert found[name].dtype == value.dtype
        assert found[name].shape == value.shape
        assert bits(found[name]) == bits(value)


def test_what_lies_transposed_or_trained_in_memory_travels_all_the_same() -> None:
    value = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    image = torch.arange(16.0).view(1, 2, 2, 4).to(memory_format=torch.channels_last)
    given_: Params = {"transposed": value.t(), "channels last": image}
    found = messages.tensors(messages.vector(given_), given_)
    assert all(torch.equal(found[name], one) for name, one in given_.items())


def test_tensors_are_their_owners_and_may_be_written_to() -> None:
    sent = messages.vector(START)
    messages.tensors(sent, START)["weight"].zero_()
    assert torch.equal(messages.tensors(sent, START)["weight"], START["weight"])


def test_one_vector_travels_without_names() -> None:
    assert list(messages.vector(START)) == [VALUES]
    assert messages.vector(START)[VALUES].shape == (7,)


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
    "more than any memory holds": (record(promise(2**45)), "cannot be read"),
    "no values": (ArrayRecord({"other": Array(np.zeros(7, dtype=np.float32))}), "cannot be read"),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_damaged_values_are_a_clients_fault_in_words(how: str) -> None:
    arrays, why = DAMAGED[how]
    with pytest.raises(Garbled, match=why):
        messages.tensors(arrays, START)
    content = messages.answer(UPDATE)
    content[ARRAYS] = arrays
    found = messages.update_of(TASK, content, START)
    assert found.parameters == {}
    assert found.fault is not None
    assert found.fault.startswith("its answer is not one: ")


def test_a_task_comes_back_as_the_same_work() -> None:
    task = replace(TASK, lr=0.1 + 0.2)
    content = messages.work(task, "rounds", messages.vector(START), {"clipping_norm": 1.0})
    assert messages.work_of(content) == Work("rounds", 3, 7, 4, 0.1 + 0.2)
    assert content.config_records[CONFIG]["clipping_norm"] == 1.0
    assert messages.CORRECTION not in content


def test_a_correction_travels_beside_the_parameters() -> None:
    correction = {name: -value / 3 for name, value in START.items()}
    task = replace(TASK, correction=correction)
    content = messages.work(task, "rounds", messages.vector(START), {})
    found = messages.tensors(content.array_records[messages.CORRECTION], START)
    assert all(torch.equal(found[name], value) for name, value in correction.items())
    found = messages.tensors(content.array_records[ARRAYS], START)
    assert all(torch.equal(found[name], value) for name, value in START.items())


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(0, 8), st.integers(1, 2**53))
@settings(max_examples=30)
def test_an_update_comes_back_bit_for_bit(loss: float, correct: int, seen: int) -> None:
    sent = replace(UPDATE, tally=Tally(loss, correct, seen))
    found = messages.update_of(TASK, messages.answer(sent), START)
    assert found.task is TASK
    assert found.tally == sent.tally
    assert found.fault is None
    assert all(bits(found.parameters[n]) == bits(v) for n, v in UPDATE.parameters.items())


def test_an_answer_says_how_many_examples_weigh_in() -> None:
    assert messages.answer(UPDATE).metric_records[METRICS]["num-examples"] == 11


def test_a_client_that_gave_up_says_why() -> None:
    gave_up = replace(UPDATE, tally=Tally(), fault="The loss became nan at step 1.")
    assert messages.update_of(TASK, messages.answer(gave_up), START).fault == gave_up.fault


def test_a_refusal_is_its_reason() -> None:
    content = messages.refusal("Client 7 does not live on this node.")
    found = messages.update_of(TASK, content, START)
    assert (found.parameters, found.fault) == ({}, "Client 7 does not live on this node.")
    assert messages.refused(content) == found.fault
    assert messages.refused(messages.answer(UPDATE)) is None


EMPTY = {
    "nothing at all": RecordDict(),
    "no metrics": RecordDict({ARRAYS: messages.vector(START)}),
    "no arrays": RecordDict({METRICS: messages.answer(UPDATE)[METRICS]}),
    "metrics that are a config": RecordDict(
        {ARRAYS: messages.vector(START), METRICS: ConfigRecord({"loss": 1.0})}
    ),
    "arrays that are metrics": RecordDict(
        {ARRAYS: MetricRecord({"loss": 1.0}), METRICS: messages.answer(UPDATE)[METRICS]}
    ),
}


@pytest.mark.parametrize("what", EMPTY)
def test_an_answer_without_its_parts_is_none(what: str) -> None:
    found = messages.update_of(TASK, EMPTY[what], START)
    assert found.parameters == {}
    assert found.fault


UNTRUE = {
    "no loss": {"correct": 1, "seen": 8},
    "a loss that is no number": {"loss": math.nan, "correct": 1, "seen": 8},
    "an endless loss": {"loss": math.inf, "correct": 1, "seen": 8},
    "many losses": {"loss": [1.0, 2.0], "correct": 1, "seen": 8},
    "no example": {"loss": 0.0, "correct": 0, "seen": 0},
    "fewer than no examples": {"loss": 0.0, "correct": 0, "seen": -8},
    "an endless number of examples": {"loss": 1.0, "correct": 1, "seen": math.inf},
    "examples that are no number": {"loss": 1.0, "correct": 1, "seen": math.nan},
}


@pytest.mark.parametrize("what", UNTRUE)
def test_metrics_that_cannot_be_recorded_are_a_fault(what: str) -> None:
    content = messages.answer(UPDATE)
    content[METRICS] = MetricRecord(UNTRUE[what])  # type: ignore[arg-type]
    found = messages.update_of(TASK, content, START)
    assert found.parameters == {}
    assert found.fault
    assert found.tally == Tally()


def test_an_introduction_comes_back() -> None:
    told = {"clients": [3, 4], "identity": {"of": "abc", "deal": None}}
    assert messages.introduction_of(messages.introduction(told)) == ((3, 4), told["identity"])


NO_INTRODUCTION = {
    "nothing": RecordDict(),
    "a refusal": messages.refusal("The shard is damaged."),
    "no JSON": RecordDict({CONFIG: ConfigRecord({"introduction": "clients 1 to 3"})}),
    "a list": RecordDict({CONFIG: ConfigRecord({"introduction": "[1, 2, 3]"})}),
    "no clients": messages.introduction({"identity": None}),
    "clients that are no numbers": messages.introduction({"clients": ["a"], "identity": None}),
    "clients that are no list": messages.introduction({"clients": 3, "identity": None}),
}


@pytest.mark.parametrize("what", NO_INTRODUCTION)
def test_what_is_no_introduction_is_said_to_be_none(what: str) -> None:
    why = "The shard is damaged." if what == "a refusal" else "what it said is no introduction"
    with pytest.raises(Garbled, match=why):
        messages.introduction_of(NO_INTRODUCTION[what])


SETUP_SENT = Setup("seed: 0\nname: größer\n", {"head/weight": torch.tensor([[1.5, -0.0]])})


def asked() -> RecordDict:
    return messages.question("statistics", client=1, **{SETUP: SETUP_SENT.digest})


def test_a_setup_is_taken_out_of_the_message_it_came_with() -> None:
    content = messages.attached(asked(), SETUP_SENT)
    found = messages.detached(content)
    assert found is not None
    assert found == SETUP_SENT
    assert found.config == SETUP_SENT.config
    assert bits(found.tensors["head/weight"]) == bits(SETUP_SENT.tensors["head/weight"])
    assert SETUP not in content
    assert messages.detached(content) is None


def test_a_setup_attached_leaves_the_message_as_it_was() -> None:
    content = asked()
    messages.attached(content, SETUP_SENT)
    assert SETUP not in content


@pytest.mark.parametrize("place", [0, 40, -1])
def test_a_setup_changed_on_the_way_is_found_out(place: int) -> None:
    content = messages.attached(asked(), SETUP_SENT)
    changed = bytearray(SETUP_SENT.content)
    changed[place] ^= 1
    content[SETUP] = ArrayRecord({VALUES: Array(np.frombuffer(bytes(changed), dtype=np.uint8))})
    with pytest.raises(Garbled, match="setup"):
        messages.detached(content)


def test_setups_differ_in_a_bit_of_a_tensor_or_of_the_config() -> None:
    other_sign = Setup(SETUP_SENT.config, {"head/weight": torch.tensor([[1.5, 0.0]])})
    other_seed = Setup("seed: 1\nname: größer\n", SETUP_SENT.tensors)
    assert len({SETUP_SENT.digest, other_sign.digest, other_seed.digest}) == 3
    assert Setup(SETUP_SENT.config, dict(SETUP_SENT.tensors)) == SETUP_SENT
