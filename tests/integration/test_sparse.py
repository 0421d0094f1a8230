"""Sparse fine-tuning from end to end: head, calibration, training, records and files."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from fedlens import params
from fedlens.config.compose import compose, leaves, within
from fedlens.config.schema import RUNTIME_KEYS, Config
from fedlens.data.images import Images
from fedlens.errors import FedlensError
from fedlens.experiments import run
from fedlens.experiments.build import Experiment
from fedlens.experiments.loaded_run import load_run
from fedlens.experiments.run import start
from fedlens.federated import wire
from fedlens.files import cache_dir
from fedlens.models import heads
from fedlens.registry import aggregator, mask_rule
from fedlens.runtime.stop import StopRequest
from fedlens.sparse import mask_files
from fedlens.sparse.packing import Packing
from fedlens.store.checkpoints import TENSORS
from fedlens.store.client_updates import KeptRound, read_round
from fedlens.store.run_folder import RunFolder, kept_rounds, runs
from fedlens.suites.suite import find
from tests.integration.conftest import FEDERATED, ON_FEATURES, TINY, Tiny, facts, interrupted_at
from tests.integration.test_leakage import change_test_split

SMALL = [
    *("data=synthetic", "augment=none", "backbone=vit_pico", *TINY),
    *("evaluate.every=1", "evaluate.select=last", "checkpoint.every=1", "train.epochs=1"),
    *(
        "sparse.rounds=2",
        "sparse.examples=16",
        "train.optimizer.momentum=0.9",
        "train.optimizer.weight_decay=0.1",
    ),
]
CLIENTS = [*FEDERATED, "federated.rounds=2"]
SKEWED = ["partition=classes", "partition.classes_per_client=20"]
WHOLE = ["sparse.density=1", "sparse.biases=true", "sparse.norms=true", "sparse.embeddings=true"]
MERGES = ("task_arithmetic", "ties", "dare", "breadcrumbs", "consensus")


@dataclass(frozen=True)
class FinishedRun:
    """A finished run, with all parameters of the model before and after training."""

    folder: RunFolder
    config: Config
    experiment: Experiment
    start: dict[str, torch.Tensor]
    end: dict[str, torch.Tensor]

    @property
    def masks(self) -> dict[str, torch.Tensor]:
        """Of the tensors that are trained in part; empty for a dense run."""
        if not self.folder.masks.exists():
            return {}
        masks, _ = mask_files.load(self.folder.masks)
        return {name: mask for name, mask in masks.items() if mask.any()}

    @property
    def records(self) -> list[dict[str, Any]]:
        return self.folder.journal("metrics").read()

    @property
    def rounds(self) -> list[dict[str, Any]]:
        return [record for record in self.records if "bytes_up" in record]


def run_and_observe(config: Config) -> FinishedRun:
    observed: list[tuple[Experiment, dict[str, torch.Tensor]]] = []
    real = run.find_masks

    def find_masks(experiment: Experiment, *arguments: Any) -> Experiment:
        before = params.copy(dict(experiment.model.named_parameters()))
        observed.append((experiment, before))
        return real(experiment, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "find_masks", find_masks)
        folder = start(config)
    ((experiment, before),) = observed
    after = params.copy(dict(experiment.model.named_parameters()))
    return FinishedRun(folder, config, experiment, before, after)


Finish = Callable[..., FinishedRun]


@pytest.fixture(scope="module")
def finish(tmp_path_factory: pytest.TempPathFactory) -> Finish:
    """A small sparse run, carried out once for all tests that read it."""
    root = tmp_path_factory.mktemp("sparse")
    finished: dict[tuple[str, ...], FinishedRun] = {}

    def find_or_run(*overrides: str, central: bool = False) -> FinishedRun:
        key = (str(central), *overrides)
        if key not in finished:
            experiment = "sparse_centralized" if central else "sparse_fedavg"
            clients = [] if central else CLIENTS
            place = [f"run.root={root}", f"run.name=run-{len(finished)}"]
            config = compose(experiment, [*SMALL, *clients, *place, *overrides])
            finished[key] = run_and_observe(config)
        return finished[key]

    return find_or_run


def assert_only_masked_weights_moved(
    finished: FinishedRun, density: float, *, moving: float = 0.9
) -> None:
    """Masks cover exactly `density` of the weights; of these, a share of `moving` changed.

    Weight decay changes them even where there is no gradient.
    """
    masks = finished.masks
    with_bits = {name: value.view(torch.int32) for name, value in finished.end.items()}
    moved = {n: value != finished.start[n].view(torch.int32) for n, value in with_bits.items()}
    for name, where in moved.items():
        allowed = masks.get(name, torch.zeros_like(where))
        assert not (where & ~allowed).any(), name
    trainable = sum(int(mask.sum()) for mask in masks.values())
    matrices = [  # kernels and matrices of the backbone; tokens and positions are embeddings
        value.numel()
        for name, value in finished.start.items()
        if name.startswith("backbone.") and value.ndim > 1 and name.endswith("weight")
    ]
    assert trainable == round(density * sum(matrices))
    assert sum(int(where.sum()) for where in moved.values()) > moving * trainable
    # The checkpoint holds the same parameters.
    stored = load_file(max(finished.folder.checkpoints.iterdir()) / TENSORS)
    tensors = {n.removeprefix("model/"): v for n, v in stored.items() if n.startswith("model/")}
    assert tensors.keys() == {*masks, "head.weight", "head.bias"}
    assert params.digest(tensors) == params.digest({name: finished.end[name] for name in tensors})
    loaded = load_run(finished.folder, StopRequest())
    assert params.digest(loaded.start) == params.digest(finished.start)
    assert params.digest(loaded.tuned) == params.digest(finished.end)


@pytest.mark.parametrize("rule", mask_rule.names)
def test_under_every_rule_frozen_weights_keep_their_bits(rule: str, finish: Finish) -> None:
    assert_only_masked_weights_moved(finish(f"sparse.rule={rule}"), 0.1)


@pytest.mark.parametrize(
    "options",
    [
        [*SKEWED, "sparse.source=clients", "sparse.density=0.03"],
        [*SKEWED, "sparse.source=clients", "sparse.voting=majority", "sparse.clients=2"],
        ["algorithm=scaffold", "sparse.scope=tensor", "train.clip_norm=1"],
        ["algorithm=fedadam", "algorithm.proximal=0.1", "train.optimizer.nesterov=true"],
        ["algorithm=ties", "algorithm.aggregator.density=1", "federated.min_local_steps=1"],
    ],
)
def test_under_other_settings_frozen_weights_keep_their_bits(
    options: list[str], finish: Finish
) -> None:
    density = 0.03 if "sparse.density=0.03" in options else 0.1
    moving = 0.5 if "algorithm=ties" in options else 0.9  # votes on signs can be tied
    assert_only_masked_weights_moved(finish(*options), density, moving=moving)


@pytest.mark.parametrize(
    "options", [[], ["sparse.rule=random", "train.clip_norm=0.5", "train.micro_batch=40"]]
)
def test_centrally_frozen_weights_keep_their_bits(options: list[str], finish: Finish) -> None:
    assert_only_masked_weights_moved(finish(*options, central=True), 0.1)


def test_a_run_records_what_it_trained(finish: Finish) -> None:
    finished = finish("sparse.rule=least_sensitive")
    result = finished.folder.result
    assert result is not None
    assert (result["density"], result["mask_rule"]) == (0.1, "least_sensitive")
    assert result["facts"]["weights_trained"] == round(0.1 * result["facts"]["weights_maskable"])
    assert result["facts"].keys() >= {"temperature", "l2"}
    assert finished.records[0]["round"] == 0  # the fitted head is evaluated
    assert "least-sensitive-0.1" in run.run_name(compose("sparse_fedavg", []))


@pytest.mark.parametrize("density", [0.1, 0.01])
def test_an_update_weighs_the_trained_share_of_a_dense_one(density: float, finish: Finish) -> None:
    """The header is included: values travel as one tensor, so it is about 80 bytes."""
    dense = finish("sparse.density=null")
    sparse = finish(f"sparse.density={density}", "sparse.rule=random", "federated.keep_updates=1")
    assert len(dense.rounds) == len(sparse.rounds) == 2
    for heavy, light in zip(dense.rounds, sparse.rounds, strict=True):
        assert heavy["participants"] == light["participants"]
        assert light["bytes_up"] == light["bytes_down"]
        assert light["bytes_up"] <= density * heavy["bytes_up"] * 1.01
    whole = {n: v.contiguous() for n, v in dense.end.items() if n.startswith("backbone.")}
    assert heavy["bytes_up"] == 3 * len(save(whole))
    sent = read_round(sparse.folder.updates, 2).clients
    assert light["bytes_up"] == sum(
        len(save(wire.encoded(values, sparse.masks))) for values in sent.values()
    )


@pytest.mark.parametrize("central", [False, True])
def test_masks_of_all_weights_train_as_no_masks_do(central: bool, finish: Finish) -> None:
    dense = finish("sparse.density=null", central=central)
    every = finish(*WHOLE, "sparse.rule=random", central=central)
    assert all(mask.all() for mask in every.masks.values())
    assert params.digest(every.end) == params.digest(dense.end)
    assert params.digest(every.end) != params.digest(every.start)
    assert len(every.records) == len(dense.records) > 1
    for one, other in zip(every.records, dense.records, strict=True):
        assert one["validation"] == other["validation"]
        assert one.get("train") == other.get("train")


@pytest.mark.parametrize("central", [False, True])
def test_a_trained_head_is_trained_first_and_then_frozen(central: bool, finish: Finish) -> None:
    head = ["head=trained", "head.steps=6", "sparse.rule=random"]
    finished = finish(*head, central=central)
    assert_only_masked_weights_moved(finished, 0.1)  # the head did not change either
    width = finished.experiment.model.head.in_features
    initial = heads.linear(width, 100, finished.config.seed)
    assert not torch.equal(finished.end["head.weight"], initial.weight)
    assert not torch.equal(finished.end["head.bias"], initial.bias)


def test_a_head_that_is_not_frozen_is_trained_with_the_masked_weights(finish: Finish) -> None:
    finished = finish("head.freeze=false", "sparse.rule=random")
    assert not torch.equal(finished.end["head.weight"], finished.start["head.weight"])
    trained = sum(int(mask.sum()) for mask in finished.masks.values())
    head = finished.end["head.weight"].numel() + finished.end["head.bias"].numel()
    for record in finished.rounds:
        assert 0 < record["bytes_up"] - 3 * 4 * (trained + head) < 3 * 400


def stepped(kept: KeptRound) -> dict[str, torch.Tensor]:
    """FedAvg by hand: start + Σ pₖ δₖ, in float64."""
    shares = kept.shares()
    moved = {name: value.double() for name, value in kept.start.items()}
    for client, values in kept.clients.items():
        for name, value in values.items():
            delta = value.double() - kept.start[name].double()
            moved[name] = moved[name] + shares[client] * delta
    return moved


CHAINS = [
    "algorithm=chain", "federated.clients=4", "federated.participation=1",
    "algorithm.sampling.chains=2",
]  # fmt: skip


@pytest.mark.parametrize("density", ["null", "0.1"])
@pytest.mark.parametrize("sampling", [[], CHAINS], ids=["together", "in chains"])
def test_updates_of_the_last_rounds_are_kept_and_add_up_to_the_model(
    density: str, sampling: list[str], finish: Finish
) -> None:
    uneven = ["partition=quantity", "federated.rounds=4", "federated.keep_updates=2", *sampling]
    finished = finish(*uneven, f"sparse.density={density}", "sparse.rule=random")
    folder = finished.folder.updates
    assert kept_rounds(folder) == [3, 4]
    third, fourth = (read_round(folder, number) for number in (3, 4))
    trained = {n: v for n, v in finished.end.items() if n in fourth.start}
    ends = {3: fourth.start, 4: Packing(trained, finished.masks).pack(trained)}
    for kept in (third, fourth):
        record = finished.records[kept.number]
        assert list(kept.clients) == sorted(record["participants"]) == sorted(record["clients"])
        sizes = (
            finished.folder.partition["statistics"]["sizes"] if finished.folder.partition else []
        )
        assert kept.examples == {client: sizes[client] for client in kept.clients}
        assert len(set(kept.examples.values())) > 1
        expected = stepped(kept)
        assert expected.keys() == ends[kept.number].keys()
        for name, value in ends[kept.number].items():
            torch.testing.assert_close(value.double(), expected[name], rtol=1e-6, atol=1e-7)


def test_rounds_without_an_update_do_not_keep_older_updates(tiny: Tiny) -> None:
    rare = ["federated.dropout=0.5", "federated.participation=0.2", "federated.rounds=8"]
    folder = start(tiny(*FEDERATED, *ON_FEATURES, *rare, "federated.keep_updates=2"))
    records = folder.journal("metrics").read()
    answered = [record["round"] for record in records if record["clients"]]
    assert answered == [2, 6, 8]
    assert min(kept_rounds(folder.updates)) >= 6


def test_no_updates_are_kept_by_default(finish: Finish) -> None:
    assert not finish("sparse.rule=least_sensitive").folder.updates.exists()


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.safetensors")}


INTERRUPTED = {
    "calibrated on validation": ["sparse.rounds=3", "algorithm=scaffold"],
    "calibrated by clients": [
        *(*SKEWED, "sparse.source=clients", "sparse.clients=2", "federated.keep_updates=2"),
    ],
}


@pytest.mark.parametrize("mode", INTERRUPTED)
def test_a_run_interrupted_anywhere_ends_with_the_same_bits(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def composed(root: str) -> Config:
        own = [*INTERRUPTED[mode], "run.name=it", f"run.root={tmp_path / root}"]
        return compose("sparse_fedavg", [*SMALL, *CLIENTS, "evaluate.test_curve=true", *own])

    shutil.rmtree(cache_dir() / "masks", ignore_errors=True)
    whole = start(composed("whole"))
    cut = composed("cut")
    folder = RunFolder(tmp_path / "cut" / "it")
    when: list[str] = []
    for points in (1, 2, 3, 5, 7, 9, 3, 5):
        if not folder.masks.exists():  # so that cached ones are not found
            shutil.rmtree(cache_dir() / "masks", ignore_errors=True)
        if not interrupted_at(cut, points, monkeypatch):
            break
        done = len(folder.journal("metrics").read())
        when.append(f"round {done}" if done else "masked" if folder.masks.exists() else "before")
    assert when.count("before") >= 2
    assert "masked" in when or "round 1" in when
    assert any(moment in when for moment in ("round 2", "round 3"))
    assert facts(start(cut)) == facts(whole)
    assert folder.masks.read_bytes() == whole.masks.read_bytes()
    assert files_below(folder.updates) == files_below(whole.updates)


def test_masks_damaged_between_sessions_are_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ["sparse.rule=random", "run.name=it", f"run.root={tmp_path}"]
    config = compose("sparse_fedavg", [*SMALL, *CLIENTS, *own])
    folder = RunFolder(tmp_path / "it")
    for points in range(1, 9):
        if folder.masks.exists():
            break
        assert interrupted_at(config, points, monkeypatch)
    whole = folder.masks.read_bytes()
    folder.masks.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(FedlensError, match=r"masks.safetensors is damaged .*\.$") as caught:
        start(config)
    assert folder.failure == str(caught.value)
    folder.masks.unlink()  # then they are read from the cache or made again
    assert start(config).result is not None
    assert folder.masks.read_bytes() == whole


@pytest.mark.parametrize("options", [[], ["algorithm=scaffold", "head.freeze=false", *SKEWED]])
def test_workers_give_the_bits_of_one_process(options: list[str], tmp_path: Path) -> None:
    common = [*SMALL, *CLIENTS, *options, "engine.threads_per_client=1"]
    alone = ["engine=serial", f"run.root={tmp_path / 'serial'}"]
    workers = ["engine=parallel", "engine.workers=2", f"run.root={tmp_path / 'parallel'}"]
    either = ["engine=auto", "engine.workers=2", "engine.shortcuts=false"]
    either.append(f"run.root={tmp_path / 'auto'}")
    first, *others = (
        start(compose("sparse_fedavg", [*common, *engine])) for engine in (alone, workers, either)
    )
    for other in others:
        assert facts(other) == facts(first)


@pytest.mark.parametrize(
    "options", [["federated.clients=null"], [], ["sparse.source=clients", "sparse.voting=union"]]
)
def test_the_test_split_is_not_read_before_the_final_evaluation(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(cache_dir() / "masks", ignore_errors=True)
    openings = []

    def record(images: Images) -> Images:
        (folder,) = runs(tmp_path)
        openings.append((folder.choice, len(folder.journal("metrics").read())))
        return images

    change_test_split(monkeypatch, record)
    overrides = [*SMALL, *CLIENTS, *options, f"run.root={tmp_path}"]
    folder = start(compose("sparse_fedavg", overrides))
    assert folder.result is not None
    assert openings == [(folder.result["choice"], len(folder.journal("metrics").read()))]


def test_the_content_of_the_test_split_does_not_change_the_masks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = []
    for root in ("original", "flipped"):
        shutil.rmtree(cache_dir() / "masks", ignore_errors=True)
        overrides = [*SMALL, *CLIENTS, "federated.rounds=1", f"run.root={tmp_path / root}"]
        folders.append(start(compose("sparse_fedavg", overrides)))
        change_test_split(monkeypatch, lambda images: Images(images.pixels.flip(0), images.labels))
    original, flipped = folders
    assert original.masks.read_bytes() == flipped.masks.read_bytes()
    assert facts(original)["metrics"] == facts(flipped)["metrics"]
    assert facts(original)["result"] != facts(flipped)["result"]


@pytest.mark.parametrize("merge", MERGES)
def test_a_merge_method_aggregates_updates_and_survives_an_interruption(
    merge: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = [*CLIENTS, *ON_FEATURES, f"algorithm={merge}", "evaluate.select=last"]
    whole = start(tiny(*common, root="whole"))
    assert whole.result is not None
    label = {"task_arithmetic": "task arithmetic, scale 0.1"}.get(merge, aggregator[merge].label)
    assert (whole.result["algorithm"], whole.result["units"]) == (label, 2)
    averaged = start(tiny(*common, "algorithm=fedavg", root="fedavg"))
    assert averaged.result is not None
    same = averaged.result["choice"] == whole.result["choice"]
    assert not same or merge == "task_arithmetic"  # which, at scale 1, may be the plain mean
    cut = tiny(*common, root="cut")
    assert interrupted_at(cut, 3, monkeypatch)
    assert facts(start(cut)) == facts(whole)


def test_dare_draws_what_it_drops_anew_in_every_round(finish: Finish) -> None:
    """With a single client, the parameters that change are those kept of its update."""
    options = ["algorithm=dare", "algorithm.aggregator.density=0.5", "sparse.rule=random"]
    finished = finish(*options, "federated.keep_updates=2", "federated.clients=1")
    first, second = (read_round(finished.folder.updates, number) for number in (1, 2))
    trained = {n: finished.end[n] for n in finished.masks}
    end = Packing(trained, finished.masks).pack(trained)
    one = {name: value != first.start[name] for name, value in second.start.items()}
    two = {name: value != second.start[name] for name, value in end.items()}
    for kept in (one, two):
        share = sum(int(k.sum()) for k in kept.values()) / sum(k.numel() for k in kept.values())
        assert 0.45 < share < 0.55
    assert params.digest(one) != params.digest(two)


# What a suite varies; all other keys are equal between its cells.
SUITES = {
    "sparsity": ("sparse.density", {None, 0.5, 0.3, 0.2, 0.1, 0.05, 0.01}, {0, 1}),
    "calibration_rounds": ("sparse.rounds", {1, 2, 4, 8}, {0, 1}),
    "mask_rules": ("sparse.rule.name", set(mask_rule.names), {0, 50, 10, 5, 1}),
}


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_varies_one_thing_at_an_equal_budget(name: str) -> None:
    key, values, splits = SUITES[name]
    cells = [cell for cell in find(name).cells([]) if cell.row != "ridge head only"]
    varied, mask_settings, other_settings = set(), set(), set()
    for cell in cells:
        settings = {
            key: value
            for key, value in leaves(asdict(cell.config))
            if not within(key, RUNTIME_KEYS)
        }
        assert cell.config.experiment == "sparse_fedavg"
        assert cell.config.head.name == "ridge"
        assert cell.config.head.freeze
        del settings["train.lr"]  # each rule has its own, since gradients differ in size
        partition = taken(settings, "partition")
        classes = partition.get("partition.classes_per_client", 0)
        assert partition["partition.name"] == ("classes" if classes else "iid")
        masks = taken(settings, "sparse")
        dense = masks["sparse.density"] is None
        value = "dense" if dense and name == "mask_rules" else masks.pop(key)
        varied.add((value, classes))
        other_settings.add(json.dumps(settings, sort_keys=True))
        if not dense:  # a dense baseline does not depend on how masks are chosen
            mask_settings.add(json.dumps(masks, sort_keys=True))
    baseline = {"dense"} if name == "mask_rules" else set()
    assert varied == {(value, classes) for value in values | baseline for classes in splits}
    assert len(cells) == len(varied)
    assert len(mask_settings) == len(other_settings) == 1
    assert len({cell.config.federated.local_step_budget for cell in cells}) == 1
    assert len({cell.config.train.batch_size for cell in cells}) == 1


def taken(settings: dict[str, Any], group: str) -> dict[str, Any]:
    """Removes the keys of a group and returns them with their values."""
    return {key: settings.pop(key) for key in list(settings) if within(key, [group])}
