from collections.abc import Collection
from pathlib import Path

import pytest

from fedlens.config.compose import compose
from fedlens.experiments import settings
from fedlens.models import heads
from fedlens.store.run_folder import RunFolder
from fedlens.suites.estimates.cost import (
    TRIED,
    SharedWork,
    Work,
    analysis_work,
    count_shared_once,
    evaluation_task,
    factorisations,
    skips_blocks,
    speed_key,
    total_cost,
    work_at_the_end,
    work_at_the_start,
    work_of,
)
from fedlens.suites.plan import PlannedRun, estimates, eta_of
from fedlens.suites.suite import Cell


def shared(work: Work) -> dict[str, int]:
    """What it is → images: the keys begin with a word for it."""
    return {part.key.strip('["').partition('"')[0]: part.images for part in work.shared}


def test_central_training_sees_every_image_once_an_epoch() -> None:
    """45,000 images are trained on ten times; 5,000 are held out, 10,000 tested."""
    work = work_of(compose("centralized", ["evaluate.every=3"]))
    assert work.images == {"train": 450_000, "evaluate": 4 * 5_000 + 10_000}  # after 3, 6, 9, 10
    assert work.shared == ()


def test_an_epoch_cut_short_is_so_many_batches() -> None:
    words = ["train.epochs=2", "train.batch_size=80"]
    told = [
        work_of(compose("centralized", [*words, f"train.steps_per_epoch={n}"])) for n in (128, 999)
    ]
    assert [work.images["train"] for work in told] == [2 * 128 * 80, 2 * 45_000]


def test_a_test_curve_doubles_the_looks_and_no_test_takes_the_last_one_away() -> None:
    curve = work_of(compose("centralized", ["evaluate.test_curve=true", "train.epochs=2"]))
    assert curve.images["evaluate"] == 2 * (5_000 + 10_000) + 10_000
    blind = work_of(compose("centralized", ["evaluate.test=false", "train.epochs=2"]))
    assert blind.images["evaluate"] == 2 * 5_000


def test_a_subset_is_as_much_as_it_says() -> None:
    told = ["data.train_per_class=20", "data.test_per_class=3", "train.epochs=1"]
    work = work_of(compose("centralized", told))
    assert work.images == {"train": 1_800, "evaluate": 200 + 300}


def test_clients_pass_over_their_shards_in_batches() -> None:
    """Shards of 180: five batches of 32 and one of 20; eight steps see 5·32 + 20 + 2·32 = 244."""
    work = work_of(compose("quickstart_fedavg", []))
    assert work.images["train"] == 15 * 10 * 244
    assert work.images["evaluate"] == 3 * 2_000 + 5_000  # after rounds 5, 10 and 15
    assert work.shared == ()


def test_measured_controls_take_one_step_of_every_client() -> None:
    words = ["algorithm=chain", "algorithm.scaffold=true", "train.optimizer.momentum=0"]
    without = work_of(compose("quickstart_fedavg", words))
    config = compose("quickstart_fedavg", [*words, "algorithm.measure_controls=true"])
    clients, batch = config.federated.clients, config.train.batch_size
    assert clients is not None
    more = work_of(config).images["train"] - without.images["train"]
    assert more == clients * batch


def test_stragglers_and_dropouts_do_less() -> None:
    """Steps from 2 to 6 are 4 on average: 4 · 32 images; one client in five does not answer."""
    told = ["federated.local_steps=6", "federated.min_local_steps=2", "federated.dropout=0.2",
            "federated.rounds=3"]  # fmt: skip
    assert work_of(compose("quickstart_fedavg", told)).images["train"] == 3 * 8 * 128


def test_a_sparse_run_calibrates_and_takes_features_for_its_head() -> None:
    """Four rounds over 2,000 validation images; features of all 20,000, from which round 0 is.

    The head is solved once, from sums over the 18,000 training images.
    """
    work = work_of(compose("quickstart_sparse", []))
    assert shared(work) == {"train features": 20_000, "sums": 18_000, "masks": 4 * 2_000}
    assert work.images["evaluate"] == 2 * 2_000 + 5_000
    assert work.images["solve"] == 1
    random = work_of(compose("quickstart_sparse", ["sparse.rule=random"]))
    assert "masks" not in shared(random)


def test_clients_calibrate_on_what_they_hold() -> None:
    told = ["sparse.source=clients", "sparse.rounds=2", "sparse.passes=3"]
    assert shared(work_of(compose("quickstart_sparse", told)))["masks"] == 6 * 18_000
    some = [*told, "sparse.clients=10", "sparse.examples=50"]
    assert shared(work_of(compose("quickstart_sparse", some)))["masks"] == 6 * 10 * 50


def test_heads_that_are_solved_again_see_a_part_of_the_images_in_between() -> None:
    """32 rounds: after 10, 20 and 30, and after the last where the head then reads more."""
    words = ["head=deep_ridge", "head.layers=12", "federated.local_step_budget=128",
             "sparse.density=null", "evaluate.every=32", "evaluate.test=false"]  # fmt: skip

    def evaluated(*more: str) -> int:
        return work_of(compose("sparse_fedavg", [*words, *more])).images["evaluate"] - 5_000

    def last(*more: str) -> int:
        return work_at_the_end(compose("sparse_fedavg", [*words, *more]))["evaluate"]

    assert evaluated() == 0
    assert evaluated("head.train_layers=0") == 50_000
    assert evaluated("federated.refit_head=10") == 3 * 50_000
    part = ["federated.refit_head=10", "federated.refit_examples=100"]
    assert evaluated(*part) == 3 * 15_000
    assert evaluated(*part, "head.train_layers=0") == 3 * 15_000 + 50_000
    part[0] = "federated.refit_head=16"
    assert evaluated(*part) == 15_000 + 50_000
    assert last() == 0
    assert last("federated.refit_head=10") == 0
    assert last("federated.refit_head=16") == 50_000
    assert last("head.train_layers=0", "evaluate.test=true") == 50_000 + 10_000


def test_every_client_that_answers_is_a_visit() -> None:
    """10 of 100 clients in each of 2000 / 4 rounds, of which a tenth drops out."""
    assert work_of(compose("fedavg_iid", [])).images["visit"] == 5_000
    assert work_of(compose("fedavg_iid", ["federated.dropout=0.1"])).images["visit"] == 4_500
    assert "visit" not in work_of(compose("centralized", [])).images


def test_evaluation_is_timed_once_whatever_is_trained_unless_that_adds_to_the_model() -> None:
    def key(trained: str, task: str) -> str:
        return speed_key(compose("centralized", [f"train.trainable={trained}"]), task)

    assert key("full", "evaluate") == key("last_blocks:2", "evaluate") == key("head", "evaluate")
    assert key("full", "train") != key("last_blocks:2", "train")
    assert len({key(one, "evaluate") for one in ("full", "lora", "linearised")}) == 3


def test_heads_on_features_leave_the_backbone_one_pass() -> None:
    work = work_of(compose("federated_head", ["data=synthetic", "backbone=vit_pico"]))
    assert work.images.keys() == {"head"}
    assert shared(work) == {"train features": 20_000, "test features": 5_000}
    augmented = work_of(compose("federated_head", ["augment=standard"]))
    assert augmented.images.keys() == {"train", "evaluate", "visit"}  # every image is another one
    assert augmented.shared == ()


def test_features_of_several_blocks_are_computed_once() -> None:
    deep = ["head=deep_ridge", "evaluate.test=false"]
    works = [work_of(compose("ridge", [*deep, f"head.layers={n}"])) for n in (12, 6, 1)]
    assert [images.get("evaluate", 0) for images in count_shared_once(works)] == [50_000, 0, 0]
    others = [
        work_of(compose("ridge", [*deep, *words]))
        for words in (["head.tokens=mean"], ["head.random_features=64"], ["head.layers=0"])
    ]
    counted = count_shared_once([works[0], *others])
    assert [images.get("evaluate", 0) for images in counted] == [50_000] * 4


FROZEN = ["augment=none", "backbone.freeze_blocks=6", "sparse.density=null"]


def test_cached_activations_are_computed_once_and_spare_the_first_blocks() -> None:
    """Of all training images, and of the test images; a run evaluates and trains after them."""
    work = work_of(compose("sparse_fedavg", FROZEN))
    assert set(work.images) == {"train", "evaluate_cached", "visit", "solve"}
    assert shared(work)["train activations"] == 50_000
    assert shared(work)["test activations"] == 10_000
    assert "evaluate_cached" in work_at_the_end(compose("sparse_fedavg", FROZEN))
    deeper = work_of(compose("sparse_fedavg", [*FROZEN, "backbone.freeze_blocks=7"]))
    assert not {one.key for one in deeper.shared if "activations" in one.key} & {
        one.key for one in work.shared
    }


@pytest.mark.parametrize(
    "words",
    [
        ["augment=standard"],
        ["backbone.freeze_blocks=0"],
        ["train.prefix_cache_gb=0"],
        ["train.compile=true"],
        ["engine=flower"],
        ["algorithm=regmean"],
        ["federated.rounds=1"],  # which sees fewer images than a cache has
    ],
    ids=" ".join,
)
def test_nothing_is_cached_where_a_run_would_not(words: list[str]) -> None:
    config = compose("sparse_fedavg", [*FROZEN, *words])
    assert not skips_blocks(config)
    assert evaluation_task(config) == "evaluate"
    if words[0].startswith(("train.compile", "engine", "algorithm")):
        assert settings._prefix_refusal(config)


@pytest.mark.parametrize(("rounds", "cached"), [(9, False), (10, True)])
def test_activations_are_cached_from_half_of_the_images_on(rounds: int, cached: bool) -> None:
    """A round has 10 clients with 4 steps of 64 images: 2,560 of the file's 50,000."""
    words = [*FROZEN, f"federated.rounds={rounds}", "evaluate.every=100"]
    config = compose("sparse_fedavg", words)
    assert config.train.batch_size == 64
    assert skips_blocks(config) == cached


def test_a_closed_form_trains_nothing() -> None:
    work = work_of(compose("ridge", []))
    assert work.images == {"head": 5_000 + 10_000, "solve": 1}
    assert shared(work) == {"train features": 50_000, "test features": 10_000, "sums": 45_000}


@pytest.mark.parametrize(
    ("words", "same"),
    [
        (["head=gaussian"], True),
        (["head=class_means"], True),
        (["backbone.freeze_blocks=2"], True),
        (["seed=5"], False),  # which draws the shards and the validation split
        (["partition=classes", "partition.classes_per_client=1"], False),
        (["federated.clients=10"], False),
        (["head.layers=2"], False),
        (["data.validation=0.2"], False),
    ],
)
def test_runs_share_sums_where_the_same_clients_have_the_same_features(
    words: list[str], same: bool
) -> None:
    def sums(told: list[str]) -> list[SharedWork]:
        found = work_of(compose("sparse_fedavg", told)).shared
        return [part for part in found if part.task == "sums"]

    (plain,) = sums([])
    assert (sums(words) == [plain]) == same
    assert plain.images == 45_000


def test_remote_clients_keep_their_sums_from_other_runs() -> None:
    work = work_of(compose("federated_ridge", ["engine=flower"]))
    assert work.images["sums"] == 45_000
    assert "sums" not in shared(work)


def test_a_head_that_is_trained_or_drawn_needs_no_sums() -> None:
    for name in ("linear", "trained"):
        work = work_of(compose("sparse_fedavg", [f"head={name}", "head.freeze=false"]))
        assert not work.images.keys() & {"sums", "solve"}
        assert "sums" not in shared(work)


def test_sums_and_solutions_of_heads_that_are_solved_again() -> None:
    """32 rounds, each tenth a head on 5 + 1 of 11 + 1 parts from 10,000 images: a quarter of their
    sums, and an eighth of a solution. After the last round a whole head from all 45,000 images.
    """
    words = ["head=deep_ridge", "head.layers=11", "federated.local_step_budget=128",
             "sparse.density=null", "federated.refit_head=10",
             "federated.refit_examples=100"]  # fmt: skip
    whole = compose("sparse_fedavg", words)
    work = work_of(whole)
    assert (work.images["sums"], work.images["solve"]) == (3 * 10_000, 1 + 3)
    assert work_at_the_start(whole) == {"solve": 1}
    assert work_at_the_end(whole)["solve"] == 0
    part = compose("sparse_fedavg", [*words, "head.train_layers=5"])
    work = work_of(part)
    assert (work.images["sums"], work.images["solve"]) == (3 * 2_500 + 45_000, 1)
    assert work_at_the_start(part) == {"solve": 0}  # an eighth, as those in between
    ends = work_at_the_end(part)
    assert (ends["sums"], ends["solve"]) == (45_000, 1)


def test_factorisations_are_the_values_that_a_head_tries() -> None:
    assert {"l2": len(heads.GRID), "shrinkage": len(heads.SHRINKAGES)} == TRIED
    told = {"head=ridge": 9, "head=deep_ridge": 9, "head=gaussian": 6, "head=class_means": 0}
    for word, count in told.items():
        assert factorisations(compose("ridge", [word])) == count
    assert factorisations(compose("ridge", ["head.l2=10"])) == 1


def test_the_first_head_comes_before_the_rounds_and_the_last_one_after_them() -> None:
    """Costs are rough ones: 0.06 for an image in the sums of 12 blocks, 1000 for its head."""
    words = ["head=deep_ridge", "head.layers=12", "federated.local_step_budget=128",
             "sparse.density=null", "run.root=nowhere"]  # fmt: skip
    (chain,) = eta_of([run("federated.refit_head=16", *words)], jobs=1).parts.values()
    assert chain.first[(True, "sums")] == pytest.approx(0.06 * 45_000)
    assert chain.first[(False, "solve")] == pytest.approx(1000)
    assert chain.own[(False, "sums")] == chain.last[(False, "sums")] == pytest.approx(0.06 * 45_000)
    assert chain.own[(False, "solve")] == chain.last[(False, "solve")] == pytest.approx(1000)


def run(*words: str) -> PlannedRun:
    config = compose("sparse_fedavg", [*words])
    return PlannedRun(Cell("", "a", "", config, [], []), RunFolder(Path("nowhere", "a")))


def test_what_is_shared_is_counted_with_the_first_that_has_it() -> None:
    a, b = SharedWork("a", "evaluate", 10), SharedWork("b", "calibrate", 5)
    works = [Work({"train": 1}, (a,)), Work({"train": 2}, (a, b)), Work({"evaluate": 3}, (b,))]
    assert count_shared_once(works) == [
        {"train": 1, "evaluate": 10}, {"train": 2, "calibrate": 5}, {"evaluate": 3},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "same"),
    [
        (["train.lr=0.5"], True),
        (["partition=classes", "partition.classes_per_client=1"], True),
        (["seed=1"], True),
        (["sparse.density=0.2"], False),
        (["head=trained"], False),
        (["sparse.examples=9"], False),
    ],
)
def test_runs_share_masks_where_these_depend_on_nothing_else(words: list[str], same: bool) -> None:
    def masks(told: list[str]) -> list[SharedWork]:
        found = work_of(compose("quickstart_sparse", ["seed=1", *told])).shared
        return [part for part in found if part.task == "calibrate"]

    assert (masks(words) == masks([])) == same


def test_a_speed_key_is_what_determines_the_speed_of_a_task() -> None:
    def keys(words: list[str]) -> dict[str, str]:
        config = compose("quickstart_sparse", words)
        return {task: speed_key(config, task) for task in ("train", "evaluate", "calibrate")}

    plain = keys([])
    for words in (["train.lr=9"], ["seed=3"], ["federated.rounds=1"], ["partition=dirichlet"],
                  ["sparse.density=0.5"]):  # fmt: skip
        assert keys(words) == plain
    for words in (["backbone=vit_tiny"], ["device=cpu"], ["train.precision=amp"]):
        assert not set(keys(words).values()) & set(plain.values())
    for words in (["train.batch_size=8"], ["train.optimizer=adamw"], ["augment=standard"]):
        changed = keys(words)
        assert changed["train"] != plain["train"]
        assert changed["evaluate"] == plain["evaluate"]


def test_an_estimate_is_images_times_seconds_and_asks_once_for_each_kind() -> None:
    told = ["data=synthetic", "backbone=vit_pico", "backbone.pretrained=false", "train.epochs=1",
            "run.root=nowhere"]  # fmt: skip
    asked = []

    def measure(config: object, tasks: Collection[str]) -> dict[str, float]:
        asked.append(set(tasks))
        return {"train": 1.0, "evaluate": 0.5}

    runs = [
        PlannedRun(Cell("", str(seed), "", config, [], []), RunFolder(Path("nowhere", str(seed))))
        for seed in range(2)
        for config in [compose("centralized", [*told, f"seed={seed}"])]
    ]
    assert estimates(runs, measure) == [1 + 18_000 + 0.5 * (2_000 + 5_000)] * 2
    assert asked == [{"train"}, {"evaluate"}]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("alpha --base pretrained", 21 * 2_000 + 5_000),
        ("alpha --alphas 0,1", 2 * 2_000 + 5_000),
        ("merge --method ties --method dare --scales=1,2", 4 * 2_000 + 5_000),
        ("forget --class 0 --scales 1:2:0.5", 4 * 2_000 + 5_000),  # and λ = 0
        (
            "interference",
            28 * 2 * 2_000,
        ),  # 5 × 5 pairs of α and 3; images of both clients
        ("interference --alphas 1", 6 * 2 * 2_000),  # with (1, 0) and (0, 1)
        ("clients --drop 3", 2 * 2_000 + 5_000),
    ],
)
def test_an_analysis_evaluates_every_candidate_on_validation(command: str, expected: int) -> None:
    assert analysis_work(command, compose("quickstart_fedavg", []))["evaluate"] == expected


def test_an_analysis_solves_the_head_of_its_run_again() -> None:
    for words, expected in (([], 1), (["head=linear", "head.freeze=false"], 0)):
        config = compose("quickstart_sparse", words)
        assert analysis_work("alpha --base pretrained", config).get("solve", 0) == expected


def test_weights_add_up_over_tasks() -> None:
    assert total_cost({"train": 2, "evaluate": 4}, {"train": 3.0, "evaluate": 0.25}) == 7.0
    assert total_cost({"train": 0}, {}) == 0.0
