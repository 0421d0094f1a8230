"""Which weights a run trains: whose examples decide, at what price, and what is kept of it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlens import params
from fedlens.config.compose import compose
from fedlens.config.schema import Config
from fedlens.data.images import Examples
from fedlens.errors import FedlensError
from fedlens.experiments import calibration
from fedlens.experiments.build import Parts, build, resolved
from fedlens.experiments.calibration import Sources
from fedlens.experiments.masks import masked
from fedlens.federated import wire
from fedlens.files import cache_dir
from fedlens.rng import Stream
from fedlens.runtime.stop import Interrupted, StopRequest
from fedlens.sparse import mask_files
from fedlens.sparse.fisher import Sensitivity, sensitivity
from fedlens.sparse.masks import RULES
from fedlens.sparse.per_example_gradients import Squares
from fedlens.store.run_folder import RunFolder
from tests.integration.conftest import TINY

WORLD = [
    *("data=synthetic", "augment=none", "backbone=vit_pico", *TINY, "federated.clients=5"),
    *("sparse.rounds=2", "sparse.examples=8", "data.train_per_class=2", "data.validation=0.5"),
]
BY_CLIENTS = ["sparse.source=clients", "partition=classes", "partition.classes_per_client=20"]
EXACT = ["sparse.labels=data", "sparse.examples=null", "sparse.rounds=1"]  # nothing is drawn

Heard = list[tuple[Examples, torch.Tensor]]


@pytest.fixture(autouse=True)
def _nothing_calibrated_yet() -> None:
    shutil.rmtree(cache_dir() / "masks", ignore_errors=True)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    """What sensitivity was taken of: examples, and which of them."""
    calls: Heard = []

    def listening(squares: Squares, examples: Examples, **options: Any) -> Sensitivity:
        calls.append((examples, options["index"]))
        return sensitivity(squares, examples, **options)

    monkeypatch.setattr(calibration, "sensitivity", listening)
    return calls


def told(*overrides: str) -> Config:
    return resolved(compose("sparse_fedavg", [*WORLD, *overrides]))


def built(config: Config) -> Parts:
    return build(config, torch.device("cpu"), StopRequest())


@pytest.fixture
def calibrated(tmp_path: Path) -> Callable[..., Parts]:
    """The parts of a run with these overrides, masked; its folder is named by `name`."""

    def make(*overrides: str, name: str = "it") -> Parts:
        config = told(*overrides)
        return masked(config, built(config), RunFolder(tmp_path / name), StopRequest())

    return make


def count(parts: Parts) -> int:
    return sum(int(mask.sum()) for mask in parts.masks.values())


def matrices(parts: Parts) -> dict[str, torch.Tensor]:
    """What is maskable unless more is asked for: the backbone's matrices and kernels."""
    found = dict(parts.model.named_parameters())
    embeddings = ("pos_embed", "token")
    return {
        name: value
        for name, value in found.items()
        if name.startswith("backbone.") and value.ndim > 1 and not name.endswith(embeddings)
    }


def record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "masks.json").read_text())
    return found


def same(one: Parts, other: Parts) -> bool:
    return params.digest(one.masks) == params.digest(other.masks)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_trains_exactly_as_many_weights(
    rule: str, calibrated: Callable[..., Parts]
) -> None:
    density = 0.0137
    parts = calibrated(f"sparse.rule={rule}", f"sparse.density={density}", "sparse.rounds=1")
    total = sum(value.numel() for value in matrices(parts).values())
    assert count(parts) == round(density * total)
    assert parts.facts["weights_trained"] == count(parts)
    assert parts.facts["weights_maskable"] == total
    for name, value in parts.model.named_parameters():
        assert value.requires_grad == (name in parts.masks)
    assert parts.masks.keys() <= matrices(parts).keys()
    assert all(mask.any() for mask in parts.masks.values())


def test_without_a_density_everything_is_as_it_was(
    calibrated: Callable[..., Parts], tmp_path: Path
) -> None:
    parts = calibrated("sparse.density=null")
    assert parts.masks == {}
    assert all(value.requires_grad for value in parts.model.backbone.parameters())
    assert not tmp_path.joinpath("it").exists()


def test_biases_norms_and_embeddings_compete_when_asked_to(
    calibrated: Callable[..., Parts],
) -> None:
    random = ["sparse.rule=random", "sparse.density=1"]
    more = ["sparse.biases=true", "sparse.norms=true", "sparse.embeddings=true"]
    parts = calibrated(*random, *more)
    every = parts.model.backbone.named_parameters(prefix="backbone")
    assert parts.masks.keys() == {name for name, _ in every}
    sizes = {key: count(calibrated(*random, key, name=key)) for key in more}
    alone = count(calibrated(*random, name="none"))
    assert alone == sum(value.numel() for value in matrices(parts).values())
    assert sum(size - alone for size in sizes.values()) == count(parts) - alone
    assert min(sizes.values()) > alone


def test_only_what_would_be_trained_competes_and_a_free_head_stays_free(
    calibrated: Callable[..., Parts],
) -> None:
    parts = calibrated("train.what=last_blocks:1", "head.freeze=false", "sparse.density=0.25")
    places = {".".join(name.split(".")[:3]) for name in parts.masks}
    assert len(places) == 1
    (last,) = places
    inside = [value for name, value in matrices(parts).items() if name.startswith(f"{last}.")]
    assert count(parts) == round(0.25 * sum(value.numel() for value in inside))
    assert parts.model.head.weight.requires_grad
    assert "head.weight" not in parts.masks


def test_calibrating_leaves_every_weight_as_it_was(tmp_path: Path) -> None:
    config = told()
    parts = built(config)
    before = params.digest(dict(parts.model.named_parameters()))
    found = masked(config, parts, RunFolder(tmp_path), StopRequest())
    assert params.digest(dict(found.model.named_parameters())) == before


def test_interrupted_while_calibrating_nothing_is_written_and_no_weight_is_changed(
    tmp_path: Path,
) -> None:
    class Later(StopRequest):
        asked = 0

        def check(self) -> None:
            self.asked += 1
            if self.asked == 2:  # in the second round, with weights softened
                raise Interrupted("SIGTERM")

    config = told()
    parts = built(config)
    before = params.digest(dict(parts.model.named_parameters()))
    with pytest.raises(Interrupted):
        masked(config, parts, RunFolder(tmp_path), Later())
    assert params.digest(dict(parts.model.named_parameters())) == before
    assert not RunFolder(tmp_path).masks.exists()
    assert not list((cache_dir() / "masks").glob("*"))


def test_masks_do_not_depend_on_how_one_trains_and_are_calibrated_once(
    calibrated: Callable[..., Parts], heard: Heard, tmp_path: Path
) -> None:
    first = calibrated("train.lr=0.1", name="first")
    assert len(heard) == 2
    other = ["train.lr=0.001", "train.momentum=0", "train.weight_decay=0.1", "train.batch_size=3"]
    again = calibrated(*other, "federated.rounds=7", "algorithm=scaffold", name="again")
    assert len(heard) == 2
    assert same(first, again)
    assert first.facts == again.facts
    files = [tmp_path / name / "masks.safetensors" for name in ("first", "again")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Parts, Path]:
    """Calibrated with no options, and its folder; its masks stay in a cache of their own."""
    config, folder = told(), tmp_path_factory.mktemp("plain")
    parts = masked(config, built(config), RunFolder(folder), StopRequest())
    shutil.copytree(cache_dir() / "masks", folder / "cache")
    return parts, folder / "cache"


@pytest.mark.parametrize(
    "option",
    [
        *("sparse.density=0.2", "sparse.rule=most_sensitive", "sparse.rounds=3", "sparse.soft=0.5"),
        *("sparse.method=mean", "sparse.labels=data", "sparse.target=log_prob", "seed=1"),
        *("sparse.examples=9", "sparse.passes=2", "sparse.scope=tensor", "head=class_means"),
    ],
)
def test_what_masks_depend_on_makes_them_anew(
    option: str, plain: tuple[Parts, Path], calibrated: Callable[..., Parts], heard: Heard
) -> None:
    parts, cache = plain
    shutil.copytree(cache, cache_dir() / "masks", dirs_exist_ok=True)
    other = calibrated(option)
    assert heard
    assert not same(parts, other)


def test_calibrated_twice_masks_are_the_same_file(
    calibrated: Callable[..., Parts], tmp_path: Path
) -> None:
    calibrated(name="first")
    shutil.rmtree(cache_dir() / "masks")
    calibrated(name="again")
    first, again = (tmp_path / name / "masks.safetensors" for name in ("first", "again"))
    assert first.read_bytes() == again.read_bytes()


@pytest.mark.parametrize("damage", ["a flipped bit", "cut in half", "not masks at all"])
def test_a_damaged_cache_is_noticed_and_made_again(
    damage: str,
    calibrated: Callable[..., Parts],
    heard: Heard,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = calibrated(name="first")
    (path,) = (cache_dir() / "masks").iterdir()
    whole = path.read_bytes()
    path.write_bytes(
        {
            "a flipped bit": whole[:-1] + bytes([whole[-1] ^ 1]),
            "cut in half": whole[: len(whole) // 2],
            "not masks at all": b"hello",
        }[damage]
    )
    again = calibrated(name="again")
    assert same(first, again)
    assert len(heard) == 4
    assert "made again" in caplog.text
    assert path.read_bytes() == whole


def test_a_run_trusts_its_own_masks_and_calibrates_no_more(
    calibrated: Callable[..., Parts], heard: Heard
) -> None:
    first = calibrated()
    shutil.rmtree(cache_dir() / "masks")
    assert same(calibrated(), first)
    assert len(heard) == 2


def test_a_run_whose_own_masks_are_damaged_says_so_in_one_sentence(
    calibrated: Callable[..., Parts], tmp_path: Path
) -> None:
    calibrated()
    path = RunFolder(tmp_path / "it").masks
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(FedlensError, match=r"masks.safetensors is damaged \(.*\): .*\.$") as caught:
        calibrated()
    assert "\n" not in str(caught.value)


def test_a_run_with_the_masks_of_another_model_says_so_in_one_sentence(
    calibrated: Callable[..., Parts], tmp_path: Path
) -> None:
    path = RunFolder(tmp_path / "it").masks
    path.parent.mkdir()
    mask_files.save(
        path, {"backbone.other.weight": torch.ones(2, 2, dtype=torch.bool)}, {"facts": {}}
    )
    with pytest.raises(FedlensError, match=r"does not fit this run: missing .*\.$"):
        calibrated()


@pytest.mark.parametrize("extra", [[], BY_CLIENTS, [*BY_CLIENTS, "sparse.voting=majority"]])
def test_every_choice_is_on_record_with_the_masks(
    extra: list[str], calibrated: Callable[..., Parts], tmp_path: Path
) -> None:
    config = told(*extra)
    parts = calibrated(*extra)
    found = record(tmp_path / "it")
    provenance = found["provenance"]
    for key, value in asdict(config.sparse).items():
        assert provenance[key] == value, key
    assert provenance["seed"] == config.seed
    assert provenance["data"] == parts.inputs["data"]
    assert provenance["parameters"] == params.digest(matrices(parts))
    assert provenance["partition"] == (asdict(config.partition) if extra else None)
    assert mask_files.load(RunFolder(tmp_path / "it").masks)[1] == provenance
    assert found["all"]["trained"] == count(parts)
    assert found["all"]["total"] == sum(value.numel() for value in matrices(parts).values())
    assert found["tensors"].keys() == matrices(parts).keys()  # those left out altogether, too


def test_scores_added_over_clients_are_those_of_the_pooled_examples() -> None:
    config = told(*BY_CLIENTS, *EXACT)
    parts = built(config)
    names = list(matrices(parts))
    added = Sources(config, parts, names, StopRequest()).pooled(0)
    squares = Squares(parts.model, names, parts.train.batch(torch.arange(2)))
    pooled = sensitivity(squares, parts.train, labels="data", stream=Stream(0, ("unused",)))
    assert pooled.count == len(parts.train)
    for name, expected in pooled.mean().items():
        error = torch.linalg.vector_norm(added[name] - expected)
        assert float(error / torch.linalg.vector_norm(expected)) < 1e-6
        torch.testing.assert_close(added[name], expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("voting", ["null", "majority"])
def test_every_client_scores_its_own_shard_and_nothing_else(
    voting: str, calibrated: Callable[..., Parts], heard: Heard
) -> None:
    every = ["sparse.examples=null", f"sparse.voting={voting}"]
    parts = calibrated(*BY_CLIENTS, *every)
    assert parts.partition is not None
    assert len(heard) == 2 * 5
    assert all(examples is parts.train for examples, _ in heard)
    seen = sorted(tuple(index.tolist()) for _, index in heard)
    shards = [tuple(parts.partition.shard(client).tolist()) for client in range(5)]
    assert seen == sorted(shards * 2)


def test_calibrating_by_clients_needs_no_validation_images(
    calibrated: Callable[..., Parts],
) -> None:
    none = ["data.validation=0", "evaluate.select=last", "head=trained", "head.steps=2"]
    assert count(calibrated(*BY_CLIENTS, *none)) > 0


def test_a_rule_that_looks_at_no_example_needs_none(calibrated: Callable[..., Parts]) -> None:
    none = ["data.validation=0", "evaluate.select=last", "head=trained", "head.steps=2"]
    assert count(calibrated(*none, "sparse.rule=highest_magnitude")) > 0


def test_only_so_many_clients_calibrate_and_they_are_the_same_in_every_round(
    calibrated: Callable[..., Parts], heard: Heard
) -> None:
    parts = calibrated(*BY_CLIENTS, "sparse.clients=2", "sparse.examples=null")
    assert parts.partition is not None
    shards = [tuple(parts.partition.shard(client).tolist()) for client in range(5)]
    asked = [shards.index(tuple(index.tolist())) for _, index in heard]
    assert len(asked) == 4
    assert asked[:2] == asked[2:]
    assert len(set(asked)) == 2
    assert not same(parts, calibrated(*BY_CLIENTS, "sparse.examples=null", name="all"))


def test_clients_score_at_most_so_many_examples_of_their_own(
    calibrated: Callable[..., Parts], heard: Heard
) -> None:
    parts = calibrated(*BY_CLIENTS, "sparse.examples=3")
    assert parts.partition is not None
    shards = [set(parts.partition.shard(client).tolist()) for client in range(5)]
    for number, (_, index) in enumerate(heard):
        chosen = index.tolist()
        assert len(chosen) == len(set(chosen)) == 3
        assert set(chosen) <= shards[number % 5]


def test_votes_end_at_one_density_with_different_weights(
    calibrated: Callable[..., Parts],
) -> None:
    votes = ("union", "majority", "intersection")
    found = [calibrated(*BY_CLIENTS, *EXACT, f"sparse.voting={v}", name=v) for v in votes]
    found.append(calibrated(*BY_CLIENTS, *EXACT, name="added"))
    assert len({count(parts) for parts in found}) == 1
    assert len({params.digest(parts.masks) for parts in found}) == 4


def test_a_single_voter_has_its_way_whatever_the_vote(calibrated: Callable[..., Parts]) -> None:
    votes = ("union", "majority", "intersection")
    one = [*BY_CLIENTS, *EXACT, "sparse.clients=1", "sparse.density=0.3"]
    found = [calibrated(*one, f"sparse.voting={v}", name=v) for v in votes]
    assert same(found[0], found[1])
    assert same(found[1], found[2])


def test_what_calibrating_sends_is_counted_as_serialised(
    calibrated: Callable[..., Parts],
) -> None:
    added = calibrated(*BY_CLIENTS, name="added")
    scores = {name: value.detach().double() for name, value in matrices(added).items()}
    assert added.facts["calibration_bytes_up"] == 2 * 5 * wire.size(scores)
    voted = calibrated(*BY_CLIENTS, "sparse.voting=union", "sparse.clients=3", name="voted")
    ranks = {name: value.int() for name, value in scores.items()}
    assert voted.facts["calibration_bytes_up"] == 3 * wire.size(ranks)
    assert "calibration_bytes_up" not in calibrated(name="validation").facts


@pytest.mark.parametrize("rule", ["random", "lowest_magnitude"])
def test_a_rule_that_looks_at_no_example_sends_nothing_whoever_is_asked(
    rule: str, calibrated: Callable[..., Parts], heard: Heard
) -> None:
    by_clients = [f"sparse.rule={rule}", *BY_CLIENTS, "sparse.voting=union"]
    asked = calibrated(*by_clients, name="clients")
    shutil.rmtree(cache_dir() / "masks")
    plain = calibrated(f"sparse.rule={rule}", name="plain")
    assert heard == []
    assert same(asked, plain)
    assert asked.facts.get("calibration_bytes_up", 0) == 0
    assert asked.facts.keys() == plain.facts.keys()  # else the cache would decide what is recorded


def test_calibration_reads_the_validation_images_alone_and_leaves_the_test_split_sealed(
    calibrated: Callable[..., Parts], heard: Heard
) -> None:
    parts = calibrated("sparse.examples=null")
    assert parts.validation is not None
    for examples, index in heard:
        assert examples is parts.validation
        assert torch.equal(index, torch.arange(len(parts.validation)))
    assert parts.test.opened is None


REFUSED = {
    "sparse.density=0": r"sparse.density=0.* must lie in \(0, 1\]",
    "sparse.density=1.5": r"sparse.density=1.5 must lie in \(0, 1\]",
    "sparse.density=-0.1": r"must lie in \(0, 1\]",
    "sparse.rule=least_sensitiv": r"sparse.rule=least_sensitiv is unknown: .*least_sensitive",
    "sparse.scope=layer": "sparse.scope=layer is unknown",
    "sparse.method=talo": "sparse.method=talo is unknown: .*talos",
    "sparse.labels=true_ones": "sparse.labels=true_ones is unknown",
    "sparse.target=loss": "sparse.target=loss is unknown",
    "sparse.source=test": "sparse.source=test is unknown",
    "sparse.voting=unions sparse.source=clients": "sparse.voting=unions is unknown: .*union",
    "sparse.voting=union": "set sparse.source=clients",
    "sparse.source=clients federated.clients=null": "set federated.clients",
    "sparse.clients=6 sparse.source=clients": "sparse.clients=6 are more than there are",
    "sparse.clients=0 sparse.source=clients": "sparse.clients must be at least 1",
    "sparse.rounds=0": "sparse.rounds must be at least 1",
    "sparse.soft=2": "sparse.soft must lie in",
    "sparse.examples=0": "sparse.examples must be at least 1",
    "sparse.passes=0": "sparse.passes must be at least 1",
    "sparse.micro_batch=0": "sparse.micro_batch must be at least 1",
    "train.what=head": "sparse.density masks the backbone, which train.what=head leaves",
    "data.validation=0 evaluate.select=last head=linear": "leaves nothing to calibrate on",
}


@pytest.mark.parametrize("words", REFUSED)
def test_bad_input_gets_one_clear_sentence(words: str) -> None:
    with pytest.raises(FedlensError, match=REFUSED[words]) as caught:
        told(*words.split())
    said = str(caught.value)
    assert "\n" not in said
    assert said.endswith((".", "?"))


@pytest.mark.parametrize("rule", ["random", "least_sensitive"])
def test_a_density_that_trains_nothing_is_refused(
    rule: str, calibrated: Callable[..., Parts]
) -> None:
    tiny = [f"sparse.rule={rule}", "sparse.density=1e-7"]
    with pytest.raises(FedlensError, match=r"sparse.density=1e-07 of \d+ weights is none at all"):
        calibrated(*tiny)
    with pytest.raises(FedlensError, match="none at all"):  # and again, of the same run
        calibrated(*tiny)
