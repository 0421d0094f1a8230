"""SecAgg+ over a grid in this process: messages are serialised, nodes keep their state."""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedlens[flower]'")

from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.common import bytes_to_ndarray
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlens.errors import FedlensError
from fedlens.federated.flower.differential_privacy import (
    CLIPPING_NORM,
    PrivacySettings,
    private_training,
)
from fedlens.federated.flower.messages import ARRAYS, CONFIG, METRICS, VALUES, encode_tensors
from fedlens.federated.flower.secure_aggregation import (
    LEVELS,
    SecureResult,
    SecureSettings,
    check_cohort_size,
    max_rounding_error,
    secure_round,
    secure_training,
)
from fedlens.training.step import Tally

LARGE_NODE_ID = 2**63 + 5  # node ids are unsigned and 64 bits long
START = {"w": torch.linspace(-3, 3, 12).view(3, 4), "b": torch.tensor([100.0, -0.001])}
STAGES = Stage.all()
Train = Callable[[Message, Context], Message]


@pytest.fixture(scope="module", autouse=True)
def _identity() -> Iterator[None]:
    """Flower needs the identity of a task to create messages, and sets it once per process."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_task_id", "_run_id", "_node_id"):
            patch.setattr(TaskIdentity, name, 1)
        yield


def flat(values: dict[str, torch.Tensor]) -> np.ndarray:
    return torch.cat([value.reshape(-1) for value in values.values()]).numpy()


def deltas(count: int, seed: int = 0, largest: float = 0.1) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [draw.uniform(-largest, largest, 14).astype(np.float32) * 0.9 for _ in range(count)]


def trainer(delta: np.ndarray, examples: int, **extra: object) -> Train:
    def train(message: Message, context: Context) -> Message:
        assert set(message.content) == {ARRAYS, CONFIG}  # nothing that belongs to the protocol
        assert context.node_id == message.metadata.dst_node_id
        trained = message.content.array_records[ARRAYS][VALUES].numpy() + delta
        metrics = {"loss": 0.5 * examples, "correct": 1, "seen": 8, "num-examples": examples}
        arrays = ArrayRecord({VALUES: Array(trained)})
        content = RecordDict({ARRAYS: arrays, METRICS: MetricRecord(metrics)})
        return Message(RecordDict({**content, **extra}), reply_to=message)  # type: ignore[dict-item]

    return train


class CallableGrid:
    """A grid whose nodes are callables; `leave` says at which stage a node stops answering."""

    def __init__(self, apps: dict[int, Train], leave: dict[int, str] | None = None) -> None:
        self.apps = apps
        self.leave = leave or {}
        self.contexts = {node: Context(1, node, {}, RecordDict(), {}) for node in apps}
        self.replies: list[Message] = []
        self.timeouts: list[float | None] = []

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        self.timeouts.append(timeout)
        for message in messages:
            assert message.metadata.ttl == timeout
            node = message.metadata.dst_node_id
            received = message_from_proto(message_to_proto(message))
            if self.leave.get(node) == received.content[RECORD_KEY_CONFIGS].get(Key.STAGE):
                continue
            try:
                reply = self.apps[node](received, self.contexts[node])
            except Exception as error:
                reply = Message(Error(2, repr(error)), reply_to=received)
            self.replies.append(reply)
            yield message_from_proto(message_to_proto(reply))


def nodes(count: int) -> list[int]:
    return [LARGE_NODE_ID if k == 1 else 7 * k + 3 for k in range(count)]


def make_grid(
    updates: list[np.ndarray], examples: list[int], leave: dict[int, str] | None = None
) -> CallableGrid:
    apps = {
        node: secure_training(trainer(delta, size))
        for node, delta, size in zip(nodes(len(updates)), updates, examples, strict=True)
    }
    return CallableGrid(apps, {nodes(len(updates))[k]: stage for k, stage in (leave or {}).items()})


def run(grid: CallableGrid, max_weight: int = 50, round_: int = 1, **keys: float) -> SecureResult:
    contents = {
        node: RecordDict(
            {ARRAYS: encode_tensors(START), CONFIG: ConfigRecord({CLIPPING_NORM: 0.01})}
        )
        for node in grid.apps
    }
    return secure_round(
        grid,  # type: ignore[arg-type]
        contents,
        start=START,
        round_=round_,
        max_weight=max_weight,
        settings=SecureSettings(**keys),
    )


def assert_mean(
    result: SecureResult, updates: list[np.ndarray], examples: list[int], max_weight: int = 50
) -> None:
    """The mean of the float32 parameters' changes, within `max_rounding_error`."""
    assert result.change is not None
    changes = [(flat(START) + u).astype(np.float64) - flat(START) for u in updates]
    expected = np.average(changes, axis=0, weights=examples)
    bound = max_rounding_error(SecureSettings(), examples, max_weight)
    assert {name: value.shape for name, value in result.change.items()} == {
        name: value.shape for name, value in START.items()
    }
    assert all(value.dtype == torch.float64 for value in result.change.values())
    assert np.abs(flat(result.change) - expected).max() <= bound


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=3, max_size=7), st.integers(0, 99))
def test_the_result_is_the_mean_weighted_by_examples_within_its_bound(
    examples: list[int], seed: int
) -> None:
    updates = deltas(len(examples), seed)
    result = run(make_grid(updates, examples))
    assert_mean(result, updates, examples)
    assert result.missing == {}
    assert result.tallies == {
        node: Tally(0.5 * size, 1, 8)
        for node, size in zip(nodes(len(examples)), examples, strict=True)
    }


def test_the_rounding_bound_by_hand() -> None:
    """Steps of 2·0.1/2²²; weights 10 and 30 of 40 sum to 1: 1.5 steps of 2 clients."""
    bound = max_rounding_error(SecureSettings(max_update_value=0.1), [10, 30], 40)
    assert bound == pytest.approx(1.5 * 0.2 / 4194304 * 2)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("left", [[4], [0, 1]])
def test_clients_may_leave_at_any_stage(stage: str, left: list[int]) -> None:
    updates, examples = deltas(7), [5, 10, 20, 30, 40, 50, 7]
    grid = make_grid(updates, examples, dict.fromkeys(left, stage))
    result = run(grid, deadline=9.0)
    # A client that sent a masked update is in the sum, even if it left before the unmasking.
    stayed = [k for k in range(7) if k not in left or stage == Stage.UNMASK]
    assert_mean(result, [updates[k] for k in stayed], [examples[k] for k in stayed])
    assert set(result.tallies) == {nodes(7)[k] for k in stayed}
    assert result.missing == {
        nodes(7)[k]: "no answer came within 9 s" for k in left if k not in stayed
    }


def test_clients_may_leave_at_different_stages() -> None:
    updates, examples = deltas(9), [10] * 9
    leave = {0: Stage.SETUP, 3: Stage.SHARE_KEYS, 5: Stage.COLLECT_MASKED_VECTORS}
    result = run(make_grid(updates, examples, leave))
    stayed = [k for k in range(9) if k not in leave]
    assert_mean(result, [updates[k] for k in stayed], [10] * 6)
    assert set(result.missing) == {nodes(9)[k] for k in leave}


@pytest.mark.parametrize("stage", STAGES)
def test_a_round_fails_with_a_reason_if_too_many_clients_leave(stage: str) -> None:
    result = run(make_grid(deltas(4), [1] * 4, dict.fromkeys([0, 1], stage)))
    assert result.change is None
    assert result.tallies == {}
    assert set(result.missing) == set(nodes(4))
    assert "too few clients stayed" in result.missing[nodes(4)[3]]


def test_a_failed_round_does_not_affect_the_next() -> None:
    updates, examples = deltas(4), [4, 3, 2, 1]
    grid = make_grid(updates, examples, dict.fromkeys([0, 1], Stage.COLLECT_MASKED_VECTORS))
    assert run(grid).change is None
    grid.leave = {}
    for round_ in (2, 3):
        assert_mean(run(grid, round_=round_), updates, examples)


def test_every_stage_has_the_deadline() -> None:
    grid = make_grid(deltas(3), [1, 1, 1])
    run(grid, deadline=3.5)
    assert grid.timeouts == [3.5] * 4


def test_masked_updates_reveal_nothing() -> None:
    """All updates are zero: masked values are uniform over 2³², and never the quantised zero."""
    grid = make_grid([np.zeros(14, np.float32)] * 5, [50] * 5)
    run(grid)
    sent = [
        bytes_to_ndarray(part)
        for reply in grid.replies
        for part in reply.content[RECORD_KEY_CONFIGS].get(Key.MASKED_PARAMETERS, [])[1:]
    ]
    values = np.concatenate(sent)
    assert len(values) == 5 * 14
    assert len(set(values)) == 5 * 14
    assert (np.abs(values - LEVELS / 2) > 2).all()
    assert 0.3 < (values > 2**31).mean() < 0.7
    masked = [reply for reply in grid.replies if Key.MASKED_PARAMETERS in str(reply.content)]
    assert not any(record for r in masked for record in r.content.array_records.values())


FAULTS: dict[str, tuple[Train, str]] = {
    "nan": (trainer(np.full(14, np.nan, np.float32), 5), "not finite"),
    "far": (
        trainer(np.full(14, 0.5, np.float32), 5),
        "a value above max_update_value",
    ),
    "fault": (
        trainer(np.zeros(14, np.float32), 5, config=ConfigRecord({"fault": "it diverged"})),
        "it diverged",
    ),
    "error": (lambda m, c: Message(Error(0, "no disk"), reply_to=m), "no disk"),
    "unprepared": (lambda m, c: Message(RecordDict(), reply_to=m), "does not have the setup"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_client_withholds_an_invalid_update(kind: str) -> None:
    updates, examples = deltas(4), [5, 10, 20, 30]
    grid = make_grid(updates, examples)
    train, reason = FAULTS[kind]
    grid.apps[nodes(4)[2]] = secure_training(train)
    result = run(grid)
    stayed = [0, 1, 3]
    assert_mean(result, [updates[k] for k in stayed], [examples[k] for k in stayed])
    assert list(result.missing) == [nodes(4)[2]]
    assert reason in result.missing[nodes(4)[2]]


def test_with_a_max_weight_of_one_all_clients_are_weighted_equally() -> None:
    updates = deltas(4)
    assert_mean(
        run(make_grid(updates, [1, 9, 50, 3]), max_weight=1), updates, [1] * 4, max_weight=1
    )


def test_clipped_updates_can_be_summed_securely() -> None:
    updates = deltas(3)
    apps = {
        node: secure_training(
            private_training(PrivacySettings("central", clip_norm=0.01), trainer(delta, 5))
        )
        for node, delta in zip(nodes(3), updates, strict=True)
    }
    result = run(CallableGrid(apps), max_weight=1)
    assert result.change is not None
    expected = np.mean([0.01 * u / np.linalg.norm(u) for u in updates], axis=0)
    np.testing.assert_allclose(flat(result.change)[:12], expected[:12], atol=1e-6)


def test_a_secure_client_sends_no_unmasked_update() -> None:
    content = RecordDict({ARRAYS: encode_tensors(START), CONFIG: ConfigRecord()})
    message = Message(content, dst_node_id=3, message_type=MessageType.TRAIN)
    client = secure_training(trainer(deltas(1)[0], 5))
    reply = client(message, Context(1, 3, {}, RecordDict(), {}))
    assert reply.has_error()
    assert "by secure aggregation only" in reply.error.reason


@pytest.mark.parametrize("size", [0, 1, 2, 1024])
def test_too_few_or_too_many_clients_are_rejected(size: int) -> None:
    with pytest.raises(FedlensError, match="needs from 3 to 1023 clients"):
        check_cohort_size(size)


def test_a_round_of_two_clients_is_rejected() -> None:
    with pytest.raises(FedlensError, match="participation"):
        run(make_grid(deltas(2), [1, 1]))


@pytest.mark.parametrize(
    "keys", [{"threshold": 0.5}, {"threshold": 1.1}, {"max_update_value": 0.0}]
)
def test_invalid_settings_are_rejected(keys: dict[str, float]) -> None:
    with pytest.raises(FedlensError, match=next(iter(keys))):
        SecureSettings(**keys)
