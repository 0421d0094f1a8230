"""A real federation on loopback: SuperLink, two SuperNodes with shards of their own, TLS, keys.

It gives the bits of one process (that Flower's simulation on Ray does, too, is for tests/golden).
If a node or the SuperLink fails, the run ends or can be resumed, and its records name the missing
clients.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedlens[flower]'")

from fedlens.config.compose import compose
from fedlens.config.identity import run_name
from fedlens.config.schema import Config
from fedlens.errors import FedlensError
from fedlens.experiments.flower import deployment
from fedlens.experiments.preparation.local_data import write_shards
from fedlens.experiments.run import start
from fedlens.federated.flower.deployment.child_process import ChildProcess
from fedlens.federated.flower.deployment.processes import SuperLink, registered_nodes
from fedlens.store.run_folder import RunFolder
from tests.federated.flower.links import quick_polls
from tests.integration.conftest import TINY, empty_cache, facts

EXPERIMENT = "quickstart_fedavg"
SMALL = [
    *TINY,
    *("federated.clients=4", "federated.participation=1.0", "federated.local_steps=2"),
    *("train.batch_size=16",),
]
# Statistics, scores of clients, and values at masks' positions go over the wire.
STUDY = [
    *("head=ridge", "head.freeze=true", "federated.rounds=3"),
    *("sparse.density=0.2", "sparse.rounds=1", "sparse.source=clients", "sparse.examples=4"),
]


@dataclass
class Federation:
    root: Path
    stack: ExitStack
    children: dict[str, ChildProcess] = field(default_factory=dict)
    started_in: float = 0.0  # seconds

    @property
    def deadline(self) -> float:
        """Enough for a round of healthy nodes, however busy this machine is."""
        return max(8.0, round(self.started_in / 3))

    def overrides(self, *more: str, engine: str, runs: str) -> list[str]:
        engines = {
            "serial": [],
            "flower": ["engine.deadline=90", f"engine.federation={self.root / 'federation'}"],
        }
        chosen = [f"engine={engine}", "engine.threads_per_client=1", *engines[engine]]
        return [*SMALL, *chosen, f"run.root={self.root / runs}", *more]

    def config(self, *more: str, engine: str, runs: str) -> Config:
        return compose(EXPERIMENT, self.overrides(*more, engine=engine, runs=runs))


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        made = Federation(tmp_path_factory.mktemp("flower"), stack)
        folder = made.root / "federation"
        empty_cache(patch, made.root / "cache")
        patch.setenv("OMP_NUM_THREADS", "1")
        quick_polls(patch)
        write_shards(made.config(engine="flower", runs="flower"), folder, 2)
        began = time.monotonic()
        made.children = stack.enter_context(
            deployment.local_federation(
                folder, 2, address="127.0.0.1:0", insecure=False, print_line=lambda line: None
            )
        )
        made.started_in = time.monotonic() - began
        yield made


def folder_of(config: Config) -> RunFolder:
    return RunFolder(Path(config.run.root) / run_name(config))


def after_rounds(config: Config, rounds: int, do: Callable[[], None]) -> Future[None]:
    """Calls `do` in a thread when so many rounds are recorded; `result` fails if it never did."""

    def wait() -> None:
        journal = folder_of(config).journal("metrics")
        wait_until(
            lambda: journal.path.exists() and len(list(journal.read())) >= rounds, seconds=600
        )
        do()

    promise: Future[None] = Future()

    def keep_promise() -> None:
        try:
            promise.set_result(wait())
        except BaseException as error:
            promise.set_exception(error)

    threading.Thread(target=keep_promise, daemon=True).start()  # a failed test does not wait for it
    return promise


def wait_until(condition: Callable[[], bool], *, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"the condition was not met within {seconds:g} s"
        time.sleep(0.05)


def test_a_deployment_gives_the_bits_of_one_process_also_if_its_superlink_is_restarted(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics, scores and the first round before the restart, the other rounds after it."""
    with monkeypatch.context() as patch:  # a cache of its own: the nodes find nothing in theirs
        empty_cache(patch, federation.root / "cache-serial")
        expected = facts(start(federation.config(*STUDY, engine="serial", runs="serial")))
    config = federation.config(*STUDY, engine="flower", runs="flower")
    monkeypatch.setattr(deployment, "LOST_AFTER_S", 3.0)
    link = federation.children["superlink"]
    assert isinstance(link, SuperLink)
    ids = {one.name: one.node_id for one in registered_nodes(link.connection)}
    killer = after_rounds(config, 1, link.close)
    with pytest.raises(FedlensError, match="does not answer"):
        start(config)
    killer.result(30)
    assert folder_of(config).result is None
    folder = federation.root / "federation"
    federation.children["superlink"] = federation.stack.enter_context(
        deployment.superlink(folder, address=link.connection.address, insecure=False)
    )
    assert {one.name: one.node_id for one in registered_nodes(link.connection)} == ids
    assert facts(start(config)) == expected
    sessions = (folder_of(config).manifest or {})["sessions"]
    assert len(sessions) == 2
    assert not [one for one in sessions if "token" in one["command"]]  # of Flower's own process


def test_a_run_that_the_server_refuses_is_one_sentence_without_a_traceback(
    federation: Federation, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(FedlensError, match="were split for another experiment") as refused:
        start(federation.config("seed=7", engine="flower", runs="refused"))
    assert len(str(refused.value).splitlines()) == 1
    lines = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("run quickstart_fedavg") for line in lines)  # the server's log
    assert not [line for line in lines if "Traceback" in line or "ERROR" in line]
    assert not [line for line in lines if "another experiment" in line]  # it is not said twice


def test_clients_of_a_slow_or_killed_node_are_left_out_and_named(federation: Federation) -> None:
    deadline = federation.deadline
    options = ["federated.rounds=4", f"engine.deadline={deadline}"]
    config = federation.config(*options, engine="flower", runs="faults")
    node = federation.children["node-1"]
    supernode = federation.root / "federation" / "logs" / "node-1.log"

    def is_working() -> bool:
        """Whether the node has received a message that it has not answered."""
        log = supernode.read_text("utf-8")
        return log.count("Receiving: ") > log.count("Sending: ")

    def freeze() -> None:
        os.kill(node.pid, signal.SIGSTOP)
        wait_until(is_working, seconds=deadline)  # it stays in the middle of a round

    def kill() -> None:
        freeze()
        os.kill(node.pid, signal.SIGKILL)

    disturbances = [
        after_rounds(config, 1, freeze),
        after_rounds(config, 2, lambda: os.kill(node.pid, signal.SIGCONT)),
        after_rounds(config, 3, kill),
    ]
    folder = start(config)
    for disturbance in disturbances:
        disturbance.result(30)
    records = {record["round"]: record for record in folder.journal("metrics").read()}
    assert folder.state() == "finished"
    assert all(record["participants"] == [0, 1, 2, 3] for record in records.values())
    for number in (1, 3):
        assert records[number]["clients"] == [0, 1, 2, 3]
    for number in (2, 4):  # frozen, and killed
        missing = [int(client) for client in records[number]["rejected"]]
        assert missing
        assert set(missing) <= {2, 3}  # one may have answered just before
        assert records[number]["clients"] == [c for c in range(4) if c not in missing]
    assert all(f"within {deadline:g} s" in why for why in records[2]["rejected"].values())
