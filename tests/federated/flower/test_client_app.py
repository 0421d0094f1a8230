"""A node answers every message with a result or a refusal of the fixed list, never with more."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedlens[flower]'")

from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS

from fedlens import files
from fedlens.errors import FedlensError
from fedlens.federated.flower import client_app, messages
from fedlens.federated.flower.differential_privacy import PrivacySettings
from fedlens.federated.flower.messages import ARRAYS, CONFIG, SETUP, UNPREPARED, VALUES
from fedlens.federated.flower.refusals import Refusal
from fedlens.federated.flower.setup import Setup
from fedlens.federated.tasks import ClientTask, ClientUpdate, Stage
from fedlens.models.architectures.weights import WrongWeights
from fedlens.models.heads import Statistics
from fedlens.params import Params
from fedlens.plugins import PluginError
from fedlens.sparse.masks import Ranking
from fedlens.sparse.sensitivity.fisher import Sensitivity
from fedlens.training.step import Tally

SECRET = "/home/somebody/secret-3f9a"
START = {"weight": torch.zeros(3)}
SENT = Setup("{}", {})


class Host:
    """Trains nothing; raises what it is given."""

    error: Exception | None = None

    def introduction(self) -> dict[str, Any]:
        return {"clients": [0], "identity": None}

    def layout(self, setup: Setup, stage: Stage | Literal["calibration", "correction"]) -> Params:
        return START

    def train(
        self, setup: Setup, stage: Stage, task: ClientTask, parameters: Params
    ) -> ClientUpdate:
        if self.error is not None:
            raise self.error
        return ClientUpdate(task, parameters, Tally(1.0, 1, 2))

    def statistics(self, setup: Setup, client: int) -> Statistics:
        raise self.error or OSError(SECRET)

    def sensitivity(
        self, setup: Setup, client: int, round_: int, parameters: Params
    ) -> Sensitivity:
        raise OSError(SECRET)

    def ranking(self, setup: Setup, client: int) -> Ranking:
        raise KeyError(SECRET)


HOST = Host()
APP = client_app.client_app(lambda context: HOST, lambda setup: (PrivacySettings(), False))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FEDLENS_CACHE", str(tmp_path))
    client_app._stored.cache_clear()
    yield
    HOST.error = None


def answer(content: RecordDict, kind: str = MessageType.TRAIN) -> RecordDict:
    message = Message(content, dst_node_id=1, message_type=kind)
    message.metadata.__dict__["_message_id"] = "asked"
    reply = APP(message, Context(1, 1, {}, RecordDict(), {}))
    assert SECRET not in repr(reply)
    if reply.has_error():  # of secure aggregation
        assert reply.error.reason in set(Refusal)
        return RecordDict()
    return reply.content


def task(**config: Any) -> RecordDict:
    content = messages.encode_task(
        ClientTask(1, 0, 2, 0.1, 0), "rounds", messages.encode_tensors(START), config
    )
    content.config_records[CONFIG][SETUP] = SENT.digest
    return messages.with_setup(content, SENT)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (FedlensError(SECRET), Refusal.SETUP),
        (PluginError(SECRET), Refusal.PLUGIN),
        (WrongWeights(SECRET), Refusal.WEIGHTS),
        (messages.InvalidMessage(SECRET), Refusal.MESSAGE),
        (RuntimeError(SECRET), Refusal.FAILED),
        (MemoryError(SECRET), Refusal.FAILED),
        (RecursionError(SECRET), Refusal.FAILED),
    ],
)
def test_an_error_leaves_the_node_as_a_fixed_sentence(error: Exception, reason: Refusal) -> None:
    HOST.error = error
    assert messages.decode_fault(answer(task())) == reason


VALUES_SENT = st.one_of(
    st.text(max_size=20),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.booleans(),
    st.binary(max_size=20),
    st.lists(st.floats(), max_size=3),
)
KEYS = st.sampled_from(
    ["ask", "stage", "round", "client", "steps", "lr", "number", SETUP, "clipping_norm", "x"]
)
ARRAYS_SENT = st.builds(
    lambda data, name: ArrayRecord({name: Array("float32", (3,), "numpy.ndarray", data)}),
    st.binary(max_size=60),
    st.sampled_from([VALUES, "other"]),
)
RECORDS = st.one_of(
    st.dictionaries(KEYS, VALUES_SENT, max_size=6).map(ConfigRecord),
    st.dictionaries(KEYS, st.floats(), max_size=2).map(MetricRecord),
    ARRAYS_SENT,
)
NAMES = st.sampled_from([CONFIG, ARRAYS, SETUP, "correction", "metrics", RECORD_KEY_CONFIGS, "x"])


@pytest.mark.slow
@given(
    st.dictionaries(NAMES, RECORDS, max_size=4),
    st.dictionaries(KEYS, VALUES_SENT, max_size=3),
    st.booleans(),
    st.sampled_from([MessageType.TRAIN, MessageType.QUERY]),
)
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_message_gets_a_result_or_a_refusal(
    records: dict[str, Any], changes: dict[str, Any], from_honest: bool, kind: str
) -> None:
    """Arbitrary records, alone or in place of parts of an honest task."""
    content = task() if from_honest else RecordDict()
    for name, record in records.items():
        content[name] = record
    if from_honest and CONFIG in content.config_records:
        content.config_records[CONFIG].update(changes)
    reply = answer(content, kind)
    fault = messages.decode_fault(reply)
    assert fault is None or fault in set(Refusal)


@pytest.mark.parametrize(
    "digest", ["", "a" * 63, "A" * 64, "../" * 21 + "b", "/etc/passwd", "0" * 65, "\0" * 64]
)
def test_a_setup_is_named_by_its_digest_alone(digest: str, tmp_path: Path) -> None:
    content = task()
    del content[SETUP]
    content.config_records[CONFIG][SETUP] = digest
    assert messages.decode_fault(answer(content)) == Refusal.MESSAGE
    content.config_records[CONFIG][SETUP] = "0" * 64
    assert UNPREPARED in answer(content)


def setup_of(data: bytes) -> RecordDict:
    content = task()
    content[SETUP] = ArrayRecord({VALUES: Array(np.frombuffer(data, dtype=np.uint8))})
    content.config_records[CONFIG][SETUP] = hashlib.sha256(data).hexdigest()
    return content


@given(st.binary(min_size=1, max_size=200))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_setup_of_any_bytes_is_refused_and_not_stored(data: bytes) -> None:
    assert messages.decode_fault(answer(setup_of(data))) == Refusal.MESSAGE
    assert not list((files.cache_dir() / "flower").glob("*"))


def test_a_setup_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MOST_SETUP_BYTES", 10)
    data = Setup("{}", {"head/weight": torch.zeros(3000)}).content
    assert messages.decode_fault(answer(setup_of(data))) == Refusal.MESSAGE


@pytest.mark.parametrize(("kept", "size"), [(3, 2**30), (100, 400)])
def test_only_the_last_setups_stay_on_disk(
    kept: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_app, "SETUPS_KEPT", kept)
    monkeypatch.setattr(client_app, "BYTES_KEPT", size)
    for number in range(8):
        content = setup_of(Setup(f'{{"seed": {number}}}', {}).content)
        assert messages.decode_fault(answer(content)) is None
    stored = list((files.cache_dir() / "flower").glob("*.safetensors"))
    assert 1 <= len(stored) <= kept
    assert sum(path.stat().st_size for path in stored) <= size
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in stored)
    assert UNPREPARED not in answer(content)
