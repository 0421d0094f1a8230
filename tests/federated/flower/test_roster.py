"""Whoever is slow, silent, gone, a stranger or a liar: questions end by their deadline, in words.

Time is a number here, and nodes are scripts: what each answers, after how long, while it is there.
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
from fedlens.federated.flower import roster as module
from fedlens.federated.flower.messages import CONFIG, SETUP, UNPREPARED
from fedlens.federated.flower.roster import GATHERING, GRACE, INTRODUCTION, SILENCE, Fleet, Missing
from fedlens.federated.tasks import Setup
from tests.federated.flower.inprocess import delivered

IDENTITY = {"of": "abc"}
DEADLINE = 100.0
SENT = Setup("seed: 0", {"weight": torch.zeros(2)})

Answer = Callable[[RecordDict], RecordDict | Error | None]


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < 5000, "this would wait for ever"


def name_of(content: RecordDict) -> RecordDict:
    """The usual answer: which client was asked."""
    return RecordDict({CONFIG: ConfigRecord({"from": content.config_records[CONFIG]["client"]})})


@dataclass
class Script:
    clients: Iterable[int] = ()
    answer: Answer = name_of
    delay: float = 0.0  # before an answer
    slowness: float = 0.0  # before an introduction
    joins: float = -math.inf  # by the clock
    leaves: float = math.inf
    identity: object = field(default_factory=lambda: IDENTITY)
    introduces: Answer | None = None  # instead of the usual

    def reply(self, content: RecordDict) -> tuple[float, RecordDict | Error | None]:
        if content.config_records[CONFIG]["ask"] != "introduce":
            return self.delay, self.answer(content)
        if self.introduces:
            return self.slowness, self.introduces(content)
        told = {"clients": list(self.clients), "identity": self.identity}
        return self.slowness, messages.introduction(told)


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
        asked = delivered(message, identity)
        delay, found = self.scripts[node].reply(asked.content)
        if found is not None:
            self.due[identity] = (self.clock.now + delay, Message(found, reply_to=asked))
        return identity

    def pull_messages(self, identities: Iterable[str]) -> list[Message]:
        come = [one for one in identities if self.due.get(one, (math.inf,))[0] <= self.clock.now]
        return [self.due.pop(one)[1] for one in reversed(come)]  # in no order one could rely on

    def asked(self, what: str, node: int | None = None) -> int:
        """How often somebody was asked for this."""
        return sum(
            message.content.config_records[CONFIG]["ask"] == what and node in (None, to)
            for _, to, message in self.sent
        )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def fleet(
    clock: Clock,
    scripts: dict[int, Script],
    *,
    clients: int = 4,
    check: Callable[[], None] = lambda: None,
) -> Fleet:
    grid = ScriptedGrid(clock, scripts)
    found = Fleet(
        grid,  # type: ignore[arg-type]
        clients=clients,
        identity=IDENTITY,
        deadline=DEADLINE,
        check=check,
    )
    found.setup = SENT
    return found


def ask(ships: Fleet, *clients: int) -> dict[int, str]:
    """Client → whose answer came, or why none did."""
    questions = {client: messages.question("statistics", client=client) for client in clients}
    return {
        client: found.why
        if isinstance(found, Missing)
        else f"{found.config_records[CONFIG]['from']}"
        for client, found in ships.ask(MessageType.QUERY, questions)
    }


def test_answers_come_in_the_order_of_the_questions_whoever_is_faster(clock: Clock) -> None:
    ships = fleet(clock, {n: Script([n], delay=float(10 - 3 * n)) for n in range(4)})
    ships.gather()
    began = clock.now
    assert list(ask(ships, 2, 0, 3, 1).items()) == [(2, "2"), (0, "0"), (3, "3"), (1, "1")]
    assert clock.now - began == pytest.approx(10, abs=0.2)  # all at once, not one after another


def test_whoever_never_answers_is_given_up_at_the_deadline(clock: Clock) -> None:
    ships = fleet(clock, {0: Script([0, 1], answer=lambda _: None), 1: Script([2, 3])})
    ships.gather()
    began = clock.now
    late = "no answer came within 100 s"
    assert ask(ships, 0, 1, 2, 3) == {0: late, 1: late, 2: "2", 3: "3"}
    assert clock.now - began == pytest.approx(DEADLINE, abs=0.2)


def test_an_answer_after_the_deadline_is_nobodys(clock: Clock) -> None:
    ships = fleet(clock, {0: Script([0], delay=DEADLINE + 1), 1: Script([1])}, clients=2)
    ships.gather()
    assert ask(ships, 0, 1) == {0: "no answer came within 100 s", 1: "1"}
    ships.grid.grid.scripts[0].delay = 0.0  # type: ignore[attr-defined]
    clock.sleep(5)
    assert ask(ships, 1, 0) == {1: "1", 0: "0"}


def test_messages_outlive_their_deadline_by_a_grace(clock: Clock) -> None:
    ships = fleet(clock, {0: Script([0])}, clients=1)
    ships.gather()
    ask(ships, 0)
    introduction, question = (message for _, _, message in ships.grid.grid.sent)  # type: ignore[attr-defined]
    assert introduction.metadata.ttl == pytest.approx(GATHERING + GRACE)
    assert question.metadata.ttl == pytest.approx(DEADLINE + GRACE)


def test_a_node_that_fails_says_why(clock: Clock) -> None:
    broken = Script([0], answer=lambda _: Error(code=0, reason="out of memory"))
    silent = Script([1], answer=lambda _: Error(code=0))
    ships = fleet(clock, {0: broken, 1: silent}, clients=2)
    ships.gather()
    assert ask(ships, 0, 1) == {0: "its node failed (out of memory)", 1: "its node failed"}


def test_a_node_gone_between_rounds_is_missed_at_once(clock: Clock) -> None:
    ships = fleet(clock, {0: Script([0, 1]), 1: Script([2, 3], leaves=1050)})
    ships.gather()
    clock.sleep(60)
    began = clock.now
    gone = "no connected node hosts it"
    assert ask(ships, 0, 1, 2, 3) == {0: "0", 1: "1", 2: gone, 3: gone}
    assert clock.now - began < 1


def test_a_node_that_leaves_within_a_round_ends_with_the_deadline(clock: Clock) -> None:
    ships = fleet(
        clock, {0: Script([0]), 1: Script([1], leaves=1010, answer=lambda _: None)}, clients=2
    )
    ships.gather()
    assert ask(ships, 0, 1) == {0: "0", 1: "no answer came within 100 s"}
    assert ask(ships, 0, 1) == {0: "0", 1: "no connected node hosts it"}


def test_a_node_that_joins_later_takes_its_clients(clock: Clock) -> None:
    scripts = {0: Script([0, 1]), 1: Script([2, 3], leaves=1050), 2: Script([2, 3], joins=1100)}
    ships = fleet(clock, scripts)
    ships.gather()
    clock.sleep(60)
    assert ask(ships, 3) == {3: "no connected node hosts it"}
    clock.sleep(60)
    assert ask(ships, 3) == {3: "3"}
    assert ships.host == {0: 0, 1: 0, 2: 2, 3: 2}


def test_a_round_waits_a_little_for_a_node_that_has_just_come_back(clock: Clock) -> None:
    scripts = {0: Script([0]), 1: Script([1], leaves=1050)}
    ships = fleet(clock, scripts, clients=2)
    ships.gather()
    clock.sleep(60)
    assert ask(ships, 1) == {1: "no connected node hosts it"}
    scripts[1] = Script([1], slowness=20)  # the same node, and as slow as a program that starts
    began = clock.now
    assert ask(ships, 1) == {1: "1"}
    assert clock.now - began == pytest.approx(20, abs=0.2)


def test_everybody_introduces_himself_once(clock: Clock) -> None:
    ships = fleet(clock, {0: Script([0, 1]), 1: Script([2, 3])})
    ships.gather()
    for _ in range(3):
        ask(ships, 0, 1, 2, 3)
        clock.sleep(10 * SILENCE)
    assert ships.grid.grid.asked("introduce") == 2  # type: ignore[attr-defined]


def test_gathering_waits_for_those_who_are_to_come(clock: Clock) -> None:
    ships = fleet(clock, {0: Script([0, 1]), 1: Script([2, 3], joins=1040, slowness=15)})
    ships.gather()
    assert 1055 <= clock.now < 1057
    assert ask(ships, 3, 0) == {3: "3", 0: "0"}


def test_gathering_says_whom_nobody_hosts(clock: Clock) -> None:
    ships = fleet(clock, {0: Script([0, 1]), 1: Script([2])})
    with pytest.raises(FedlensError, match=r"1 of 4 clients .* 120 s \(3\): start their nodes"):
        ships.gather()
    assert clock.now == pytest.approx(1000 + GATHERING, abs=2)


def test_a_short_deadline_is_for_answers_and_not_for_programs_that_start(clock: Clock) -> None:
    ships = fleet(clock, {0: Script([0], slowness=50)}, clients=1)
    ships.deadline = 5.0
    ships.gather()
    assert clock.now == pytest.approx(1050, abs=1)
    assert ships.grid.grid.asked("introduce") == 1  # type: ignore[attr-defined]


def test_many_missing_clients_are_counted_rather_than_listed(clock: Clock) -> None:
    ships = fleet(clock, {}, clients=12)
    with pytest.raises(FedlensError, match=r"12 of 12 .* \(0, 1, 2, 3, 4 and 7 more\)"):
        ships.gather()


def test_a_node_of_another_world_is_left_out(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    scripts = {
        0: Script(range(4), identity={"of": "xyz"}),
        1: Script(range(4)),
        2: Script([0], identity=None),
    }
    ships = fleet(clock, scripts)
    ships.gather()
    assert set(ships.host.values()) == {1}
    assert "node 0 has data of another world" in caplog.text
    assert "node 2 has data of another world" in caplog.text
    ask(ships, 0, 1, 2, 3)
    assert ships.grid.grid.asked("statistics", 0) == 0  # type: ignore[attr-defined]


def test_of_two_nodes_with_the_same_client_one_is_used_and_the_other_steps_in(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    ships = fleet(clock, {5: Script([0, 1], leaves=1050), 6: Script([1, 0])}, clients=2)
    ships.gather()
    assert ships.host == {0: 5, 1: 5}
    assert "hosts clients that another node has" in caplog.text
    ask(ships, 0, 1)
    assert ships.grid.grid.asked("statistics", 6) == 0  # type: ignore[attr-defined]
    clock.sleep(60)
    assert ask(ships, 0, 1) == {0: "0", 1: "1"}
    assert ships.grid.grid.asked("statistics", 6) == 2  # type: ignore[attr-defined]


class Forgetful:
    """Answers under a setup it has been sent; it may lose it."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.sent = 0

    def __call__(self, content: RecordDict) -> RecordDict:
        if found := messages.detached(content):
            self.sent += 1
            self.known.add(found.digest)
        if content.config_records[CONFIG][SETUP] not in self.known:
            return RecordDict({UNPREPARED: ConfigRecord({"is": True})})
        return name_of(content)


def test_a_setup_is_sent_to_whoever_lacks_it_and_no_more(clock: Clock) -> None:
    nodes = {n: Forgetful() for n in range(2)}
    ships = fleet(
        clock, {n: Script([n], answer=one, delay=n) for n, one in nodes.items()}, clients=2
    )
    ships.gather()
    for _ in range(3):
        assert ask(ships, 0, 1) == {0: "0", 1: "1"}
    assert [one.sent for one in nodes.values()] == [1, 1]
    nodes[1].known.clear()  # a new process without the old one's disk
    assert ask(ships, 0, 1) == {0: "0", 1: "1"}
    assert [one.sent for one in nodes.values()] == [1, 2]
    ships.setup = Setup("seed: 1", {})
    assert ask(ships, 0, 1) == {0: "0", 1: "1"}
    assert [one.sent for one in nodes.values()] == [2, 3]


def test_a_node_that_is_never_prepared_is_told_once_and_given_up(clock: Clock) -> None:
    unprepared = RecordDict({UNPREPARED: ConfigRecord({"is": True})})
    ships = fleet(clock, {0: Script([0], answer=lambda _: unprepared), 1: Script([1])}, clients=2)
    ships.gather()
    began = clock.now
    assert ask(ships, 0, 1) == {0: "its node does not keep what it is told", 1: "1"}
    assert clock.now - began < 1
    assert ships.grid.grid.asked("statistics", 0) == 1  # type: ignore[attr-defined]


NO_WORD: dict[str, Answer] = {
    "silence": lambda _: None,
    "an error": lambda _: Error(code=0, reason="no shard"),
    "a refusal": lambda _: messages.refusal("The shard is damaged."),
    "nothing": lambda _: RecordDict(),
    "garbage": lambda _: RecordDict({CONFIG: ConfigRecord({"introduction": "{"})}),
    "unprepared": lambda _: RecordDict({UNPREPARED: ConfigRecord({"is": True})}),
}


@pytest.mark.parametrize("how", NO_WORD)
def test_a_node_that_cannot_introduce_itself_holds_nobody_up(how: str, clock: Clock) -> None:
    scripts = {0: Script(introduces=NO_WORD[how]), 1: Script(range(4), joins=1020)}
    ships = fleet(clock, scripts)
    ships.gather()
    assert clock.now < 1022
    for _ in range(5):
        clock.sleep(SILENCE + 1)
        began = clock.now
        assert ask(ships, 0, 3) == {0: "0", 3: "3"}
        assert clock.now == began
    assert ships.grid.grid.asked("introduce", 0) <= 6  # type: ignore[attr-defined]


@pytest.mark.parametrize("how", NO_WORD)
def test_a_missing_client_is_waited_for_once_if_a_stranger_may_host_it(
    how: str, clock: Clock
) -> None:
    scripts = {
        0: Script([0]),
        1: Script([1], leaves=1050),
        2: Script(introduces=NO_WORD[how], joins=1050),
    }
    ships = fleet(clock, scripts, clients=2)
    ships.gather()
    clock.sleep(60)
    waits = []
    for _ in range(5):
        began = clock.now
        assert ask(ships, 0, 1) == {0: "0", 1: "no connected node hosts it"}
        waits.append(clock.now - began)
        clock.sleep(SILENCE + 1)
    assert waits[0] <= INTRODUCTION + 1
    assert waits[1:] == [0, 0, 0, 0]


def test_a_node_mended_after_a_failure_is_welcome(clock: Clock) -> None:
    scripts = {0: Script([0], introduces=NO_WORD["an error"])}
    ships = fleet(clock, scripts, clients=1)
    with pytest.raises(FedlensError, match="1 of 1 clients"):
        ships.gather()
    scripts[0].introduces = None
    clock.sleep(SILENCE)
    ships.gather()
    assert ask(ships, 0) == {0: "0"}


def test_a_silent_node_is_asked_again_in_the_end(clock: Clock) -> None:
    scripts = {0: Script([0], introduces=NO_WORD["silence"])}
    ships = fleet(clock, scripts, clients=1)
    with pytest.raises(FedlensError, match="1 of 1 clients"):
        ships.gather()
    scripts[0].introduces = None
    ships.gather()


class Stopped(Exception):
    pass


@pytest.mark.parametrize("during", ["gathering", "an introduction", "a round"])
def test_a_request_to_stop_ends_any_wait(during: str, clock: Clock) -> None:
    def check() -> None:
        if clock.now >= 1070:
            raise Stopped

    silent: Answer = lambda _: None  # noqa: E731
    scripts = {
        "gathering": {},
        "an introduction": {
            0: Script([0]),
            1: Script([1], leaves=1050),
            2: Script([1], joins=1055, introduces=silent),
        },
        "a round": {0: Script([0]), 1: Script([1], answer=silent)},
    }[during]
    ships = fleet(clock, scripts, clients=2, check=check)

    def play() -> None:
        ships.gather()
        clock.sleep(60)
        ask(ships, 0, 1)

    with pytest.raises(Stopped):
        play()
    assert clock.now < 1072


def test_a_question_to_nobody_is_no_question(clock: Clock) -> None:
    ships = fleet(clock, {0: Script([0])}, clients=1)
    ships.gather()
    assert ask(ships) == {}
