"""Sparse fine-tuning from end to end: head, calibration, training, and what it leaves behind."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from fedlens import params
from fedlens.analyses.loaded_run import open_run
from fedlens.config.compose import compose
from fedlens.config.identity import essence
from fedlens.config.schema import Config
from fedlens.data import synthetic
from fedlens.data.images import Dataset, Images
from fedlens.errors import FedlensError
from fedlens.experiments import run
from fedlens.experiments.build import Parts
from fedlens.experiments.run import start
from fedlens.federated import wire
from fedlens.files import cache_dir
from fedlens.models import heads
from fedlens.runtime.stop import StopRequest
from fedlens.sparse import mask_files
from fedlens.sparse.masks import RULES
from fedlens.sparse.packing import Packing
from fedlens.store.analysis_records import kept_rounds
from fedlens.store.checkpoints import TENSORS
from fedlens.store.client_updates import KeptRound, read_round
from fedlens.store.run_folder import RunFolder, runs
from fedlens.suites.suite import find
from tests.integration.conftest import FEDERATED, ON_FEATURES, TINY, Tiny, facts, interrupted_at

WORLD = [
    *("data=synthetic", "augment=none", "backbone=vit_pico", *TINY),
    *("evaluate.every=1", "evaluate.select=last", "checkpoint.every=1", "train.epochs=1"),
    *("sparse.rounds=2", "sparse.examples=16", "train.momentum=0.9", "train.weight_decay=0.1"),
]
CLIENTS = [*FEDERATED, "federated.rounds=2"]
SKEWED = ["partition=classes", "partition.classes_per_client=20"]
WHOLE = ["sparse.density=1", "sparse.biases=true", "sparse.norms=true", "sparse.embeddings=true"]
MERGES = ("task_arithmetic", "ties", "dare", "breadcrumbs", "consensus")


@dataclass(frozen=True)
class Life:
    """A finished run, with every parameter of the model as built and as it ended."""

    folder: RunFolder
    config: Config
    parts: Parts
    start: dict[str, torch.Tensor]
    end: dict[str, torch.Tensor]

    @property
    def masks(self) -> dict[str, torch.Tensor]:
        """Of the tensors they let train at all; of a dense run none."""
        if not self.folder.masks.exists():
            return {}
        found, _ = mask_files.load(self.folder.masks)
        return {name: mask for name, mask in found.items() if mask.any()}

    @property
    def records(self) -> list[dict[str, Any]]:
        return self.folder.journal("metrics").read()

    @property
    def rounds(self) -> list[dict[str, Any]]:
        return [record for record in self.records if "bytes_up" in record]


def lived(config: Config) -> Life:
    seen: list[tuple[Parts, dict[str, torch.Tensor]]] = []
    real = run.build

    def building(*given: Any, **options: Any) -> Parts:
        parts = real(*given, **options)
        seen.append((parts, params.copy(dict(parts.model.named_parameters()))))
        return parts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "build", building)
        folder = start(config)
    ((parts, before),) = seen
    return Life(folder, config, parts, before, params.copy(dict(parts.model.named_parameters())))


Live = Callable[..., Life]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Live:
    """A sparse run in the tiny world, lived once for all tests that look at it."""
    root = tmp_path_factory.mktemp("sparse")
    known: dict[tuple[str, ...], Life] = {}

    def find_or_live(*overrides: str, central: bool = False) -> Life:
        key = (str(central), *overrides)
        if key not in known:
            experiment = "sparse_centralized" if central else "sparse_fedavg"
            clients = [] if central else CLIENTS
            told = [*WORLD, *clients, f"run.root={root}", f"run.name=run-{len(known)}", *overrides]
            known[key] = lived(compose(experiment, told))
        return known[key]

    return find_or_live


def kept_to_its_masks(life: Life, density: float, *, moving: float = 0.9) -> None:
    """Nothing moved but what the masks allow, exactly so many, and `moving` of these at least did.

    Weight decay moves them even where there is no gradient.
    """
    masks = life.masks
    with_bits = {name: value.view(torch.int32) for name, value in life.end.items()}
    moved = {n: value != life.start[n].view(torch.int32) for n, value in with_bits.items()}
    for name, where in moved.items():
        allowed = masks.get(name, torch.zeros_like(where))
        assert not (where & ~allowed).any(), name
    trainable = sum(int(mask.sum()) for mask in masks.values())
    matrices = [  # kernels and matrices of the backbone; tokens and positions are embeddings
        value.numel()
        for name, value in life.start.items()
        if name.startswith("backbone.") and value.ndim > 1 and name.endswith("weight")
    ]
    assert trainable == round(density * sum(matrices))
    assert sum(int(where.sum()) for where in moved.values()) > moving * trainable
    # And what is on disk is what was lived through.
    stored = load_file(max(life.folder.checkpoints.iterdir()) / TENSORS)
    tensors = {n.removeprefix("model/"): v for n, v in stored.items() if n.startswith("model/")}
    assert tensors.keys() == {*masks, "head.weight", "head.bias"}
    assert params.digest(tensors) == params.digest({name: life.end[name] for name in tensors})
    opened = open_run(life.folder, StopRequest())
    assert params.digest(opened.start) == params.digest(life.start)
    assert params.digest(opened.tuned) == params.digest(life.end)


@pytest.mark.parametrize("rule", RULES)
def test_under_every_rule_frozen_weights_keep_their_bits(rule: str, live: Live) -> None:
    kept_to_its_masks(live(f"sparse.rule={rule}"), 0.1)


@pytest.mark.parametrize(
    "options",
    [
        [*SKEWED, "sparse.source=clients", "sparse.density=0.03"],
        [*SKEWED, "sparse.source=clients", "sparse.voting=majority", "sparse.clients=2"],
        ["algorithm=scaffold", "sparse.scope=tensor", "train.clip_norm=1"],
        ["algorithm=fedadam", "algorithm.proximal=0.1", "train.nesterov=true"],
        ["algorithm=ties", "algorithm.merge.density=1", "federated.fewest_local_steps=1"],
    ],
)
def test_under_other_settings_frozen_weights_keep_their_bits(
    options: list[str], live: Live
) -> None:
    density = 0.03 if "sparse.density=0.03" in options else 0.1
    moving = 0.5 if "algorithm=ties" in options else 0.9  # votes on signs can end in a draw
    kept_to_its_masks(live(*options), density, moving=moving)


@pytest.mark.parametrize(
    "options", [[], ["sparse.rule=random", "train.clip_norm=0.5", "train.micro_batch=40"]]
)
def test_centrally_frozen_weights_keep_their_bits(options: list[str], live: Live) -> None:
    kept_to_its_masks(live(*options, central=True), 0.1)


def test_a_run_tells_what_it_trained(live: Live) -> None:
    life = live("sparse.rule=least_sensitive")
    result = life.folder.result
    assert result is not None
    assert (result["density"], result["mask_rule"]) == (0.1, "least_sensitive")
    assert result["facts"]["weights_trained"] == round(0.1 * result["facts"]["weights_maskable"])
    assert result["facts"].keys() >= {"temperature", "ridge_lambda"}
    assert life.records[0]["round"] == 0  # the head alone is worth a look
    assert "least-sensitive-0.1" in run.run_name(compose("sparse_fedavg", []))


@pytest.mark.parametrize("density", [0.1, 0.01])
def test_an_update_weighs_the_trained_share_of_a_dense_one(density: float, live: Live) -> None:
    """No allowance for the header: values travel as one tensor, so it is about 80 bytes."""
    dense = live("sparse.density=null")
    sparse = live(f"sparse.density={density}", "sparse.rule=random", "federated.keep_updates=1")
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
def test_masks_of_everything_train_as_no_masks_do(central: bool, live: Live) -> None:
    dense = live("sparse.density=null", central=central)
    every = live(*WHOLE, "sparse.rule=random", central=central)
    assert all(mask.all() for mask in every.masks.values())
    assert params.digest(every.end) == params.digest(dense.end)
    assert params.digest(every.end) != params.digest(every.start)
    assert len(every.records) == len(dense.records) > 1
    for one, other in zip(every.records, dense.records, strict=True):
        assert one["validation"] == other["validation"]
        assert one.get("train") == other.get("train")


@pytest.mark.parametrize("central", [False, True])
def test_a_trained_head_is_trained_first_and_frozen_then(central: bool, live: Live) -> None:
    head = ["head=trained", "head.steps=6", "sparse.rule=random"]
    life = live(*head, central=central)
    kept_to_its_masks(life, 0.1)  # the head is among what did not move
    width = life.parts.model.head.in_features
    initial = heads.linear(width, 100, life.config.seed)
    assert not torch.equal(life.end["head.weight"], initial.weight)
    assert not torch.equal(life.end["head.bias"], initial.bias)


def test_a_head_left_free_trains_whole_beside_the_masked_weights(live: Live) -> None:
    life = live("head.freeze=false", "sparse.rule=random")
    assert not torch.equal(life.end["head.weight"], life.start["head.weight"])
    trained = sum(int(mask.sum()) for mask in life.masks.values())
    head = life.end["head.weight"].numel() + life.end["head.bias"].numel()
    for record in life.rounds:
        assert 0 < record["bytes_up"] - 3 * 4 * (trained + head) < 3 * 400


def stepped(kept: KeptRound) -> dict[str, torch.Tensor]:
    """FedAvg by hand: start + Σ pₖ δₖ, in float64."""
    total = sum(kept.examples.values())
    moved = {name: value.double() for name, value in kept.start.items()}
    for client, values in kept.clients.items():
        for name, value in values.items():
            delta = value.double() - kept.start[name].double()
            moved[name] = moved[name] + kept.examples[client] / total * delta
    return moved


@pytest.mark.parametrize("density", ["null", "0.1"])
def test_the_last_rounds_updates_are_kept_and_add_up_to_the_model(density: str, live: Live) -> None:
    uneven = ["partition=quantity", "federated.rounds=4", "federated.keep_updates=2"]
    life = live(*uneven, f"sparse.density={density}", "sparse.rule=random")
    folder = life.folder.updates
    assert kept_rounds(folder) == [3, 4]
    third, fourth = (read_round(folder, number) for number in (3, 4))
    trained = {n: v for n, v in life.end.items() if n in fourth.start}
    ends = {3: fourth.start, 4: Packing(trained, life.masks).pack(trained)}
    for kept in (third, fourth):
        record = life.records[kept.number]
        assert list(kept.clients) == record["participants"] == record["clients"]
        sizes = life.folder.partition["statistics"]["sizes"] if life.folder.partition else []
        assert kept.examples == {client: sizes[client] for client in kept.clients}
        assert len(set(kept.examples.values())) > 1
        expected = stepped(kept)
        assert expected.keys() == ends[kept.number].keys()
        for name, value in ends[kept.number].items():
            torch.testing.assert_close(value.double(), expected[name], rtol=1e-6, atol=1e-7)


def test_rounds_without_an_answer_do_not_keep_older_updates_alive(tiny: Tiny) -> None:
    rare = ["federated.dropout=0.5", "federated.participation=0.2", "federated.rounds=8"]
    folder = start(tiny(*FEDERATED, *ON_FEATURES, *rare, "federated.keep_updates=2"))
    records = folder.journal("metrics").read()
    answered = [record["round"] for record in records if record["clients"]]
    assert answered == [2, 6, 8]
    assert min(kept_rounds(folder.updates)) >= 6


def test_no_updates_are_kept_unless_asked_for(live: Live) -> None:
    assert not live("sparse.rule=least_sensitive").folder.updates.exists()


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.safetensors")}


INTERRUPTED = {
    "calibrated on validation": ["sparse.rounds=3", "algorithm=scaffold"],
    "calibrated by clients": [
        *(*SKEWED, "sparse.source=clients", "sparse.clients=2", "federated.keep_updates=2"),
    ],
}


@pytest.mark.parametrize("mode", INTERRUPTED)
def test_interrupted_anywhere_it_ends_as_if_never(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(root: str) -> Config:
        own = [*INTERRUPTED[mode], "run.name=it", f"run.root={tmp_path / root}"]
        return compose("sparse_fedavg", [*WORLD, *CLIENTS, "evaluate.test_curve=true", *own])

    shutil.rmtree(cache_dir() / "masks", ignore_errors=True)
    whole = start(told("whole"))
    cut = told("cut")
    folder = RunFolder(tmp_path / "cut" / "it")
    when: list[str] = []
    for points in (1, 2, 3, 4, 5, 6, 7, 8, 9, 3, 4, 2, 5):
        if not folder.masks.exists():  # or the masks of `whole`, or a cut calibration's, were found
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


def test_masks_damaged_between_sessions_are_told_of_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ["sparse.rule=random", "run.name=it", f"run.root={tmp_path}"]
    config = compose("sparse_fedavg", [*WORLD, *CLIENTS, *own])
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
    folder.masks.unlink()  # what is left to do: they are found, or made, again
    assert start(config).result is not None
    assert folder.masks.read_bytes() == whole


@pytest.mark.parametrize("options", [[], ["algorithm=scaffold", "head.freeze=false", *SKEWED]])
def test_workers_give_the_bits_of_one_process(options: list[str], tmp_path: Path) -> None:
    common = [*WORLD, *CLIENTS, *options, "engine.threads_per_client=1"]
    alone = ["engine=serial", f"run.root={tmp_path / 'serial'}"]
    workers = ["engine=parallel", "engine.workers=2", f"run.root={tmp_path / 'parallel'}"]
    either = ["engine=auto", "engine.workers=2", f"run.root={tmp_path / 'auto'}"]
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
    known = []
    real = synthetic.dataset

    def watched() -> Dataset:
        found = real()

        def look() -> Images:
            (folder,) = runs(tmp_path)
            known.append((folder.choice, len(folder.journal("metrics").read())))
            return found.load_test()

        return dataclasses.replace(found, load_test=look)

    monkeypatch.setattr(synthetic, "dataset", watched)
    told = [*WORLD, *CLIENTS, *options, f"run.root={tmp_path}"]
    folder = start(compose("sparse_fedavg", told))
    assert folder.result is not None
    assert known == [(folder.result["choice"], len(folder.journal("metrics").read()))]


def test_what_the_test_split_holds_does_not_change_the_masks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    real = synthetic.dataset
    for root in ("honest", "lied to"):
        shutil.rmtree(cache_dir() / "masks", ignore_errors=True)
        told = [*WORLD, *CLIENTS, "federated.rounds=1", f"run.root={tmp_path / root}"]
        found.append(start(compose("sparse_fedavg", told)))

        def lying() -> Dataset:
            truth = real()
            images = truth.load_test()
            other = Images(images.pixels.flip(0), images.labels)
            return dataclasses.replace(truth, load_test=lambda: other)

        monkeypatch.setattr(synthetic, "dataset", lying)
    honest, lied_to = found
    assert honest.masks.read_bytes() == lied_to.masks.read_bytes()
    assert facts(honest)["metrics"] == facts(lied_to)["metrics"]
    assert facts(honest)["result"] != facts(lied_to)["result"]


@pytest.mark.parametrize("merge", MERGES)
def test_a_merge_serves_as_a_server_and_survives_an_interruption(
    merge: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = [*CLIENTS, *ON_FEATURES, f"algorithm={merge}", "evaluate.select=last"]
    whole = start(tiny(*common, root="whole"))
    assert whole.result is not None
    assert (whole.result["algorithm"], whole.result["units"]) == (merge, 2)
    averaged = start(tiny(*common, "algorithm=fedavg", root="fedavg"))
    assert averaged.result is not None
    same = averaged.result["choice"] == whole.result["choice"]
    assert not same or merge == "task_arithmetic"  # which, at scale 1, may be the plain mean
    cut = tiny(*common, root="cut")
    assert interrupted_at(cut, 3, monkeypatch)
    assert facts(start(cut)) == facts(whole)


def test_what_dare_drops_is_drawn_anew_in_every_round(live: Live) -> None:
    """There is but one client: what the server's step reached is what was kept of its update."""
    told = ["algorithm=dare", "algorithm.merge.density=0.5", "sparse.rule=random"]
    life = live(*told, "federated.keep_updates=2", "federated.clients=1")
    first, second = (read_round(life.folder.updates, number) for number in (1, 2))
    trained = {n: life.end[n] for n in life.masks}
    end = Packing(trained, life.masks).pack(trained)
    one = {name: value != first.start[name] for name, value in second.start.items()}
    two = {name: value != second.start[name] for name, value in end.items()}
    for kept in (one, two):
        share = sum(int(k.sum()) for k in kept.values()) / sum(k.numel() for k in kept.values())
        assert 0.45 < share < 0.55
    assert params.digest(one) != params.digest(two)


# What a suite is about; all else is equal between its cells.
SUITES = {
    "sparsity": ("density", {None, 0.5, 0.3, 0.2, 0.1, 0.05, 0.01}, {0, 1}),
    "calibration_rounds": ("rounds", {1, 2, 4, 8}, {0, 1}),
    "mask_rules": ("rule", set(RULES), {0, 50, 10, 5, 1}),
}


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_varies_one_thing_at_an_equal_budget(name: str) -> None:
    key, values, splits = SUITES[name]
    cells = [cell for cell in find(name).cells([]) if cell.row != "ridge head alone"]
    found = set()
    rest = set()
    for cell in cells:
        told = essence(cell.config)
        assert cell.config.experiment == "sparse_fedavg"
        assert cell.config.head.name == "ridge"
        assert cell.config.head.freeze
        del told["train"]["lr"]  # each rule's own, or gradients of unlike size are compared
        partition = told.pop("partition")
        classes = partition["classes_per_client"] if partition["name"] == "classes" else 0
        assert partition["name"] in ("iid", "classes")
        dense = told["sparse"]["density"] is None
        value = "dense" if dense and name == "mask_rules" else told["sparse"].pop(key)
        if dense:  # a baseline, which no choice of masks has a part in
            told["sparse"] = None
        found.add((value, classes))
        rest.add(json.dumps({**told, "sparse": None}, sort_keys=True))
        if not dense:
            rest.add("sparse: " + json.dumps(told["sparse"], sort_keys=True))
    baseline = {"dense"} if name == "mask_rules" else set()
    assert found == {(value, classes) for value in values | baseline for classes in splits}
    assert len(cells) == len(found)
    assert len(rest) == 2  # one of everything else, one of what else is said of masks
    assert len({cell.config.federated.local_step_budget for cell in cells}) == 1
    assert len({cell.config.train.batch_size for cell in cells}) == 1
