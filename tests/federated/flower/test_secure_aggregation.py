"""SecAgg+ over a grid in this process: messages are serialised both ways, nodes keep contexts."""

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
from fedlens.federated.flower.differential_privacy import CLIPPING_NORM, PrivacySettings, wrapped
from fedlens.federated.flower.messages import ARRAYS, CONFIG, METRICS, VALUES, vector
from fedlens.federated.flower.secure_aggregation import (
    LEVELS,
    SecureAnswer,
    SecureSettings,
    largest_error,
    refuse_cohort,
    secure,
    secure_round,
)
from fedlens.training.step import Tally

FAR = 2**63 + 5  # node ids are unsigned and 64 bits long
START = {"w": torch.linspace(-3, 3, 12).view(3, 4), "b": torch.tensor([100.0, -0.001])}
STAGES = Stage.all()
Train = Callable[[Message, Context], Message]


@pytest.fixture(scope="module", autouse=True)
def _identity() -> Iterator[None]:
    """Messages are written by a task, which Flower sets once in a process."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_task_id", "_run_id", "_node_id"):
            patch.setattr(TaskIdentity, name, 1)
        yield


def flat(values: dict[str, torch.Tensor]) -> np.ndarray:
    return torch.cat([value.reshape(-1) for value in values.values()]).numpy()


def deltas(count: int, seed: int = 0, reach: float = 0.1) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [draw.uniform(-reach, reach, 14).astype(np.float32) * 0.9 for _ in range(count)]


def trainer(delta: np.ndarray, examples: int, **more: object) -> Train:
    def train(message: Message, context: Context) -> Message:
        assert set(message.content) == {ARRAYS, CONFIG}  # nothing of the protocol
        assert context.node_id == message.metadata.dst_node_id
        found = message.content.array_records[ARRAYS][VALUES].numpy() + delta
        metrics = {"loss": 0.5 * examples, "correct": 1, "seen": 8, "num-examples": examples}
        arrays = ArrayRecord({VALUES: Array(found)})
        content = RecordDict({ARRAYS: arrays, METRICS: MetricRecord(metrics)})
        return Message(RecordDict({**content, **more}), reply_to=message)  # type: ignore[dict-item]

    return train


class Room:
    """A grid whose nodes are callables; some leave before they answer at a stage."""

    def __init__(self, apps: dict[int, Train], leave: dict[int, str] | None = None) -> None:
        self.apps = apps
        self.leave = leave or {}
        self.contexts = {node: Context(1, node, {}, RecordDict(), {}) for node in apps}
        self.seen: list[Message] = []
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
            self.seen.append(reply)
            yield message_from_proto(message_to_proto(reply))


def nodes(count: int) -> list[int]:
    return [FAR if k == 1 else 7 * k + 3 for k in range(count)]


def room(
    updates: list[np.ndarray], examples: list[int], leave: dict[int, str] | None = None
) -> Room:
    apps = {
        node: secure(trainer(delta, size))
        for node, delta, size in zip(nodes(len(updates)), updates, examples, strict=True)
    }
    return Room(apps, {nodes(len(updates))[k]: stage for k, stage in (leave or {}).items()})


def run(grid: Room, heaviest: int = 50, round_: int = 1, **keys: float) -> SecureAnswer:
    contents = {
        node: RecordDict({ARRAYS: vector(START), CONFIG: ConfigRecord({CLIPPING_NORM: 0.01})})
        for node in grid.apps
    }
    return secure_round(
        grid,  # type: ignore[arg-type]
        contents,
        start=START,
        round_=round_,
        heaviest=heaviest,
        settings=SecureSettings(**keys),
    )


def assert_mean(
    answer: SecureAnswer, updates: list[np.ndarray], examples: list[int], heaviest: int = 50
) -> None:
    """Of what float32 parameters moved by, as close as `largest_error` says."""
    assert answer.change is not None
    moved = [(flat(START) + u).astype(np.float64) - flat(START) for u in updates]
    expected = np.average(moved, axis=0, weights=examples)
    bound = largest_error(SecureSettings(), examples, heaviest)
    assert {name: value.shape for name, value in answer.change.items()} == {
        name: value.shape for name, value in START.items()
    }
    assert all(value.dtype == torch.float64 for value in answer.change.values())
    assert np.abs(flat(answer.change) - expected).max() <= bound


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=3, max_size=7), st.integers(0, 99))
def test_the_sum_is_the_mean_weighted_by_examples_to_within_its_bound(
    examples: list[int], seed: int
) -> None:
    updates = deltas(len(examples), seed)
    answer = run(room(updates, examples))
    assert_mean(answer, updates, examples)
    assert answer.missing == {}
    assert answer.tallies == {
        node: Tally(0.5 * size, 1, 8)
        for node, size in zip(nodes(len(examples)), examples, strict=True)
    }


def test_the_bound_by_hand() -> None:
    """Steps of 2·0.1/2²²; weights 10 and 30 of 40 sum to 1: 1.5 steps of 2 clients."""
    found = largest_error(SecureSettings(reach=0.1), [10, 30], 40)
    assert found == pytest.approx(1.5 * 0.2 / 4194304 * 2)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("gone", [[4], [0, 1]])
def test_clients_may_leave_at_any_stage(stage: str, gone: list[int]) -> None:
    updates, examples = deltas(7), [5, 10, 20, 30, 40, 50, 7]
    grid = room(updates, examples, dict.fromkeys(gone, stage))
    answer = run(grid, deadline=9.0)
    # Whoever sent a masked update is in the sum, even if it left before the masks were removed.
    stayed = [k for k in range(7) if k not in gone or stage == Stage.UNMASK]
    assert_mean(answer, [updates[k] for k in stayed], [examples[k] for k in stayed])
    assert set(answer.tallies) == {nodes(7)[k] for k in stayed}
    assert answer.missing == {
        nodes(7)[k]: "no answer came within 9 s" for k in gone if k not in stayed
    }


def test_clients_may_leave_at_different_stages() -> None:
    updates, examples = deltas(9), [10] * 9
    leave = {0: Stage.SETUP, 3: Stage.SHARE_KEYS, 5: Stage.COLLECT_MASKED_VECTORS}
    answer = run(room(updates, examples, leave))
    stayed = [k for k in range(9) if k not in leave]
    assert_mean(answer, [updates[k] for k in stayed], [10] * 6)
    assert set(answer.missing) == {nodes(9)[k] for k in leave}


@pytest.mark.parametrize("stage", STAGES)
def test_where_too_many_leave_the_round_fails_and_says_so(stage: str) -> None:
    answer = run(room(deltas(4), [1] * 4, dict.fromkeys([0, 1], stage)))
    assert answer.change is None
    assert answer.tallies == {}
    assert set(answer.missing) == set(nodes(4))
    assert "too few clients stayed" in answer.missing[nodes(4)[3]]


def test_a_round_that_failed_does_not_spoil_the_next() -> None:
    updates, examples = deltas(4), [4, 3, 2, 1]
    grid = room(updates, examples, dict.fromkeys([0, 1], Stage.COLLECT_MASKED_VECTORS))
    assert run(grid).change is None
    grid.leave = {}
    for round_ in (2, 3):
        assert_mean(run(grid, round_=round_), updates, examples)


def test_every_stage_has_the_deadline() -> None:
    grid = room(deltas(3), [1, 1, 1])
    run(grid, deadline=3.5)
    assert grid.timeouts == [3.5] * 4


def test_what_a_client_sends_shows_nothing_of_its_update() -> None:
    """Masked, all updates being zero: uniform over 2³², and never what was quantised."""
    grid = room([np.zeros(14, np.float32)] * 5, [50] * 5)
    run(grid)
    sent = [
        bytes_to_ndarray(part)
        for reply in grid.seen
        for part in reply.content[RECORD_KEY_CONFIGS].get(Key.MASKED_PARAMETERS, [])[1:]
    ]
    values = np.concatenate(sent)
    assert len(values) == 5 * 14
    assert len(set(values)) == 5 * 14
    assert (np.abs(values - LEVELS / 2) > 2).all()
    assert 0.3 < (values > 2**31).mean() < 0.7
    masked = [reply for reply in grid.seen if Key.MASKED_PARAMETERS in str(reply.content)]
    assert not any(record for r in masked for record in r.content.array_records.values())


FAULTS: dict[str, tuple[Train, str]] = {
    "nan": (trainer(np.full(14, np.nan, np.float32), 5), "not finite"),
    "far": (trainer(np.full(14, 0.5, np.float32), 5), "reaches 0.5, which is beyond privacy.reach"),
    "fault": (
        trainer(np.zeros(14, np.float32), 5, config=ConfigRecord({"fault": "it diverged"})),
        "it diverged",
    ),
    "error": (lambda m, c: Message(Error(0, "no disk"), reply_to=m), "no disk"),
    "unprepared": (lambda m, c: Message(RecordDict(), reply_to=m), "not prepared"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_client_keeps_a_bad_update_out_of_the_sum(kind: str) -> None:
    updates, examples = deltas(4), [5, 10, 20, 30]
    grid = room(updates, examples)
    train, why = FAULTS[kind]
    grid.apps[nodes(4)[2]] = secure(train)
    answer = run(grid)
    stayed = [0, 1, 3]
    assert_mean(answer, [updates[k] for k in stayed], [examples[k] for k in stayed])
    assert list(answer.missing) == [nodes(4)[2]]
    assert why in answer.missing[nodes(4)[2]]


def test_with_a_heaviest_of_one_all_weigh_alike() -> None:
    updates = deltas(4)
    assert_mean(run(room(updates, [1, 9, 50, 3]), heaviest=1), updates, [1] * 4, heaviest=1)


def test_clipped_updates_can_be_summed_securely() -> None:
    updates = deltas(3)
    apps = {
        node: secure(wrapped(PrivacySettings("central", clip_norm=0.01), trainer(delta, 5)))
        for node, delta in zip(nodes(3), updates, strict=True)
    }
    answer = run(Room(apps), heaviest=1)
    assert answer.change is not None
    expected = np.mean([0.01 * u / np.linalg.norm(u) for u in updates], axis=0)
    np.testing.assert_allclose(flat(answer.change)[:12], expected[:12], atol=1e-6)


def test_a_secure_client_gives_no_update_in_the_clear() -> None:
    content = RecordDict({ARRAYS: vector(START), CONFIG: ConfigRecord()})
    message = Message(content, dst_node_id=3, message_type=MessageType.TRAIN)
    client = secure(trainer(deltas(1)[0], 5))
    reply = client(message, Context(1, 3, {}, RecordDict(), {}))
    assert reply.has_error()
    assert "secure aggregation only" in reply.error.reason


@pytest.mark.parametrize("size", [0, 1, 2, 1024])
def test_too_few_or_too_many_clients_are_refused(size: int) -> None:
    with pytest.raises(FedlensError, match="needs from 3 to 1023 clients"):
        refuse_cohort(size)


def test_a_round_of_two_is_refused() -> None:
    with pytest.raises(FedlensError, match="participation"):
        run(room(deltas(2), [1, 1]))


@pytest.mark.parametrize("keys", [{"threshold": 0.5}, {"threshold": 1.1}, {"reach": 0.0}])
def test_settings_that_protect_nothing_are_refused(keys: dict[str, float]) -> None:
    with pytest.raises(FedlensError, match=next(iter(keys))):
        SecureSettings(**keys)
