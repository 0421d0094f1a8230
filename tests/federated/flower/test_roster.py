"""Slow, silent, disconnected, unknown and faulty nodes: every query ends by its deadline.

Time is simulated, and a node is a script: what it answers, after how long, while it is connected.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedlens[flower]'")

from flwr.app import ConfigRecord, Error, Message, MessageType, RecordDict

from fedlens.errors import FedlensError
from fedlens.federated.flower import messages
from fedlens.federated.flower import roster as roster_module
from fedlens.federated.flower.messages import CONFIG, SETUP, UNPREPARED
from fedlens.federated.flower.roster import (
    INTRODUCTION_TIMEOUT_S,
    MESSAGE_GRACE_S,
    RETRY_S,
    START_TIMEOUT_S,
    NoReply,
    Roster,
)
from fedlens.federated.flower.setup import Setup
from tests.federated.flower.inprocess import delivered

IDENTITY = {"dataset": "abc"}
DEADLINE = 100.0
SETUP_SENT = Setup("seed: 0", {"weight": torch.zeros(2)})

Respond = Callable[[RecordDict], RecordDict | Error | None]


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < 5000, "this would never end"


def client_of(content: RecordDict) -> RecordDict:
    """The default reply: which client the query was for."""
    return RecordDict({CONFIG: ConfigRecord({"from": content.config_records[CONFIG]["client"]})})


@dataclass
class Script:
    clients: Iterable[int] = ()
    answer: Respond = client_of
    delay: float = 0.0  # before a reply
    introduction_delay: float = 0.0
    joins: float = -math.inf  # time on the clock
    leaves: float = math.inf
    identity: object = field(default_factory=lambda: IDENTITY)
    introduces: Respond | None = None  # in place of the default introduction

    def reply(self, content: RecordDict) -> tuple[float, RecordDict | Error | None]:
        if content.config_records[CONFIG]["ask"] != "introduce":
            return self.delay, self.answer(content)
        if self.introduces:
            return self.introduction_delay, self.introduces(content)
        introduction = {"clients": list(self.clients), "identity": self.identity}
        return self.introduction_delay, messages.encode_introduction(introduction)


class ScriptedGrid:
    def __init__(self, clock: Clock, scripts: dict[int, Script]) -> None:
        self.clock = clock
        self.scripts = scripts
        self.due: dict[str, tuple[float, Message]] = {}
        self.sent: list[tuple[float, int, Message]] = []

    def get_node_ids(self) -> list[int]:
        now = self.clock.now
        return [n for n, script in self.scripts.items() if script.joins <= now < script.leaves]

    def push_messages(self, pushed: Iterable[Message]) -> list[str]:
        return [self._push(message) for message in pushed]

    def _push(self, message: Message) -> str:
        node, identity = message.metadata.dst_node_id, f"message-{len(self.sent)}"
        self.sent.append((self.clock.now, node, message))
        if node not in self.get_node_ids():
            return ""
        received = delivered(message, identity)
        delay, reply = self.scripts[node].reply(received.content)
        if reply is not None:
            self.due[identity] = (self.clock.now + delay, Message(reply, reply_to=received))
        return identity

    def pull_messages(self, identities: Iterable[str]) -> list[Message]:
        now = self.clock.now
        arrived = [one for one in identities if self.due.get(one, (math.inf,))[0] <= now]
        return [self.due.pop(one)[1] for one in reversed(arrived)]  # the order is arbitrary

    def queries(self, kind: str, node: int | None = None) -> int:
        """How many queries of this kind were sent, to one node or to all."""
        return sum(
            message.content.config_records[CONFIG]["ask"] == kind and node in (None, to)
            for _, to, message in self.sent
        )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(roster_module, "time", clock)
    return clock


def make_roster(
    clock: Clock,
    scripts: dict[int, Script],
    *,
    clients: int = 4,
    check: Callable[[], None] = lambda: None,
) -> Roster:
    grid = ScriptedGrid(clock, scripts)
    roster = Roster(
        grid,  # type: ignore[arg-type]
        clients=clients,
        identity=IDENTITY,
        deadline=DEADLINE,
        check=check,
    )
    roster.setup = SETUP_SENT
    return roster


def ask(roster: Roster, *clients: int) -> dict[int, str]:
    """Client → the client named in its reply, or why there is no reply."""
    queries = {client: messages.query("statistics", client=client) for client in clients}
    return {
        client: reply.reason
        if isinstance(reply, NoReply)
        else f"{reply.config_records[CONFIG]['from']}"
        for client, reply in roster.ask(MessageType.QUERY, queries)
    }


def test_replies_come_in_the_order_of_the_queries(clock: Clock) -> None:
    roster = make_roster(clock, {n: Script([n], delay=float(10 - 3 * n)) for n in range(4)})
    roster.wait_for_all()
    began = clock.now
    assert list(ask(roster, 2, 0, 3, 1).items()) == [(2, "2"), (0, "0"), (3, "3"), (1, "1")]
    assert clock.now - began == pytest.approx(10, abs=0.2)  # in parallel, not one after another


def test_a_client_that_never_answers_times_out_at_the_deadline(clock: Clock) -> None:
    roster = make_roster(clock, {0: Script([0, 1], answer=lambda _: None), 1: Script([2, 3])})
    roster.wait_for_all()
    began = clock.now
    late = "no answer came within 100 s"
    assert ask(roster, 0, 1, 2, 3) == {0: late, 1: late, 2: "2", 3: "3"}
    assert clock.now - began == pytest.approx(DEADLINE, abs=0.2)


def test_a_reply_after_the_deadline_is_ignored(clock: Clock) -> None:
    roster = make_roster(clock, {0: Script([0], delay=DEADLINE + 1), 1: Script([1])}, clients=2)
    roster.wait_for_all()
    assert ask(roster, 0, 1) == {0: "no answer came within 100 s", 1: "1"}
    roster.grid.grid.scripts[0].delay = 0.0  # type: ignore[attr-defined]
    clock.sleep(5)
    assert ask(roster, 1, 0) == {1: "1", 0: "0"}


def test_messages_outlive_their_deadline_by_a_grace_period(clock: Clock) -> None:
    roster = make_roster(clock, {0: Script([0])}, clients=1)
    roster.wait_for_all()
    ask(roster, 0)
    introduction, question = (message for _, _, message in roster.grid.grid.sent)  # type: ignore[attr-defined]
    assert introduction.metadata.ttl == pytest.approx(START_TIMEOUT_S + MESSAGE_GRACE_S)
    assert question.metadata.ttl == pytest.approx(DEADLINE + MESSAGE_GRACE_S)


def test_the_reason_of_a_failed_node_is_reported(clock: Clock) -> None:
    broken = Script([0], answer=lambda _: Error(code=0, reason="out of memory"))
    silent = Script([1], answer=lambda _: Error(code=0))
    roster = make_roster(clock, {0: broken, 1: silent}, clients=2)
    roster.wait_for_all()
    assert ask(roster, 0, 1) == {0: "its node failed (out of memory)", 1: "its node failed"}


def test_clients_of_a_disconnected_node_are_reported_at_once(clock: Clock) -> None:
    roster = make_roster(clock, {0: Script([0, 1]), 1: Script([2, 3], leaves=1050)})
    roster.wait_for_all()
    clock.sleep(60)
    began = clock.now
    gone = "no connected node hosts it"
    assert ask(roster, 0, 1, 2, 3) == {0: "0", 1: "1", 2: gone, 3: gone}
    assert clock.now - began < 1


def test_a_node_that_disconnects_within_a_round_times_out(clock: Clock) -> None:
    roster = make_roster(
        clock, {0: Script([0]), 1: Script([1], leaves=1010, answer=lambda _: None)}, clients=2
    )
    roster.wait_for_all()
    assert ask(roster, 0, 1) == {0: "0", 1: "no answer came within 100 s"}
    assert ask(roster, 0, 1) == {0: "0", 1: "no connected node hosts it"}


def test_a_node_that_connects_later_takes_over_its_clients(clock: Clock) -> None:
    scripts = {0: Script([0, 1]), 1: Script([2, 3], leaves=1050), 2: Script([2, 3], joins=1100)}
    roster = make_roster(clock, scripts)
    roster.wait_for_all()
    clock.sleep(60)
    assert ask(roster, 3) == {3: "no connected node hosts it"}
    clock.sleep(60)
    assert ask(roster, 3) == {3: "3"}
    assert roster.host == {0: 0, 1: 0, 2: 2, 3: 2}


def test_a_round_waits_for_a_node_that_has_just_reconnected(clock: Clock) -> None:
    scripts = {0: Script([0]), 1: Script([1], leaves=1050)}
    roster = make_roster(clock, scripts, clients=2)
    roster.wait_for_all()
    clock.sleep(60)
    assert ask(roster, 1) == {1: "no connected node hosts it"}
    scripts[1] = Script(
        [1], introduction_delay=20
    )  # the same node, as slow as a process that starts
    began = clock.now
    assert ask(roster, 1) == {1: "1"}
    assert clock.now - began == pytest.approx(20, abs=0.2)


def test_every_node_introduces_itself_once(clock: Clock) -> None:
    roster = make_roster(clock, {0: Script([0, 1]), 1: Script([2, 3])})
    roster.wait_for_all()
    for _ in range(3):
        ask(roster, 0, 1, 2, 3)
        clock.sleep(10 * RETRY_S)
    assert roster.grid.grid.queries("introduce") == 2  # type: ignore[attr-defined]


def test_wait_for_all_waits_for_nodes_that_connect_later(clock: Clock) -> None:
    roster = make_roster(
        clock, {0: Script([0, 1]), 1: Script([2, 3], joins=1040, introduction_delay=15)}
    )
    roster.wait_for_all()
    assert 1055 <= clock.now < 1057
    assert ask(roster, 3, 0) == {3: "3", 0: "0"}


def test_wait_for_all_names_the_clients_that_no_node_hosts(clock: Clock) -> None:
    roster = make_roster(clock, {0: Script([0, 1]), 1: Script([2])})
    with pytest.raises(FedlensError, match=r"1 of 4 clients .* 120 s \(3\): start their nodes"):
        roster.wait_for_all()
    assert clock.now == pytest.approx(1000 + START_TIMEOUT_S, abs=2)


def test_a_short_deadline_does_not_shorten_the_start(clock: Clock) -> None:
    roster = make_roster(clock, {0: Script([0], introduction_delay=50)}, clients=1)
    roster.deadline = 5.0
    roster.wait_for_all()
    assert clock.now == pytest.approx(1050, abs=1)
    assert roster.grid.grid.queries("introduce") == 1  # type: ignore[attr-defined]


def test_many_missing_clients_are_counted_rather_than_listed(clock: Clock) -> None:
    roster = make_roster(clock, {}, clients=12)
    with pytest.raises(FedlensError, match=r"12 of 12 .* \(0, 1, 2, 3, 4 and 7 more\)"):
        roster.wait_for_all()


def test_a_node_with_a_different_dataset_is_ignored(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    scripts = {
        0: Script(range(4), identity={"dataset": "xyz"}),
        1: Script(range(4)),
        2: Script([0], identity=None),
    }
    roster = make_roster(clock, scripts)
    roster.wait_for_all()
    assert set(roster.host.values()) == {1}
    assert "node 0 has a different dataset or partition" in caplog.text
    assert "node 2 has a different dataset or partition" in caplog.text
    ask(roster, 0, 1, 2, 3)
    assert roster.grid.grid.queries("statistics", 0) == 0  # type: ignore[attr-defined]


def test_of_two_nodes_with_the_same_client_the_second_is_a_replacement(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    roster = make_roster(clock, {5: Script([0, 1], leaves=1050), 6: Script([1, 0])}, clients=2)
    roster.wait_for_all()
    assert roster.host == {0: 5, 1: 5}
    assert "hosts clients that another node hosts too" in caplog.text
    ask(roster, 0, 1)
    assert roster.grid.grid.queries("statistics", 6) == 0  # type: ignore[attr-defined]
    clock.sleep(60)
    assert ask(roster, 0, 1) == {0: "0", 1: "1"}
    assert roster.grid.grid.queries("statistics", 6) == 2  # type: ignore[attr-defined]


class StoresSetups:
    """Replies if it has the setup; a test may make it forget setups."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.received = 0

    def __call__(self, content: RecordDict) -> RecordDict:
        if setup := messages.pop_setup(content):
            self.received += 1
            self.known.add(setup.digest)
        if content.config_records[CONFIG][SETUP] not in self.known:
            return RecordDict({UNPREPARED: ConfigRecord({"is": True})})
        return client_of(content)


def test_a_setup_is_sent_only_to_nodes_without_it(clock: Clock) -> None:
    nodes = {n: StoresSetups() for n in range(2)}
    roster = make_roster(
        clock, {n: Script([n], answer=one, delay=n) for n, one in nodes.items()}, clients=2
    )
    roster.wait_for_all()
    for _ in range(3):
        assert ask(roster, 0, 1) == {0: "0", 1: "1"}
    assert [one.received for one in nodes.values()] == [1, 1]
    nodes[1].known.clear()  # a new process without the old one's disk
    assert ask(roster, 0, 1) == {0: "0", 1: "1"}
    assert [one.received for one in nodes.values()] == [1, 2]
    roster.setup = Setup("seed: 1", {})
    assert ask(roster, 0, 1) == {0: "0", 1: "1"}
    assert [one.received for one in nodes.values()] == [2, 3]


def test_a_node_that_does_not_keep_the_setup_is_sent_it_once(clock: Clock) -> None:
    unprepared = RecordDict({UNPREPARED: ConfigRecord({"is": True})})
    roster = make_roster(
        clock, {0: Script([0], answer=lambda _: unprepared), 1: Script([1])}, clients=2
    )
    roster.wait_for_all()
    began = clock.now
    assert ask(roster, 0, 1) == {0: "its node does not keep the setup it is sent", 1: "1"}
    assert clock.now - began < 1
    assert roster.grid.grid.queries("statistics", 0) == 1  # type: ignore[attr-defined]


NO_INTRODUCTION: dict[str, Respond] = {
    "silence": lambda _: None,
    "an error": lambda _: Error(code=0, reason="no shard"),
    "a fault": lambda _: messages.encode_fault("The shard is damaged."),
    "nothing": lambda _: RecordDict(),
    "garbage": lambda _: RecordDict({CONFIG: ConfigRecord({"introduction": "{"})}),
    "unprepared": lambda _: RecordDict({UNPREPARED: ConfigRecord({"is": True})}),
}


@pytest.mark.parametrize("how", NO_INTRODUCTION)
def test_a_node_that_cannot_introduce_itself_delays_no_other(how: str, clock: Clock) -> None:
    scripts = {0: Script(introduces=NO_INTRODUCTION[how]), 1: Script(range(4), joins=1020)}
    roster = make_roster(clock, scripts)
    roster.wait_for_all()
    assert clock.now < 1022
    for _ in range(5):
        clock.sleep(RETRY_S + 1)
        began = clock.now
        assert ask(roster, 0, 3) == {0: "0", 3: "3"}
        assert clock.now == began
    assert roster.grid.grid.queries("introduce", 0) <= 6  # type: ignore[attr-defined]


@pytest.mark.parametrize("how", NO_INTRODUCTION)
def test_a_round_waits_once_for_a_missing_client_that_a_new_node_may_host(
    how: str, clock: Clock
) -> None:
    scripts = {
        0: Script([0]),
        1: Script([1], leaves=1050),
        2: Script(introduces=NO_INTRODUCTION[how], joins=1050),
    }
    roster = make_roster(clock, scripts, clients=2)
    roster.wait_for_all()
    clock.sleep(60)
    waits = []
    for _ in range(5):
        began = clock.now
        assert ask(roster, 0, 1) == {0: "0", 1: "no connected node hosts it"}
        waits.append(clock.now - began)
        clock.sleep(RETRY_S + 1)
    assert waits[0] <= INTRODUCTION_TIMEOUT_S + 1
    assert waits[1:] == [0, 0, 0, 0]


def test_a_node_that_recovers_after_a_failure_is_registered(clock: Clock) -> None:
    scripts = {0: Script([0], introduces=NO_INTRODUCTION["an error"])}
    roster = make_roster(clock, scripts, clients=1)
    with pytest.raises(FedlensError, match="1 of 1 clients"):
        roster.wait_for_all()
    scripts[0].introduces = None
    clock.sleep(RETRY_S)
    roster.wait_for_all()
    assert ask(roster, 0) == {0: "0"}


def test_a_silent_node_is_asked_again(clock: Clock) -> None:
    scripts = {0: Script([0], introduces=NO_INTRODUCTION["silence"])}
    roster = make_roster(clock, scripts, clients=1)
    with pytest.raises(FedlensError, match="1 of 1 clients"):
        roster.wait_for_all()
    scripts[0].introduces = None
    roster.wait_for_all()


class Stopped(Exception):
    pass


@pytest.mark.parametrize("during", ["the start", "an introduction", "a round"])
def test_a_stop_request_ends_any_wait(during: str, clock: Clock) -> None:
    def check() -> None:
        if clock.now >= 1070:
            raise Stopped

    silent: Respond = lambda _: None  # noqa: E731
    scripts = {
        "the start": {},
        "an introduction": {
            0: Script([0]),
            1: Script([1], leaves=1050),
            2: Script([1], joins=1055, introduces=silent),
        },
        "a round": {0: Script([0]), 1: Script([1], answer=silent)},
    }[during]
    roster = make_roster(clock, scripts, clients=2, check=check)

    def run() -> None:
        roster.wait_for_all()
        clock.sleep(60)
        ask(roster, 0, 1)

    with pytest.raises(Stopped):
        run()
    assert clock.now < 1072


def test_no_queries_give_no_replies(clock: Clock) -> None:
    roster = make_roster(clock, {0: Script([0])}, clients=1)
    roster.wait_for_all()
    assert ask(roster) == {}
