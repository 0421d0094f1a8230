"""The same experiment through Flower's apps gives the same participants, metrics and parameters.

Here messages take no network: every node is a context of its own, with its own shard on disk.
Whatever goes wrong on one is as if that client had been left out in one process, and is said.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedlens[flower]'")

from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict

from fedlens import files
from fedlens.config.compose import compose
from fedlens.config.schema import Config
from fedlens.errors import FedlensError
from fedlens.experiments.flower import apps
from fedlens.experiments.flower.clients import SERVER_SHARD
from fedlens.experiments.local_data import deal, world
from fedlens.experiments.run import start
from fedlens.experiments.trained_head import head_seed
from fedlens.federated import sampling
from fedlens.federated.client import Task, Update
from fedlens.federated.engines.serial import Serial
from fedlens.federated.flower import client_app, roster
from fedlens.federated.flower.messages import ARRAYS, CONFIG, METRICS, VALUES, lost
from fedlens.federated.tasks import Setup, Work
from fedlens.models import backbones
from fedlens.params import Params
from fedlens.runtime.stop import Interrupted, StopRequest
from fedlens.store.checkpoints import TENSORS
from fedlens.store.run_folder import RunFolder
from tests.federated.flower.inprocess import InProcessGrid, Spoil
from tests.integration.conftest import FEDERATED, ON_FEATURES, TINY, Patience, facts

NODES = 2
ROUNDS = ["federated.rounds=2", "checkpoint.every=1"]
ONE_BY_ONE = [*ON_FEATURES, "engine.vectorise=false"]  # heads on features: little work, all the way
SPARSE = ["sparse.density=0.2", "sparse.rounds=2", "sparse.source=clients", "sparse.examples=4"]
VARIANTS = {
    "fedavg": [],
    "scaffold": ["algorithm.scaffold=true"],
    "fedprox": [*ONE_BY_ONE, "algorithm.proximal=0.1"],
    "fedadam": [*ONE_BY_ONE, "algorithm.server=adam", "algorithm.server_lr=0.01"],
    "fednova": [
        *ONE_BY_ONE, "algorithm.aggregator=normalised_mean", "federated.fewest_local_steps=1",
    ],
    "median": [*ONE_BY_ONE, "algorithm.aggregator=median"],
    "ties": [*ONE_BY_ONE, "algorithm.aggregator=ties"],
    "dropout of clients": [*ONE_BY_ONE, "federated.dropout=0.4"],
    "one class each": [*ONE_BY_ONE, "partition=classes", "partition.classes_per_client=20"],
    "heads on features, one by one": ONE_BY_ONE,
    "ridge head, frozen": ["head=ridge", "head.freeze=true"],
    "trained head, frozen": ["head=trained", "head.steps=8", "head.freeze=true"],
    "sparse, scores of clients": [*SPARSE, "head=ridge", "head.freeze=true"],
    "sparse, votes of clients": [*SPARSE, "sparse.voting=majority"],
    "sparse scaffold": [*SPARSE, "algorithm.scaffold=true"],
}  # fmt: skip

# With SCAFFOLD, for then it matters what is remembered of a client, too.
QUICK = [*FEDERATED, *ROUNDS, *ONE_BY_ONE, "algorithm.scaffold=true"]

Deployed = Callable[..., InProcessGrid]


@lru_cache
def composed(*words: str) -> Config:
    return compose("quickstart_fedavg", [*TINY, *words])


def experiment(root: Path, *words: str) -> Config:
    config = composed(*words)
    return replace(config, run=replace(config.run, root=str(root)))


def over_flower(config: Config) -> Config:
    """The same experiment, by Flower, in a folder of its own."""
    engine = replace(config.engine, name="flower")
    return replace(config, engine=engine, run=replace(config.run, root=f"{config.run.root}-flower"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For what tests may share: dealt data, the nodes' cache, runs to compare with."""
    return tmp_path_factory.mktemp("flower")


@pytest.fixture
def deployed(place: Path, monkeypatch: pytest.MonkeyPatch) -> Deployed:
    """A federation of two nodes; nothing comes from the cache of the run it is compared with."""

    def make(config: Config, spoil: Spoil | None = None, *, cache: Path | None = None) -> Any:
        name = hashlib.sha256(json.dumps(world(config)).encode()).hexdigest()[:16]
        if not (folder := place / name).exists():
            deal(config, folder, NODES)
        monkeypatch.setenv(SERVER_SHARD, str(folder / "server"))
        monkeypatch.setenv("FEDLENS_CACHE", str(cache or place / "cache"))
        nodes: dict[int, dict[str, str | int]] = {
            100 + i: {apps.SHARD: str(folder / f"node-{i}")} for i in range(NODES)
        }
        return InProcessGrid(apps.client, nodes, spoil)

    return make


@pytest.fixture(autouse=True)
def _forget() -> None:
    """A process of its own would know nothing of other tests' federations."""
    forget()


def forget() -> None:
    for remembered in (apps._deployed, apps._shard, client_app._stored):
        remembered.cache_clear()


def parameters(folder: RunFolder) -> dict[str, bytes]:
    """Of the newest checkpoint, bit by bit."""
    return {name: value.numpy().tobytes() for name, value in _newest(folder).items()}


def _newest(folder: RunFolder) -> Params:
    newest = max(path for path in folder.checkpoints.iterdir())
    return load_file(newest / TENSORS)


def records(folder: RunFolder) -> list[dict[str, Any]]:
    return list(folder.journal("metrics").read())


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda name: name.replace(" ", "-"))
def test_flower_gives_the_bits_of_one_process(
    variant: str, tmp_path: Path, deployed: Deployed
) -> None:
    alone = experiment(tmp_path / "runs", *FEDERATED, *ROUNDS, *VARIANTS[variant])
    serial = start(alone)
    config = over_flower(alone)
    found = start(config, grid=deployed(config))
    assert facts(found) == facts(serial)
    assert parameters(found) == parameters(serial)


# Heads that train together as one batched product add up in another order: the last bits differ.
TOLERANCE = 1e-6


def test_vectorised_heads_agree_but_for_the_last_bits(tmp_path: Path, deployed: Deployed) -> None:
    words = [*FEDERATED, *ROUNDS, *ON_FEATURES]
    together = experiment(tmp_path / "together", *words)
    one_by_one = experiment(tmp_path / "one", *words, "engine.vectorise=false")
    serial = [start(together), start(one_by_one)]
    config = over_flower(together)
    found = start(config, grid=deployed(config))
    for other in serial:
        theirs = _newest(other)
        for name, value in _newest(found).items():
            furthest = float((value - theirs[name]).abs().max())
            assert furthest <= TOLERANCE * float(value.abs().max())
        for mine, yours in zip(records(found), records(other), strict=True):
            exact = ("participants", "clients", "bytes_up", "bytes_down", "lr")
            assert all(mine[key] == yours[key] for key in exact)
            assert mine["client_losses"] == pytest.approx(yours["client_losses"], rel=TOLERANCE)


Harm = Callable[[Message], Message | None]  # what arrives instead of a reply


def asks(message: Message, **wanted: object) -> bool:
    """Whether a message asks for this."""
    said = message.content.config_records[CONFIG]
    return all(said.get(key) == value for key, value in wanted.items())


def values(reply: Message) -> Any:
    return reply.content.array_records[ARRAYS][VALUES].numpy().copy()


def with_values(change: Callable[[Any], Array]) -> Harm:
    def harm(reply: Message) -> Message:
        reply.content[ARRAYS] = ArrayRecord({VALUES: change(values(reply))})
        return reply

    return harm


def with_metrics(**changed: float) -> Harm:
    def harm(reply: Message) -> Message:
        reply.content[METRICS] = MetricRecord({**reply.content.metric_records[METRICS], **changed})
        return reply

    return harm


def instead(what: RecordDict | Error) -> Harm:
    def harm(reply: Message) -> Message:
        told = reply.metadata
        asked = Message(RecordDict(), dst_node_id=told.src_node_id, message_type=told.message_type)
        asked.metadata.__dict__["_message_id"] = told.reply_to_message_id
        return Message(what, reply_to=asked)

    return harm


def poisoned(found: Any) -> Array:
    found[3] = np.nan
    return Array(found)


def garbage(data: bytes) -> Harm:
    return with_values(lambda _: Array("float32", (3,), "numpy.ndarray", data))


SPOILED: dict[str, tuple[Harm, str]] = {
    "values that are not numbers": (with_values(poisoned), "not finite"),
    "too few values": (with_values(lambda found: Array(found[:-1])), "values of shape"),
    "a matrix": (with_values(lambda found: Array(found[None])), "values of shape"),
    "doubles": (with_values(lambda found: Array(found.astype(np.float64))), "torch.float64"),
    "garbage": (garbage(b"PK\3\4 and so on"), "cannot be read"),
    "no bytes": (garbage(b""), "cannot be read"),
    "a loss that is no number": (with_metrics(loss=float("nan")), "metrics are not finite"),
    "no example seen": (with_metrics(seen=0), "it saw no example"),
    "an error": (instead(Error(code=0, reason="killed")), "its node failed (killed)"),
    "an empty answer": (instead(RecordDict()), "its answer says nothing"),
    "no answer": (lambda reply: None, "no answer came within 600 s"),
}


def spoiling(harm: Harm, **wanted: object) -> Spoil:
    """Harms the answers to such questions."""

    def spoil(node: int, asked: Message, reply: Message) -> Message | None:
        answers = not reply.has_error() and ARRAYS in reply.content  # it is prepared
        return harm(reply) if answers and asks(asked, **wanted) else reply

    return spoil


class Impatient:
    """Time that flies as soon as somebody waits; stands in for the module `time` in `fleet`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "time", Impatient())


@pytest.fixture(scope="module")
def serial(place: Path) -> RunFolder:
    return start(experiment(place / "serial", *QUICK))


@pytest.fixture(scope="module")
def left_out(serial: RunFolder) -> int:
    """Somebody who takes part in round 1, neither first nor last."""
    client: int = records(serial)[0]["clients"][1]
    return client


@pytest.fixture(scope="module")
def without_one(place: Path, left_out: int) -> RunFolder:
    """The serial run, had it not had one client's update in round 1."""
    updates = Serial.updates

    def some(self: Serial, parameters: Params, tasks: Sequence[Task]) -> Iterator[Update]:
        for update in updates(self, parameters, tasks):
            task = update.task
            gone = (task.round, task.client) == (1, left_out)
            yield lost(task, "it is left out") if gone else update

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Serial, "updates", some)
        return start(experiment(place / "without-one", *QUICK))


def same_but_for_reasons(found: RunFolder, expected: RunFolder) -> dict[str, str]:
    """Asserts that two runs left out the same clients and are equal; says why `found` did."""
    ours, theirs = records(found), records(expected)
    why: dict[str, str] = {}
    for mine, yours in zip(ours, theirs, strict=True):
        rejected = mine.pop("rejected", {})
        assert rejected.keys() == yours.pop("rejected", {}).keys()
        why |= rejected
    assert ours == theirs
    assert parameters(found) == parameters(expected)
    return why


@pytest.mark.parametrize("how", SPOILED)
def test_a_bad_answer_is_left_out_and_named_and_the_others_count(
    how: str, without_one: RunFolder, left_out: int, tmp_path: Path, deployed: Deployed
) -> None:
    harm, why = SPOILED[how]
    config = over_flower(experiment(tmp_path / "runs", *QUICK))
    grid = deployed(config, spoiling(harm, round=1, client=left_out))
    said = same_but_for_reasons(start(config, grid=grid), without_one)
    assert why in said[str(left_out)]


def test_an_app_that_fails_is_a_fault_of_its_client(
    without_one: RunFolder,
    left_out: int,
    tmp_path: Path,
    deployed: Deployed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train = apps.Node.train

    def fail(self: apps.Node, setup: Setup, work: Work, *more: Any) -> Update:
        if (work.round, work.client) == (1, left_out):
            raise RuntimeError("a bug in the app")
        return train(self, setup, work, *more)

    monkeypatch.setattr(apps.Node, "train", fail)
    config = over_flower(experiment(tmp_path / "runs", *QUICK))
    said = same_but_for_reasons(start(config, grid=deployed(config)), without_one)
    assert "a bug in the app" in said[str(left_out)]


def test_a_bad_answer_ends_a_strict_run_in_one_sentence(
    left_out: int, tmp_path: Path, deployed: Deployed
) -> None:
    strict = experiment(tmp_path / "runs", *QUICK, "federated.fail_on_bad_update=true")
    config = over_flower(strict)
    harm, _ = SPOILED["values that are not numbers"]
    grid = deployed(config, spoiling(harm, round=1, client=left_out))
    why = rf"client {left_out} in round 1 was rejected: .* not finite \(federated.fail_on_bad_up"
    with pytest.raises(FedlensError, match=why):
        start(config, grid=grid)


@pytest.mark.parametrize("how", ["no answer", "an error", "garbage"])
def test_a_round_without_any_answer_ends_the_run_which_goes_on_once_nodes_are_back(
    how: str, serial: RunFolder, tmp_path: Path, deployed: Deployed
) -> None:
    harm, why = SPOILED[how]
    config = over_flower(experiment(tmp_path / "runs", *QUICK))
    grid = deployed(config, spoiling(harm, round=2))
    with pytest.raises(FedlensError) as ended:
        start(config, grid=grid)
    said = str(ended.value)
    assert "None of the 3 clients of round 2 gave an update" in said
    assert why in said
    assert "run the same command again" in said
    grid.spoil = None
    found = start(config, grid=grid)
    assert facts(found) == facts(serial)
    assert parameters(found) == parameters(serial)


def test_a_run_without_nodes_says_so_and_goes_on_once_they_are_there(
    serial: RunFolder, tmp_path: Path, deployed: Deployed
) -> None:
    config = over_flower(experiment(tmp_path / "runs", *QUICK))
    grid = deployed(config)
    nodes, grid.contexts = grid.contexts, {}
    with pytest.raises(FedlensError, match="5 of 5 clients were hosted by no connected node"):
        start(config, grid=grid)
    grid.contexts = nodes
    assert facts(start(config, grid=grid)) == facts(serial)


def interrupted(
    config: Config, grid: InProcessGrid, patience: Patience, monkeypatch: pytest.MonkeyPatch
) -> bool:
    with monkeypatch.context() as patch:
        patch.setattr(StopRequest, "check", lambda self: patience.check(self))
        try:
            start(config, grid=grid)
        except Interrupted:
            return True
    return False


def test_a_run_interrupted_again_and_again_goes_on_to_the_same_bits(
    serial: RunFolder, tmp_path: Path, deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = over_flower(experiment(tmp_path / "runs", *QUICK))
    grid = deployed(config)
    stops = 0
    for points in (1, 3, 5, 7):
        stops += interrupted(config, grid, Patience(points), monkeypatch)
        forget()
    assert stops >= 2
    found = start(config, grid=grid)
    assert facts(found) == facts(serial)
    assert parameters(found) == parameters(serial)


ASKED = {
    "statistics": ["head=ridge"],
    "sensitivity": ["train=full", *SPARSE],
    "ballot": ["train=full", *SPARSE, "sparse.voting=majority"],
}
ALL_ALIKE = with_values(lambda found: Array(np.zeros_like(found)))
UNUSABLE = [
    ("statistics", *SPOILED["no answer"]),
    ("statistics", *SPOILED["garbage"]),
    ("statistics", *SPOILED["values that are not numbers"]),
    ("sensitivity", *SPOILED["an error"]),
    ("sensitivity", instead(RecordDict()), "sent what cannot be used"),
    ("ballot", *SPOILED["no answer"]),
    ("ballot", ALL_ALIKE, "ranks nothing"),
]


@pytest.mark.parametrize(("what", "harm", "why"), UNUSABLE)
def test_a_sum_that_lacks_a_clients_part_is_not_taken_and_the_client_named(
    what: str, harm: Harm, why: str, tmp_path: Path, deployed: Deployed
) -> None:
    config = over_flower(experiment(tmp_path / "runs", *QUICK, *ASKED[what]))
    grid = deployed(config, spoiling(harm, ask=what, client=3), cache=tmp_path / "cache")
    with pytest.raises(FedlensError, match="Client 3 ") as ended:
        start(config, grid=grid)
    assert why in str(ended.value)


def test_a_head_is_not_trained_without_a_client_it_needs(
    tmp_path: Path, deployed: Deployed
) -> None:
    alone = experiment(tmp_path / "runs", *QUICK, "head=trained", "head.steps=2")
    config = over_flower(alone)
    missing = sampling.cohort(head_seed(config), 1, clients=5, size=3)[1]
    harm, why = SPOILED["an error"]
    grid = deployed(config, spoiling(harm, stage="head", client=missing))
    with pytest.raises(FedlensError, match=f"Client {missing} did not train the head") as ended:
        start(config, grid=grid)
    assert why in str(ended.value)
    grid.spoil = None
    assert facts(start(config, grid=grid)) == facts(start(alone))


def test_a_setup_damaged_on_a_nodes_disk_is_sent_again(
    serial: RunFolder, tmp_path: Path, deployed: Deployed
) -> None:
    def spoil(node: int, asked: Message, reply: Message) -> Message:
        for kept in (files.cache_dir() / "flower").glob("*.safetensors"):
            kept.write_bytes(kept.read_bytes()[:-3])
        forget()
        return reply

    config = over_flower(experiment(tmp_path / "runs", *QUICK))
    found = start(config, grid=deployed(config, spoil, cache=tmp_path / "cache"))
    assert facts(found) == facts(serial)


def test_a_node_with_other_weights_says_so_and_trains_nothing(
    tmp_path: Path, deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hash of the server's weights goes with the setup; a node has a file of its own."""
    row = backbones.find("vit_pico")
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    for seed, path in enumerate((ours, theirs)):
        save_file(backbones.create(row, resolution=row.resolution, seed=seed).state_dict(), path)
    pretrained = ["backbone.pretrained=true", f"backbone.weights={ours}"]
    alone = experiment(tmp_path / "runs", *QUICK, *pretrained)
    config = over_flower(alone)
    grid = deployed(config)
    monkeypatch.setattr("fedlens.experiments.build.pico_weights", lambda **_: theirs)
    with pytest.raises(FedlensError, match=r"None of the 3 .*another file") as ended:
        start(config, grid=grid)
    assert files.sha256(ours) in str(ended.value)
    assert files.sha256(theirs) in str(ended.value)
    monkeypatch.setattr("fedlens.experiments.build.pico_weights", lambda **_: ours)
    assert facts(start(config, grid=grid)) == facts(start(alone))
