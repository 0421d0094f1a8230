"""Remote clients through the ClientApp and a grid in this process, with a host of a few numbers."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedlens[flower]'")

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key
from flwr.common.secure_aggregation.secaggplus_constants import Stage as Step

from fedlens.errors import FedlensError
from fedlens.federated.flower import client_app, messages
from fedlens.federated.flower.differential_privacy import PrivacySettings
from fedlens.federated.flower.engine import FlowerClients
from fedlens.federated.flower.messages import CONFIG
from fedlens.federated.flower.roster import Roster
from fedlens.federated.flower.secure_aggregation import BROKEN, SecureSettings, max_rounding_error
from fedlens.federated.flower.setup import Setup
from fedlens.federated.tasks import Clients, ClientTask, ClientUpdate, NoUpdates, Stage
from fedlens.models.heads import Statistics
from fedlens.params import Params
from fedlens.sparse.masks import Masks, Ranking
from fedlens.sparse.sensitivity.fisher import Sensitivity
from fedlens.training.step import Tally
from tests.federated.flower.inprocess import InProcessGrid, Spoil

SIZES = [4, 2, 6]
START = {"weight": torch.arange(6.0).view(2, 3), "bias": torch.tensor([0.5, -0.5])}
WIDTH, CLASSES = 3, 2
KNOWN = torch.ones(4, WIDTH)  # features of validation
ORDER = torch.tensor([2, 0, 1], dtype=torch.int32)
RANKING = Ranking({"weight": torch.Size([3])}, {("weight",): ORDER})


class Host:
    """A node of one client k, whose update adds 0.01·(k + 1), or the correction if there is one."""

    def __init__(self, client: int) -> None:
        self.client = client

    def introduction(self) -> dict[str, Any]:
        return {"clients": [self.client], "identity": None}

    def layout(self, setup: Setup, stage: str) -> Params:
        return START

    def train(
        self, setup: Setup, stage: Stage, task: ClientTask, parameters: Params
    ) -> ClientUpdate:
        task = replace(task, examples=SIZES[task.client])
        if task.correction:
            trained = {name: value + task.correction[name] for name, value in parameters.items()}
        else:
            change = 0.01 * (task.client + 1)
            trained = {name: value + change for name, value in parameters.items()}
        return ClientUpdate(task, trained, Tally(task.lr, 1, task.examples))

    def statistics(self, setup: Setup, client: int) -> Statistics:
        features = torch.full((SIZES[client], WIDTH), float(client + 1))
        return Statistics.of(features, torch.zeros(SIZES[client], dtype=torch.int64), CLASSES)

    def sensitivity(
        self, setup: Setup, client: int, round_: int, parameters: Params
    ) -> Sensitivity:
        sums = {name: value.double() * (round_ + 1) for name, value in parameters.items()}
        return Sensitivity(sums, SIZES[client])

    def ranking(self, setup: Setup, client: int) -> Ranking:
        return Ranking(RANKING.shapes, {("weight",): ORDER.roll(client)})


def encode(head: nn.Linear | None, masks: Masks | None) -> Setup:
    described = {"head": head is not None, "masks": sorted(masks or {})}
    return Setup(json.dumps(described), {} if head is None else {"head": head.weight})


def described(clients: FlowerClients) -> dict[str, Any]:
    assert clients.roster.setup is not None
    content: dict[str, Any] = json.loads(clients.roster.setup.config)
    return content


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FEDLENS_CACHE", str(tmp_path))
    client_app._stored.cache_clear()
    yield
    client_app._stored.cache_clear()


def remote(
    privacy: PrivacySettings | None = None,
    *,
    secure: SecureSettings | None = None,
    spoil: Spoil | None = None,
    losses: bool = True,
) -> FlowerClients:
    def host_of(context: Context) -> Host:
        return Host(int(context.node_config["client"]))

    protection = (privacy or PrivacySettings(), secure is not None)
    app = client_app.client_app(host_of, lambda setup: protection)
    grid = InProcessGrid(app, {100 + k: {"client": k} for k in range(len(SIZES))}, spoil)
    roster = Roster(grid, clients=len(SIZES), identity=None, deadline=0.5, check=lambda: None)
    roster.wait_for_all()
    return FlowerClients(roster, SIZES, encode=encode, extra={}, secure=secure, losses=losses)


def tasks(**changes: Any) -> list[ClientTask]:
    return [ClientTask(1, k, steps=3, lr=0.1, examples=n, **changes) for k, n in enumerate(SIZES)]


def test_remote_clients_implement_the_protocol() -> None:
    clients: Clients = remote()
    assert clients.sizes == SIZES


@pytest.mark.parametrize("stage", ["head", "rounds"])
def test_updates_are_those_of_the_hosts(stage: Stage) -> None:
    updates = list(remote().engine(stage).updates(START, tasks()))
    assert [update.task for update in updates] == tasks()
    assert [update.tally for update in updates] == [Tally(0.1, 1, n) for n in SIZES]
    assert all(update.individual and update.fault is None for update in updates)
    for k, update in enumerate(updates):
        expected = {name: value + 0.01 * (k + 1) for name, value in START.items()}
        assert all(torch.equal(update.parameters[name], expected[name]) for name in START)


def test_a_correction_reaches_the_host() -> None:
    correction = {name: torch.full_like(value, 0.25) for name, value in START.items()}
    for update in remote().engine("rounds").updates(START, tasks(correction=correction)):
        assert torch.equal(update.parameters["weight"], START["weight"] + 0.25)


def test_without_losses_updates_have_no_tally() -> None:
    local = PrivacySettings("local", clip_norm=0.5)
    updates = list(remote(local, losses=False).engine("rounds").updates(START, tasks()))
    assert [update.tally for update in updates] == [None] * len(SIZES)
    assert all(update.individual and update.fault is None for update in updates)


def test_updates_of_secure_aggregation_are_the_mean_and_not_individual() -> None:
    settings = SecureSettings(max_update_value=0.1)
    updates = list(remote(secure=settings).engine("rounds").updates(START, tasks()))
    weighted = sum(0.01 * (k + 1) * n for k, n in enumerate(SIZES)) / sum(SIZES)
    bound = max_rounding_error(settings, SIZES, max(SIZES)) + 1e-6  # of float32
    for update, n in zip(updates, SIZES, strict=True):
        assert not update.individual
        assert update.tally == Tally(0.1, 1, n)
        change = update.parameters["weight"] - START["weight"]
        assert (change - weighted).abs().max() <= bound


def secagg_stage(message: Message) -> str | None:
    config = message.content.config_records.get(RECORD_KEY_CONFIGS)
    return None if config is None else str(config[Key.STAGE])


@pytest.mark.parametrize("stage", Step.all())
def test_a_node_that_breaks_secure_aggregation_costs_the_round_and_no_more(stage: str) -> None:
    garbage = RecordDict({RECORD_KEY_CONFIGS: ConfigRecord({"public_key_1": 7, "parameters": []})})
    broken = [True, False, True, True]  # rounds

    def spoil(node: int, message: Message, reply: Message) -> Message:
        if node == 101 and secagg_stage(message) == stage and broken[0]:
            return Message(garbage, reply_to=_received(reply))
        return reply

    engine = remote(secure=SecureSettings(max_update_value=0.1), spoil=spoil).engine("rounds")
    lost = list(engine.updates(START, tasks()))
    assert [update.fault for update in lost] == [BROKEN] * len(SIZES)
    broken.pop(0)
    assert not any(update.fault for update in engine.updates(START, tasks()))
    broken.pop(0)
    assert all(update.fault for update in engine.updates(START, tasks()))
    broken.pop(0)
    with pytest.raises(NoUpdates, match="did not follow the protocol"):  # the second in a row
        list(engine.updates(START, tasks()))


def test_a_host_that_requires_secure_aggregation_sends_nothing_else() -> None:
    clients = remote(secure=SecureSettings())
    clients.secure = None
    with pytest.raises(FedlensError, match="by secure aggregation only"):
        list(clients.engine("rounds").updates(START, tasks()))


def test_a_round_without_any_update_ends_the_run() -> None:
    def spoil(node: int, message: Message, reply: Message) -> Message:
        if "stage" not in message.content.config_records[CONFIG]:
            return reply
        return Message(messages.encode_fault("The disk is full."), reply_to=_received(reply))

    with pytest.raises(FedlensError, match=r"None of the 3 .* \(The disk is full\): check"):
        list(remote(spoil=spoil).engine("rounds").updates(START, tasks()))


def failing(nodes: set[int]) -> Spoil:
    """These nodes answer every task with a refusal."""

    def spoil(node: int, message: Message, reply: Message) -> Message:
        if node not in nodes or "stage" not in message.content.config_records[CONFIG]:
            return reply
        return Message(messages.encode_fault("Never."), reply_to=_received(reply))

    return spoil


def test_one_node_that_hosts_all_clients_of_a_round_does_not_end_the_run() -> None:
    """Nor do several such rounds in a row; but most nodes do, whenever each of them failed."""
    failed = {100}
    engine = remote(spoil=failing(failed)).engine("rounds")
    first, second, third = tasks()
    for _ in range(3):
        (update,) = engine.updates(START, [first])
        assert update.fault == "Never."
    failed.add(101)
    with pytest.raises(NoUpdates, match=r"None of the 1 .* \(Never\): check"):
        list(engine.updates(START, [second]))
    assert [update.fault for update in engine.updates(START, [second, third])] == ["Never.", None]
    assert [update.fault for update in engine.updates(START, [first])] == ["Never."]


def test_a_node_that_leaves_too_few_for_secure_aggregation_costs_the_round() -> None:
    def spoil(node: int, message: Message, reply: Message) -> Message | None:
        return None if node in silent else reply

    silent: set[int] = set()
    engine = remote(secure=SecureSettings(max_update_value=0.1), spoil=spoil).engine("rounds")
    silent.add(101)  # once it has introduced itself
    for _ in range(2):
        faults = [update.fault for update in engine.updates(START, tasks())]
        assert faults[0] == faults[2] == "secure aggregation needs at least 3 clients to answer"
        assert "no answer came" in str(faults[1])
        silent.clear()
        assert not any(update.fault for update in engine.updates(START, tasks()))
        silent.add(101)
    list(engine.updates(START, tasks()))
    with pytest.raises(NoUpdates, match="at least 3 clients"):
        list(engine.updates(START, tasks()))


def test_what_was_shared_stays_in_the_setup() -> None:
    clients = remote()
    clients.engine("rounds")
    assert described(clients) == {"head": False, "masks": []}
    clients.share(head=nn.Linear(WIDTH, CLASSES))
    assert described(clients) == {"head": True, "masks": []}
    clients.share(masks={"weight": torch.ones(3, dtype=torch.bool)})
    assert described(clients) == {"head": True, "masks": ["weight"]}


def test_a_setup_is_sent_once_to_every_node() -> None:
    clients = remote()
    for _ in range(2):
        list(clients.engine("rounds").updates(START, tasks()))
    sent = clients.roster.grid.grid.sent  # type: ignore[attr-defined]
    assert sum(messages.SETUP in message.content for _, message in sent) == len(SIZES)


def test_statistics_add_up_over_the_clients() -> None:
    total = remote().statistics(KNOWN, CLASSES)
    assert total.counts.tolist() == [sum(SIZES), 0]
    assert total.class_sums[0, 0] == sum((k + 1) * n for k, n in enumerate(SIZES))
    own = [Host(k).statistics(encode(None, None), k) for k in range(len(SIZES))]
    assert torch.equal(total.xtx, sum(own[1:], own[0]).xtx)


def test_sensitivities_come_in_the_order_of_the_clients() -> None:
    scores = list(remote().sensitivities([2, 0], 1, START))
    assert [one.count for one in scores] == [SIZES[2], SIZES[0]]
    assert all(torch.equal(one.sums["weight"], START["weight"].double() * 2) for one in scores)


def test_rankings_come_in_the_order_of_the_clients() -> None:
    rankings = list(remote().rankings([1, 2], RANKING))
    assert [one.shapes for one in rankings] == [RANKING.shapes] * 2
    assert [one.orders["weight",].tolist() for one in rankings] == [[1, 2, 0], [0, 1, 2]]


def _received(reply: Message) -> Message:
    """A message that a new reply can refer to in place of `reply`."""
    metadata = reply.metadata
    message = Message(
        RecordDict(), dst_node_id=metadata.src_node_id, message_type=metadata.message_type
    )
    message.metadata.__dict__["_message_id"] = metadata.reply_to_message_id
    return message


def sums(**changed: Any) -> RecordDict:
    """The answer of client 1 to a query for statistics, with changes."""
    content = Host(1).statistics(encode(None, None), 1).sent() | changed
    return messages.query("statistics", arrays=content)


def scores(count: float | None, value: float = 1.0) -> RecordDict:
    arrays = {name: value * torch.ones(one.shape).double() for name, one in START.items()}
    return messages.query(
        "sensitivity", arrays=arrays, **({} if count is None else {"count": count})
    )


HALF = (WIDTH * (WIDTH + 1) // 2,)
DAMAGED = messages.encode_fault("The shard is\ndamaged.")
UNUSABLE: list[tuple[str, RecordDict, str]] = [
    ("ranking", RecordDict(), "it has no arrays"),
    ("ranking", DAMAGED, "The shard is damaged"),
    (
        "ranking",
        messages.query("ranking", arrays={"0": torch.zeros(3, dtype=torch.int32)}),
        "it is not a permutation",
    ),
    (
        "ranking",
        messages.query("ranking", arrays={"0": torch.tensor([0, 1, 3], dtype=torch.int32)}),
        "it is not a permutation",
    ),
    ("sensitivity", DAMAGED, "The shard is damaged"),
    ("sensitivity", scores(None), "it has no count"),
    ("sensitivity", scores(0), "its count is not an integer"),
    ("sensitivity", scores(2.0), "its count is not an integer"),
    ("sensitivity", scores(2, torch.inf), "values that are not finite"),
    ("sensitivity", scores(2, 1e101), "values above 1e\\+100"),
    ("statistics", DAMAGED, "The shard is damaged"),
    ("statistics", RecordDict(), "it has no arrays"),
    ("statistics", sums(xtx=torch.full(HALF, torch.nan, dtype=torch.float64)), "not finite"),
    ("statistics", sums(counts=torch.tensor([3.0, 0.0]).double()), "counts are not those of 2"),
    ("statistics", sums(counts=torch.tensor([3.0, -1.0]).double()), "counts are not those of 2"),
    ("statistics", sums(counts=torch.tensor([0.5, 1.5]).double()), "counts are not those of 2"),
    ("statistics", sums(class_sums=torch.ones(CLASSES, WIDTH).double()), "without examples"),
    ("statistics", sums(xtx=-torch.ones(HALF).double()), "not those of any features"),
    ("statistics", sums(xtx=torch.zeros(HALF).double()), "not those of any features"),
    ("statistics", sums(xtx=torch.full(HALF, 1e9).double()), "a norm above"),
]


@pytest.mark.parametrize(("ask", "content", "reason"), UNUSABLE)
def test_a_client_whose_answer_cannot_be_used_is_left_out(
    ask: str, content: RecordDict, reason: str
) -> None:
    """Not if it is one of most: then the nodes are at fault, or the run."""
    bad = {101}

    def spoil(node: int, message: Message, reply: Message) -> Message:
        if message.content.config_records[CONFIG].get("ask") != ask or node not in bad:
            return reply
        return Message(content, reply_to=_received(reply))

    def answers(clients: FlowerClients) -> Any:
        if ask == "statistics":
            return clients.statistics(KNOWN, CLASSES).counts.tolist()
        if ask == "sensitivity":
            return [one.count for one in clients.sensitivities(range(len(SIZES)), 0, START)]
        return [one.orders["weight",].tolist() for one in clients.rankings([0, 1, 2], RANKING)]

    clients = remote(spoil=spoil)
    expected = {
        "statistics": [SIZES[0] + SIZES[2], 0],
        "sensitivity": [SIZES[0], SIZES[2]],
        "ranking": [ORDER.tolist(), ORDER.roll(2).tolist()],
    }
    assert answers(clients) == expected[ask]
    assert clients.left_out.keys() == {1}
    assert re.match(f"{ask}: .*{reason}", clients.left_out[1])
    bad.add(100)
    with pytest.raises(FedlensError, match=rf"More than half of the nodes .*{reason}") as ended:
        answers(remote(spoil=spoil))
    assert "\n" not in str(ended.value)


def test_without_any_answer_there_is_no_sum() -> None:
    def spoil(node: int, message: Message, reply: Message) -> Message:
        if message.content.config_records[CONFIG].get("ask") != "sensitivity":
            return reply
        return Message(DAMAGED, reply_to=_received(reply))

    with pytest.raises(FedlensError, match=r"None of the 1 clients .*\(client 1: The shard is"):
        list(remote(spoil=spoil).sensitivities([1], 0, START))
