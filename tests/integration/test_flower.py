"""The same experiment through Flower's apps gives the same participants, metrics and parameters.

No network is used: every node is a Flower context with its own shard on disk. A failure on a node
has the effect of leaving its client out of a run in one process, and the record says why.
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

from fedlens import files, rng
from fedlens.config.compose import compose
from fedlens.config.schema import Config
from fedlens.errors import FedlensError
from fedlens.experiments.flower import SERVER_SHARD, apps, host
from fedlens.experiments.loaded_run import load_run
from fedlens.experiments.loops.federated_loop import FederatedLoop
from fedlens.experiments.preparation.local_data import partition_spec, write_shards
from fedlens.experiments.run import start
from fedlens.federated import sampling
from fedlens.federated.engines.serial import Serial
from fedlens.federated.flower import client_app, roster
from fedlens.federated.flower.messages import ARRAYS, CONFIG, METRICS, VALUES, failed_update
from fedlens.federated.flower.refusals import Refusal
from fedlens.federated.flower.setup import Setup
from fedlens.federated.tasks import ClientTask, ClientUpdate, Stage
from fedlens.models.architectures import backbones
from fedlens.params import Params
from fedlens.registry import engine as engine_registry
from fedlens.runtime.stop import Interrupted, StopRequest
from fedlens.store.checkpoints import TENSORS
from fedlens.store.records import read_record
from fedlens.store.run_folder import RunFolder
from tests.federated.flower.inprocess import InProcessGrid, Spoil
from tests.integration.conftest import FEDERATED, ON_FEATURES, TINY, StopAfter, facts

NODES = 2
ROUNDS = ["federated.rounds=2", "checkpoint.every=1"]
ONE_BY_ONE = [*ON_FEATURES, "engine.vectorise=false"]  # heads on features: the least work
SPARSE = ["sparse.density=0.2", "sparse.rounds=2", "sparse.source=clients", "sparse.examples=4"]
CHAIN = ["algorithm=chain", "federated.clients=6", "federated.participation=0.5"]
VARIANTS = {
    "fedavg": [],
    "scaffold": ["algorithm.scaffold=true"],
    "GHBM": [*ONE_BY_ONE, "algorithm=ghbm", "algorithm.correction.tau=1"],
    "FedCM, averaged": [*ONE_BY_ONE, "algorithm=fedcm", "algorithm.average=exponential"],
    "sparse FedDyn": [*SPARSE, "algorithm=feddyn"],
    "fedprox": [*ONE_BY_ONE, "algorithm.proximal=0.1"],
    "fedadam": [*ONE_BY_ONE, "algorithm.server=adam", "algorithm.server.lr=0.01"],
    "fednova": [
        *ONE_BY_ONE, "algorithm.aggregator=fednova", "federated.min_local_steps=1",
    ],
    "median": [*ONE_BY_ONE, "algorithm.aggregator=median"],
    "ties": [*ONE_BY_ONE, "algorithm.aggregator=ties"],
    "regmean": [*ONE_BY_ONE, "algorithm.aggregator=regmean"],
    "chain": [*ONE_BY_ONE, *CHAIN],
    "sparse chains, momentum carried along": [
        *SPARSE, *CHAIN, "algorithm.carry_momentum=true", "algorithm.proximal=0.1",
        "algorithm.proximal_to=round", "algorithm.sampling.order=opposite",
    ],
    "sparse fisher average": [*SPARSE, "algorithm=fisher_average"],
    "dropout of clients": [*ONE_BY_ONE, "federated.dropout=0.4"],
    "one class each": [*ONE_BY_ONE, "partition=classes", "partition.classes_per_client=20"],
    "heads on features, one by one": ONE_BY_ONE,
    "ridge head, frozen": ["head=ridge", "head.freeze=true"],
    # The loss before the first round is that of features in a serial run, computed in other batches
    # than Flower's, and oneDNN may choose another kernel for another number of rows.
    "trained head, frozen": ["head=trained", "head.steps=8", "head.freeze=true", "onednn=false"],
    "sparse, scores of clients": [*SPARSE, "head=ridge", "head.freeze=true"],
    "sparse, votes of clients": [*SPARSE, "sparse.voting=majority"],
    "sparse scaffold": [*SPARSE, "algorithm.scaffold=true"],
    "LoRA": ["train.trainable=lora", "head=ridge"],
    "LoRA, products averaged": [
        "train.trainable=lora", "train.trainable.average=products",
    ],
    "BatchNorm averaged, with scaffold": [
        "backbone=timm:test_resnet", "backbone.resolution=32",
        "backbone.pretrained=false", "algorithm.scaffold=true",
    ],
}  # fmt: skip

# With SCAFFOLD, so that the states of clients matter too.
QUICK = [*FEDERATED, *ROUNDS, *ONE_BY_ONE, "algorithm.scaffold=true"]

Deployed = Callable[..., InProcessGrid]


@lru_cache
def composed(*overrides: str) -> Config:
    return compose("quickstart_fedavg", [*TINY, *overrides])


def experiment(root: Path, *overrides: str) -> Config:
    config = composed(*overrides)
    return replace(config, run=replace(config.run, root=str(root)))


def over_flower(config: Config) -> Config:
    """The same experiment by Flower's deployment engine, in another folder."""
    shared = ("threads_per_client", "vectorise")
    kept = {key: config.engine[key] for key in shared}
    engine = engine_registry.settings({"name": "flower", **kept}, "engine")
    return replace(config, engine=engine, run=replace(config.run, root=f"{config.run.root}-flower"))


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For what tests share: the nodes' data, their cache, runs to compare with."""
    return tmp_path_factory.mktemp("flower")


@pytest.fixture
def deployed(shared_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Deployed:
    """A federation with a cache of its own, so that it finds nothing another run computed."""

    def make(
        config: Config,
        spoil: Spoil | None = None,
        *,
        cache: Path | None = None,
        nodes: int = NODES,
    ) -> Any:
        name = hashlib.sha256(json.dumps(partition_spec(config)).encode()).hexdigest()[:16]
        if not (folder := shared_folder / f"{name}-{nodes}").exists():
            write_shards(config, folder, nodes)
        monkeypatch.setenv(SERVER_SHARD, str(folder / "server"))
        monkeypatch.setenv("FEDLENS_CACHE", str(cache or shared_folder / "cache"))
        node_configs: dict[int, dict[str, str | int]] = {
            100 + i: {apps.SHARD: str(folder / f"node-{i}")} for i in range(nodes)
        }
        return InProcessGrid(apps.client, node_configs, spoil)

    return make


@pytest.fixture(autouse=True)
def _new_process() -> None:
    """Each test starts without what the nodes of other tests keep in memory."""
    clear_caches()


def clear_caches() -> None:
    for cached in (apps._session, apps._shard, client_app._stored):
        cached.cache_clear()


def parameters(folder: RunFolder) -> dict[str, bytes]:
    """The bytes of the newest checkpoint's tensors."""
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
    flower = start(config, grid=deployed(config))
    assert facts(flower) == facts(serial)
    assert parameters(flower) == parameters(serial)


def test_a_node_builds_its_model_once_for_all_setups_of_a_run(
    tmp_path: Path, deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three setups: as the run starts, with the fitted head, and with the masks."""
    builds: list[Config] = []
    setups: set[str] = set()
    build, load = host.build, host.HostSession.load

    def count_build(config: Config, *arguments: Any) -> Any:
        builds.append(config)
        return build(config, *arguments)

    def record_setup(self: host.HostSession, setup: Setup) -> host.HostSession:
        setups.add(setup.digest)
        return load(self, setup)

    monkeypatch.setattr(host, "build", count_build)
    monkeypatch.setattr(host.HostSession, "load", record_setup)
    config = over_flower(experiment(tmp_path / "runs", *FEDERATED, *ROUNDS, *SPARSE, "head=ridge"))
    start(config, grid=deployed(config, cache=tmp_path / "cache", nodes=1))
    assert len(setups) == 3
    assert len(builds) == 1


# Heads trained together as one batched product are summed in another order: the last bits differ.
TOLERANCE = 1e-6


def test_vectorised_heads_agree_but_for_the_last_bits(tmp_path: Path, deployed: Deployed) -> None:
    options = [*FEDERATED, *ROUNDS, *ON_FEATURES]
    together = experiment(tmp_path / "together", *options)
    one_by_one = experiment(tmp_path / "one", *options, "engine.vectorise=false")
    serial = [start(together), start(one_by_one)]
    config = over_flower(together)
    flower = start(config, grid=deployed(config))
    for other in serial:
        expected = _newest(other)
        for name, value in _newest(flower).items():
            difference = float((value - expected[name]).abs().max())
            assert difference <= TOLERANCE * float(value.abs().max())
        for one, another in zip(records(flower), records(other), strict=True):
            exact = ("participants", "clients", "bytes_up", "bytes_down", "lr")
            assert all(one[key] == another[key] for key in exact)
            assert one["client_losses"] == pytest.approx(another["client_losses"], rel=TOLERANCE)


Harm = Callable[[Message], Message | None]  # what arrives instead of a reply


def matches(message: Message, **wanted: object) -> bool:
    """Whether a message's config has these values."""
    config = message.content.config_records[CONFIG]
    return all(config.get(key) == value for key, value in wanted.items())


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


def instead(content: RecordDict | Error) -> Harm:
    def harm(reply: Message) -> Message:
        about = reply.metadata
        query = Message(
            RecordDict(), dst_node_id=about.src_node_id, message_type=about.message_type
        )
        query.metadata.__dict__["_message_id"] = about.reply_to_message_id
        return Message(content, reply_to=query)

    return harm


def not_finite(values: Any) -> Array:
    values[3] = np.nan
    return Array(values)


def huge(values: Any) -> Array:
    return Array(np.full_like(values, 3e38))


def garbage(data: bytes) -> Harm:
    return with_values(lambda _: Array("float32", (3,), "numpy.ndarray", data))


SPOILED: dict[str, tuple[Harm, str]] = {
    "values that are not numbers": (with_values(not_finite), "not finite"),
    "huge values": (with_values(huge), "more than 1000 times that of the initial model"),
    "too few values": (with_values(lambda sent: Array(sent[:-1])), "values of shape"),
    "a matrix": (with_values(lambda sent: Array(sent[None])), "values of shape"),
    "doubles": (with_values(lambda sent: Array(sent.astype(np.float64))), "torch.float64"),
    "garbage": (garbage(b"PK\3\4 and so on"), "cannot be read"),
    "no bytes": (garbage(b""), "cannot be read"),
    "a loss that is not a number": (with_metrics(loss=float("nan")), "metrics are not finite"),
    "no example seen": (with_metrics(seen=0), "it saw no example"),
    "less than an example seen": (with_metrics(seen=5e-324, loss=1e10), "are not integers"),
    "a loss whose sums overflow": (with_metrics(loss=1.7e308), "its loss is not a number"),
    "text to draw on a terminal": (
        instead(Error(code=0, reason="\x1b[2J\x1b]0;x\x07 two\nlines")),
        "]0;x two lines",
    ),
    "an error": (instead(Error(code=0, reason="killed")), "its node failed (killed)"),
    "an empty answer": (instead(RecordDict()), "its reply is empty"),
    "no answer": (lambda reply: None, "no answer came within 600 s"),
}


def spoiling(harm: Harm, **wanted: object) -> Spoil:
    """Harms the replies to messages whose config has these values."""

    def spoil(node: int, message: Message, reply: Message) -> Message | None:
        answers = not reply.has_error() and ARRAYS in reply.content  # the node has the setup
        return harm(reply) if answers and matches(message, **wanted) else reply

    return spoil


class FakeTime:
    """A clock that only advances by sleeping; replaces the module `time` in `roster`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "time", FakeTime())


@pytest.fixture(scope="module")
def serial(shared_folder: Path) -> RunFolder:
    return start(experiment(shared_folder / "serial", *QUICK))


@pytest.fixture(scope="module")
def left_out(serial: RunFolder) -> int:
    """A client of round 1 that is neither the first nor the last."""
    client: int = records(serial)[0]["clients"][1]
    return client


@pytest.fixture(scope="module")
def without_one(shared_folder: Path, left_out: int) -> RunFolder:
    """The serial run without one client's update in round 1."""
    updates = Serial.updates

    def without_update(
        self: Serial, parameters: Params, tasks: Sequence[ClientTask]
    ) -> Iterator[ClientUpdate]:
        for update in updates(self, parameters, tasks):
            task = update.task
            missing = (task.round, task.client) == (1, left_out)
            yield failed_update(task, "it is left out") if missing else update

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Serial, "updates", without_update)
        return start(experiment(shared_folder / "without-one", *QUICK))


def assert_same_but_for_reasons(run: RunFolder, expected: RunFolder) -> dict[str, str]:
    """Asserts that two runs left out the same clients and are equal; returns the run's reasons."""
    run_records, expected_records = records(run), records(expected)
    reasons: dict[str, str] = {}
    for record, expected_record in zip(run_records, expected_records, strict=True):
        rejected = record.pop("rejected", {})
        assert rejected.keys() == expected_record.pop("rejected", {}).keys()
        reasons |= rejected
    assert run_records == expected_records
    assert parameters(run) == parameters(expected)
    return reasons


@pytest.mark.parametrize("how", SPOILED)
def test_a_bad_reply_is_left_out_and_recorded_and_the_others_count(
    how: str, without_one: RunFolder, left_out: int, tmp_path: Path, deployed: Deployed
) -> None:
    harm, why = SPOILED[how]
    config = over_flower(experiment(tmp_path / "runs", *QUICK))
    grid = deployed(config, spoiling(harm, round=1, client=left_out))
    reasons = assert_same_but_for_reasons(start(config, grid=grid), without_one)
    assert why in reasons[str(left_out)]


def test_a_round_that_leaves_no_finite_loss_is_undone(tmp_path: Path, deployed: Deployed) -> None:
    """A node sends all values with the other sign, also the variances of BatchNorm."""
    more = [
        *VARIANTS["BatchNorm averaged, with scaffold"],
        "federated.keep_updates=2",
        "evaluate.every=1",
    ]
    config = over_flower(experiment(tmp_path / "runs", *FEDERATED, *ROUNDS, *more))
    negated = with_values(lambda values: Array(-1000 * values))
    run = start(config, grid=deployed(config, spoiling(negated, round=2)))
    first, second = records(run)
    assert first["clients"]
    assert second["clients"] == []
    assert set(second["rejected"].values()) == {
        "together they give a global model whose loss is not finite"
    }
    assert second["validation"] == first["validation"]
    assert [path.name for path in sorted(run.updates.iterdir())] == ["round-000001"]
    with pytest.raises(FedlensError, match="training diverged"):
        strict = replace(config, federated=replace(config.federated, fail_on_bad_update=True),
                         run=replace(config.run, root=str(tmp_path / "strict")))  # fmt: skip
        start(strict, grid=deployed(strict, spoiling(negated, round=2)))


def test_a_failing_app_leaves_its_client_out(
    without_one: RunFolder,
    left_out: int,
    tmp_path: Path,
    deployed: Deployed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train = host.FlowerHost.train

    def fail(
        self: host.FlowerHost, setup: Setup, stage: Stage, task: ClientTask, parameters: Params
    ) -> ClientUpdate:
        if (task.round, task.client) == (1, left_out):
            raise RuntimeError("a bug in the app")
        return train(self, setup, stage, task, parameters)

    monkeypatch.setattr(host.FlowerHost, "train", fail)
    config = over_flower(experiment(tmp_path / "runs", *QUICK))
    reasons = assert_same_but_for_reasons(start(config, grid=deployed(config)), without_one)
    assert reasons[str(left_out)] == Refusal.FAILED


def test_a_chain_passes_over_a_client_that_does_not_answer(
    tmp_path: Path, deployed: Deployed
) -> None:
    harm, why = SPOILED["no answer"]
    config = over_flower(experiment(tmp_path / "runs", *FEDERATED, *ROUNDS, *ONE_BY_ONE, *CHAIN))
    (links,) = sampling.chain(config.seed, 1, 6, 3)
    lost = links[1]
    grid = deployed(config, spoiling(harm, round=1, client=lost))
    first, second = records(start(config, grid=grid))
    assert first["participants"] == links
    assert first["clients"] == [client for client in links if client != lost]
    assert why in first["rejected"][str(lost)]
    assert len(second["clients"]) == 3


def test_a_bad_reply_ends_a_strict_run_with_one_sentence(
    left_out: int, tmp_path: Path, deployed: Deployed
) -> None:
    strict = experiment(tmp_path / "runs", *QUICK, "federated.fail_on_bad_update=true")
    config = over_flower(strict)
    harm, _ = SPOILED["values that are not numbers"]
    grid = deployed(config, spoiling(harm, round=1, client=left_out))
    why = rf"client {left_out} in round 1 was rejected: .* not finite: set federated.fail_on_bad"
    with pytest.raises(FedlensError, match=why):
        start(config, grid=grid)


@pytest.mark.parametrize("how", ["no answer", "an error", "garbage"])
def test_a_round_without_any_reply_ends_the_run_which_resumes_when_nodes_are_back(
    how: str, serial: RunFolder, tmp_path: Path, deployed: Deployed
) -> None:
    harm, why = SPOILED[how]
    config = over_flower(experiment(tmp_path / "runs", *QUICK))
    grid = deployed(config, spoiling(harm, round=2), nodes=1)
    with pytest.raises(FedlensError) as ended:
        start(config, grid=grid)
    message = str(ended.value)
    assert "None of the 3 clients of round 2 gave an update" in message
    assert why in message
    assert "run the same command again" in message
    grid.spoil = None
    flower = start(config, grid=grid)
    assert facts(flower) == facts(serial)
    assert parameters(flower) == parameters(serial)


def test_a_node_that_hosts_all_clients_of_a_round_does_not_end_the_run(
    tmp_path: Path, deployed: Deployed
) -> None:
    """The other node has none of the clients of round 2, so it may be well."""
    harm, why = SPOILED["garbage"]
    config = over_flower(experiment(tmp_path / "runs", *QUICK))
    run = start(config, grid=deployed(config, spoiling(harm, round=2)))
    first, second = records(run)
    assert run.finished
    assert len(first["clients"]) == 3
    assert second["clients"] == []
    assert all(why in second["rejected"][str(client)] for client in second["participants"])


def test_a_run_without_nodes_says_so_and_resumes_when_they_are_there(
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
    config: Config, grid: InProcessGrid, stop_after: StopAfter, monkeypatch: pytest.MonkeyPatch
) -> bool:
    with monkeypatch.context() as patch:
        patch.setattr(StopRequest, "check", lambda self: stop_after.check(self))
        try:
            start(config, grid=grid)
        except Interrupted:
            return True
    return False


def test_a_run_interrupted_several_times_ends_with_the_same_bits(
    serial: RunFolder, tmp_path: Path, deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = over_flower(experiment(tmp_path / "runs", *QUICK))
    grid = deployed(config)
    stops = 0
    for points in (1, 3, 5, 7):
        stops += interrupted(config, grid, StopAfter(points), monkeypatch)
        clear_caches()
    assert stops >= 2
    flower = start(config, grid=grid)
    assert facts(flower) == facts(serial)
    assert parameters(flower) == parameters(serial)


QUERIES = {
    "statistics": ["head=ridge"],
    "sensitivity": ["train=full", *SPARSE],
    "ranking": ["train=full", *SPARSE, "sparse.voting=majority"],
}
ALL_EQUAL = with_values(lambda sent: Array(np.zeros_like(sent)))
UNUSABLE_REPLIES = [
    ("statistics", *SPOILED["no answer"]),
    ("statistics", *SPOILED["garbage"]),
    ("statistics", *SPOILED["values that are not numbers"]),
    ("statistics", with_values(lambda sent: Array(-sent)), "its class counts"),
    ("sensitivity", *SPOILED["an error"]),
    ("sensitivity", instead(RecordDict()), "it has no count"),
    ("ranking", *SPOILED["no answer"]),
    ("ranking", ALL_EQUAL, "not a permutation"),
]


@pytest.mark.parametrize(("ask", "harm", "why"), UNUSABLE_REPLIES)
def test_head_and_masks_are_made_without_a_client_that_fails_and_the_record_says_so(
    ask: str, harm: Harm, why: str, tmp_path: Path, deployed: Deployed
) -> None:
    config = over_flower(experiment(tmp_path / "runs", *QUICK, *QUERIES[ask]))
    grid = deployed(config, spoiling(harm, ask=ask, client=3), cache=tmp_path / "cache")
    run = start(config, grid=grid)
    if ask == "statistics":
        left_out = read_record(run.path / "head.json")["left_out"]
    else:
        left_out = read_record(run.path / "masks.json")["provenance"]["left_out"]
        assert not (tmp_path / "cache" / "masks").exists()  # no other run gets these
    assert left_out.keys() == {"3"}
    assert why in left_out["3"]


def read_start(run: RunFolder) -> dict[str, bytes]:
    start = load_run(run, StopRequest()).start
    return {name: value.numpy().tobytes() for name, value in start.items()}


@pytest.mark.parametrize("head", [["head=ridge"], ["head=trained", "head.steps=4"]], ids=" ".join)
def test_a_head_without_a_client_is_the_same_after_a_resume_and_in_an_analysis(
    head: list[str], tmp_path: Path, deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client answers again when the run is resumed; the head stays as it was."""
    alone = experiment(tmp_path / "runs", *QUICK, *head, "head.freeze=false")
    config = over_flower(alone)
    drawn = sampling.uniform(rng.address(config.seed, "trained head"), 1, clients=5, size=3)
    harm, _ = SPOILED["values that are not numbers"]
    wanted = {"ask": "statistics"} if head == ["head=ridge"] else {"stage": "head"}
    spoil = spoiling(harm, client=drawn[1], **wanted)
    whole = start(config, grid=deployed(config, spoil))
    clear_caches()
    config = replace(config, run=replace(config.run, root=str(tmp_path / "cut")))
    grid = deployed(config, spoil)

    def stop(loop: FederatedLoop) -> None:
        raise Interrupted("SIGTERM")

    with monkeypatch.context() as patch:
        patch.setattr(FederatedLoop, "run", stop)
        with pytest.raises(Interrupted):
            start(config, grid=grid)
    grid.spoil = None
    cut = start(config, grid=grid)
    assert facts(cut) == facts(whole)
    assert list(read_record(cut.path / "head.json")["left_out"]) == [str(drawn[1])]
    assert read_start(cut) == read_start(whole)
    started = read_start(whole)
    assert started != read_start(start(alone))
    content = bytearray(cut.head.read_bytes())
    content[-1] ^= 1
    for damage in (lambda: cut.head.write_bytes(content), cut.head.unlink):
        damage()
        with pytest.raises(FedlensError, match=r"head\.safetensors is (damaged|lost)"):
            load_run(cut, StopRequest())


def test_a_setup_damaged_on_a_nodes_disk_is_sent_again(
    serial: RunFolder, tmp_path: Path, deployed: Deployed
) -> None:
    def spoil(node: int, message: Message, reply: Message) -> Message:
        for stored in (files.cache_dir() / "flower").glob("*.safetensors"):
            stored.write_bytes(stored.read_bytes()[:-3])
        clear_caches()
        return reply

    config = over_flower(experiment(tmp_path / "runs", *QUICK))
    flower = start(config, grid=deployed(config, spoil, cache=tmp_path / "cache"))
    assert facts(flower) == facts(serial)


def test_a_node_with_different_weights_is_refused_and_trains_nothing(
    tmp_path: Path, deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The setup contains the hash of the server's weights; a node has its own file."""
    row = backbones.find("vit_pico")
    same, different = tmp_path / "same.safetensors", tmp_path / "different.safetensors"
    for seed, path in enumerate((same, different)):
        save_file(backbones.create(row, resolution=row.resolution, seed=seed).state_dict(), path)
    pretrained = ["backbone.pretrained=true", f"backbone.weights={same}"]
    alone = experiment(tmp_path / "runs", *QUICK, *pretrained)
    config = over_flower(alone)
    grid = deployed(config)
    monkeypatch.setattr("fedlens.experiments.build.pico_weights", lambda **_: different)
    with pytest.raises(FedlensError, match=r"None of the 3 .*use the file with that hash") as ended:
        start(config, grid=grid)
    assert files.sha256(different) not in str(ended.value)  # no server learns a file's hash
    monkeypatch.setattr("fedlens.experiments.build.pico_weights", lambda **_: same)
    assert facts(start(config, grid=grid)) == facts(start(alone))
