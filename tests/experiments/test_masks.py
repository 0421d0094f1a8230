"""Which weights a run trains: whose examples score them, what that sends, what is stored."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlens import params
from fedlens.config.compose import compose
from fedlens.config.schema import Config
from fedlens.data.examples import Examples
from fedlens.errors import FedlensError
from fedlens.experiments import settings
from fedlens.experiments.build import Experiment, build, with_resolution
from fedlens.experiments.clients import local_session
from fedlens.experiments.preparation.head import prepare_head
from fedlens.experiments.preparation.masks import find_masks
from fedlens.federated import host, wire
from fedlens.federated.tasks import Clients
from fedlens.files import cache_dir
from fedlens.registry import mask_rule
from fedlens.rng import Stream
from fedlens.runtime.stop import Interrupted, StopRequest
from fedlens.sparse import mask_files
from fedlens.sparse.sensitivity.fisher import Sensitivity, sensitivity
from fedlens.sparse.sensitivity.per_example_gradients import SquaredGradients
from fedlens.store.run_folder import RunFolder
from tests.integration.conftest import TINY

SETTING = [
    *("data=synthetic", "augment=none", "backbone=vit_pico", *TINY, "federated.clients=5"),
    *("sparse.rounds=2", "sparse.examples=8", "data.train_per_class=2", "data.validation=0.5"),
]
BY_CLIENTS = ["sparse.source=clients", "partition=classes", "partition.classes_per_client=20"]
EXACT = ["sparse.labels=data", "sparse.examples=null", "sparse.rounds=1"]  # nothing is drawn

Calls = list[tuple[Examples, torch.Tensor]]


@pytest.fixture(autouse=True)
def _nothing_calibrated_yet() -> None:
    shutil.rmtree(cache_dir() / "masks", ignore_errors=True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What sensitivity was computed on: examples, and which of them."""
    calls: Calls = []

    def recorded(squares: SquaredGradients, examples: Examples, **options: Any) -> Sensitivity:
        calls.append((examples, options["index"]))
        return sensitivity(squares, examples, **options)

    monkeypatch.setattr(host, "sensitivity", recorded)
    return calls


def config_of(*overrides: str) -> Config:
    return with_resolution(compose("sparse_fedavg", [*SETTING, *overrides]))


def built(config: Config) -> tuple[Experiment, Clients]:
    """The experiment with its head fitted, and its clients."""
    stop = StopRequest()
    session = local_session(config, stop)
    experiment = build(config, torch.device("cpu"), stop, session.data)
    clients = session.clients(experiment)
    head = settings.head(config, experiment.precision)
    return prepare_head(experiment, clients, head, stop), clients


def masked(
    config: Config,
    experiment: Experiment,
    clients: Clients,
    folder: Path,
    stop: StopRequest | None = None,
) -> Experiment:
    chosen = settings.masks(config, experiment)
    return find_masks(experiment, clients, chosen, RunFolder(folder), stop or StopRequest())


@pytest.fixture
def calibrated(tmp_path: Path) -> Callable[..., Experiment]:
    """The experiment of a run with these overrides, masked; `name` is that of its folder."""

    def make(*overrides: str, name: str = "it") -> Experiment:
        config = config_of(*overrides)
        return masked(config, *built(config), tmp_path / name)

    return make


def count(experiment: Experiment) -> int:
    return sum(int(mask.sum()) for mask in experiment.masks.values())


def matrices(experiment: Experiment) -> dict[str, torch.Tensor]:
    """What is maskable by default: the backbone's matrices and kernels."""
    named = experiment.model.named_parameters()
    embeddings = ("pos_embed", "token")
    return {
        name: value
        for name, value in named
        if name.startswith("backbone.") and value.ndim > 1 and not name.endswith(embeddings)
    }


def record(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "masks.json").read_text())
    return content


def same(one: Experiment, other: Experiment) -> bool:
    return params.digest(one.masks) == params.digest(other.masks)


@pytest.mark.parametrize("rule", mask_rule.names)
def test_every_rule_trains_exactly_as_many_weights(
    rule: str, calibrated: Callable[..., Experiment]
) -> None:
    density = 0.0137
    experiment = calibrated(f"sparse.rule={rule}", f"sparse.density={density}", "sparse.rounds=1")
    total = sum(value.numel() for value in matrices(experiment).values())
    assert count(experiment) == round(density * total)
    assert experiment.measurements["weights_trained"] == count(experiment)
    assert experiment.measurements["weights_maskable"] == total
    for name, value in experiment.model.named_parameters():
        assert value.requires_grad == (name in experiment.masks)
    assert experiment.masks.keys() <= matrices(experiment).keys()
    assert all(mask.any() for mask in experiment.masks.values())


def test_without_a_density_everything_is_as_it_was(
    calibrated: Callable[..., Experiment], tmp_path: Path
) -> None:
    experiment = calibrated("sparse.density=null")
    assert experiment.masks == {}
    assert all(value.requires_grad for value in experiment.model.backbone.parameters())
    assert not tmp_path.joinpath("it").exists()


@pytest.mark.slow
def test_biases_norms_and_embeddings_are_maskable_on_request(
    calibrated: Callable[..., Experiment],
) -> None:
    random = ["sparse.rule=random", "sparse.density=1"]
    more = ["sparse.biases=true", "sparse.norms=true", "sparse.embeddings=true"]
    experiment = calibrated(*random, *more)
    every = experiment.model.backbone.named_parameters(prefix="backbone")
    assert experiment.masks.keys() == {name for name, _ in every}
    sizes = {key: count(calibrated(*random, key, name=key)) for key in more}
    alone = count(calibrated(*random, name="none"))
    assert alone == sum(value.numel() for value in matrices(experiment).values())
    assert sum(size - alone for size in sizes.values()) == count(experiment) - alone
    assert min(sizes.values()) > alone


def test_only_trained_weights_are_masked_and_an_unfrozen_head_stays_trainable(
    calibrated: Callable[..., Experiment],
) -> None:
    experiment = calibrated(
        "train.trainable=last_blocks:1", "head.freeze=false", "sparse.density=0.25"
    )
    places = {".".join(name.split(".")[:3]) for name in experiment.masks}
    assert len(places) == 1
    (last,) = places
    inside = [value for name, value in matrices(experiment).items() if name.startswith(f"{last}.")]
    assert count(experiment) == round(0.25 * sum(value.numel() for value in inside))
    assert experiment.model.head.weight.requires_grad
    assert "head.weight" not in experiment.masks


def test_calibrating_leaves_every_weight_as_it_was(tmp_path: Path) -> None:
    config = config_of()
    experiment, clients = built(config)
    before = params.digest(dict(experiment.model.named_parameters()))
    after = masked(config, experiment, clients, tmp_path)
    assert params.digest(dict(after.model.named_parameters())) == before


def test_interrupted_while_calibrating_nothing_is_written_and_no_weight_is_changed(
    tmp_path: Path,
) -> None:
    class Later(StopRequest):
        checks = 0

        def check(self) -> None:
            self.checks += 1
            if self.checks == 2:  # in the second round, with some weights shrunk
                raise Interrupted("SIGTERM")

    config = config_of()
    experiment, clients = built(config)
    before = params.digest(dict(experiment.model.named_parameters()))
    with pytest.raises(Interrupted):
        masked(config, experiment, clients, tmp_path, Later())
    assert params.digest(dict(experiment.model.named_parameters())) == before
    assert not RunFolder(tmp_path).masks.exists()
    assert not list((cache_dir() / "masks").glob("*"))


@pytest.mark.slow
def test_masks_do_not_depend_on_how_one_trains_and_are_calibrated_once(
    calibrated: Callable[..., Experiment], calls: Calls, tmp_path: Path
) -> None:
    first = calibrated("train.lr=0.1", name="first")
    assert len(calls) == 2
    other = [
        "train.lr=0.001",
        "train.optimizer.momentum=0",
        "train.optimizer.weight_decay=0.1",
        "train.batch_size=3",
    ]
    again = calibrated(*other, "federated.rounds=7", "algorithm=scaffold", name="again")
    assert len(calls) == 2
    assert same(first, again)
    assert first.measurements == again.measurements
    files = [tmp_path / name / "masks.safetensors" for name in ("first", "again")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Experiment, Path]:
    """Calibrated with no options, and its folder; its masks stay in a cache of their own."""
    config, folder = config_of(), tmp_path_factory.mktemp("plain")
    experiment = masked(config, *built(config), folder)
    shutil.copytree(cache_dir() / "masks", folder / "cache")
    return experiment, folder / "cache"


@pytest.mark.slow
@pytest.mark.parametrize(
    "option",
    [
        *(
            "sparse.density=0.2",
            "sparse.rule=most_sensitive",
            "sparse.rounds=3",
            "sparse.shrink_factor=0.5",
        ),
        *("sparse.method=mean", "sparse.labels=data", "sparse.target=log_prob", "seed=1"),
        *("sparse.examples=9", "sparse.passes=2", "sparse.scope=tensor", "head=class_means"),
    ],
)
def test_what_masks_depend_on_makes_them_anew(
    option: str, plain: tuple[Experiment, Path], calibrated: Callable[..., Experiment], calls: Calls
) -> None:
    experiment, cache = plain
    shutil.copytree(cache, cache_dir() / "masks", dirs_exist_ok=True)
    other = calibrated(option)
    assert calls
    assert not same(experiment, other)


@pytest.mark.slow
def test_calibrated_twice_masks_are_the_same_file(
    calibrated: Callable[..., Experiment], tmp_path: Path
) -> None:
    calibrated(name="first")
    shutil.rmtree(cache_dir() / "masks")
    calibrated(name="again")
    first, again = (tmp_path / name / "masks.safetensors" for name in ("first", "again"))
    assert first.read_bytes() == again.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["a flipped bit", "cut in half", "not masks at all"])
def test_a_damaged_cache_is_noticed_and_made_again(
    damage: str,
    calibrated: Callable[..., Experiment],
    calls: Calls,
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
    assert len(calls) == 4
    assert "made again" in caplog.text
    assert path.read_bytes() == whole


def test_a_run_trusts_its_own_masks_and_calibrates_no_more(
    calibrated: Callable[..., Experiment], calls: Calls
) -> None:
    first = calibrated()
    shutil.rmtree(cache_dir() / "masks")
    assert same(calibrated(), first)
    assert len(calls) == 2


def test_a_run_whose_own_masks_are_damaged_is_refused_in_one_sentence(
    calibrated: Callable[..., Experiment], tmp_path: Path
) -> None:
    calibrated()
    path = RunFolder(tmp_path / "it").masks
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(FedlensError, match=r"masks.safetensors is damaged \(.*\): .*\.$") as caught:
        calibrated()
    assert "\n" not in str(caught.value)


def test_a_run_with_the_masks_of_another_model_is_refused_in_one_sentence(
    calibrated: Callable[..., Experiment], tmp_path: Path
) -> None:
    path = RunFolder(tmp_path / "it").masks
    path.parent.mkdir()
    mask_files.save(
        path, {"backbone.other.weight": torch.ones(2, 2, dtype=torch.bool)}, {"facts": {}}
    )
    with pytest.raises(FedlensError, match=r"does not fit this run: missing .*\.$"):
        calibrated()


@pytest.mark.slow
@pytest.mark.parametrize("extra", [[], BY_CLIENTS, [*BY_CLIENTS, "sparse.voting=majority"]])
def test_every_choice_is_on_record_with_the_masks(
    extra: list[str], calibrated: Callable[..., Experiment], tmp_path: Path
) -> None:
    config = config_of(*extra)
    experiment = calibrated(*extra)
    content = record(tmp_path / "it")
    provenance = content["provenance"]
    sparse = asdict(config.sparse)
    rule = sparse.pop("rule")
    assert (provenance["rule"], provenance["rule_parameters"]) == (rule.pop("name"), rule)
    for key, value in sparse.items():
        assert provenance[key] == value, key
    assert provenance["seed"] == config.seed
    assert provenance["data"] == experiment.input_hashes["data"]
    assert provenance["parameters"] == params.digest(matrices(experiment))
    assert provenance["partition"] == (dict(config.partition) if extra else None)
    assert mask_files.load(RunFolder(tmp_path / "it").masks)[1] == provenance
    assert content["all"]["trained"] == count(experiment)
    assert content["all"]["total"] == sum(value.numel() for value in matrices(experiment).values())
    assert content["tensors"].keys() == matrices(experiment).keys()  # with empty masks too


@pytest.mark.slow
def test_scores_added_over_clients_are_those_of_the_pooled_examples() -> None:
    experiment, clients = built(config_of(*BY_CLIENTS, *EXACT))
    names = list(matrices(experiment))
    own = {name: experiment.model.get_parameter(name) for name in names}
    added = reduce(add, clients.sensitivities(range(5), 0, own)).mean()
    squares = SquaredGradients(experiment.model, names, experiment.train.batch(torch.arange(2)))
    pooled = sensitivity(squares, experiment.train, labels="data", stream=Stream(0, ("unused",)))
    assert pooled.count == len(experiment.train)
    for name, expected in pooled.mean().items():
        error = torch.linalg.vector_norm(added[name] - expected)
        assert float(error / torch.linalg.vector_norm(expected)) < 1e-6
        torch.testing.assert_close(added[name], expected, rtol=1e-4, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("voting", ["null", "majority"])
def test_every_client_scores_its_own_shard_and_nothing_else(
    voting: str, calibrated: Callable[..., Experiment], calls: Calls
) -> None:
    every = ["sparse.examples=null", f"sparse.voting={voting}"]
    experiment = calibrated(*BY_CLIENTS, *every)
    assert experiment.partition is not None
    assert len(calls) == 2 * 5
    assert all(examples is experiment.train for examples, _ in calls)
    seen = sorted(tuple(index.tolist()) for _, index in calls)
    shards = [tuple(experiment.partition.shard(client).tolist()) for client in range(5)]
    assert seen == sorted(shards * 2)


@pytest.mark.slow
def test_calibrating_by_clients_needs_no_validation_images(
    calibrated: Callable[..., Experiment],
) -> None:
    none = ["data.validation=0", "evaluate.select=last", "head=trained", "head.steps=2"]
    assert count(calibrated(*BY_CLIENTS, *none)) > 0


def test_a_rule_that_uses_no_examples_needs_none(calibrated: Callable[..., Experiment]) -> None:
    none = ["data.validation=0", "evaluate.select=last", "head=trained", "head.steps=2"]
    assert count(calibrated(*none, "sparse.rule=highest_magnitude")) > 0


@pytest.mark.slow
def test_only_so_many_clients_calibrate_and_they_are_the_same_in_every_round(
    calibrated: Callable[..., Experiment], calls: Calls
) -> None:
    experiment = calibrated(*BY_CLIENTS, "sparse.clients=2", "sparse.examples=null")
    assert experiment.partition is not None
    shards = [tuple(experiment.partition.shard(client).tolist()) for client in range(5)]
    scored = [shards.index(tuple(index.tolist())) for _, index in calls]
    assert len(scored) == 4
    assert scored[:2] == scored[2:]
    assert len(set(scored)) == 2
    assert not same(experiment, calibrated(*BY_CLIENTS, "sparse.examples=null", name="all"))


@pytest.mark.slow
def test_clients_score_at_most_so_many_examples_of_their_own(
    calibrated: Callable[..., Experiment], calls: Calls
) -> None:
    experiment = calibrated(*BY_CLIENTS, "sparse.examples=3")
    assert experiment.partition is not None
    shards = [set(experiment.partition.shard(client).tolist()) for client in range(5)]
    for number, (_, index) in enumerate(calls):
        chosen = index.tolist()
        assert len(chosen) == len(set(chosen)) == 3
        assert set(chosen) <= shards[number % 5]


@pytest.mark.slow
def test_votes_end_at_one_density_with_different_weights(
    calibrated: Callable[..., Experiment],
) -> None:
    votes = ("union", "majority", "intersection")
    runs = [calibrated(*BY_CLIENTS, *EXACT, f"sparse.voting={v}", name=v) for v in votes]
    runs.append(calibrated(*BY_CLIENTS, *EXACT, name="added"))
    assert len({count(experiment) for experiment in runs}) == 1
    assert len({params.digest(experiment.masks) for experiment in runs}) == 4


@pytest.mark.slow
def test_a_single_client_decides_in_every_vote(
    calibrated: Callable[..., Experiment],
) -> None:
    votes = ("union", "majority", "intersection")
    one = [*BY_CLIENTS, *EXACT, "sparse.clients=1", "sparse.density=0.3"]
    runs = [calibrated(*one, f"sparse.voting={v}", name=v) for v in votes]
    assert same(runs[0], runs[1])
    assert same(runs[1], runs[2])


@pytest.mark.slow
def test_what_calibrating_sends_is_counted_as_serialised(
    calibrated: Callable[..., Experiment],
) -> None:
    added = calibrated(*BY_CLIENTS, name="added")
    scores = {name: value.detach().double() for name, value in matrices(added).items()}
    assert added.measurements["calibration_bytes_up"] == 2 * 5 * wire.size(scores)
    voted = calibrated(*BY_CLIENTS, "sparse.voting=union", "sparse.clients=3", name="voted")
    ranks = {name: value.int() for name, value in scores.items()}
    assert voted.measurements["calibration_bytes_up"] == 3 * wire.size(ranks)
    assert "calibration_bytes_up" not in calibrated(name="validation").measurements


@pytest.mark.parametrize("rule", ["random", "lowest_magnitude"])
def test_a_rule_that_uses_no_examples_sends_nothing(
    rule: str, calibrated: Callable[..., Experiment], calls: Calls
) -> None:
    by_clients = [f"sparse.rule={rule}", *BY_CLIENTS, "sparse.voting=union"]
    federated = calibrated(*by_clients, name="clients")
    shutil.rmtree(cache_dir() / "masks")
    plain = calibrated(f"sparse.rule={rule}", name="plain")
    assert calls == []
    assert same(federated, plain)
    assert federated.measurements.get("calibration_bytes_up", 0) == 0
    assert (
        federated.measurements.keys() == plain.measurements.keys()
    )  # else the cache would decide what is recorded


@pytest.mark.slow
def test_calibration_reads_the_validation_images_alone_and_leaves_the_test_split_sealed(
    calibrated: Callable[..., Experiment], calls: Calls
) -> None:
    experiment = calibrated("sparse.examples=null")
    assert experiment.validation is not None
    for examples, index in calls:
        assert examples is experiment.validation
        assert torch.equal(index, torch.arange(len(experiment.validation)))
    assert experiment.test.opened is None


REFUSED = {
    "sparse.density=0": r"sparse.density=0.* must be in \(0, 1\]",
    "sparse.density=1.5": r"sparse.density=1.5 must be in \(0, 1\]",
    "sparse.density=-0.1": r"must be in \(0, 1\]",
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
    "sparse.clients=0 sparse.source=clients": "sparse.clients=0 must be",
    "sparse.rounds=0": "sparse.rounds=0 must be",
    "sparse.shrink_factor=2": "sparse.shrink_factor=2.0 must be in",
    "sparse.examples=0": "sparse.examples=0 must be",
    "sparse.passes=0": "sparse.passes=0 must be",
    "sparse.micro_batch=0": "sparse.micro_batch=0 must be",
    "train.trainable=head": "sparse.density masks the backbone, which train.trainable=head leaves",
    "data.validation=0 evaluate.select=last head=linear": "leaves nothing to calibrate on",
}


@pytest.mark.parametrize("words", REFUSED)
def test_bad_input_gets_one_clear_sentence(words: str) -> None:
    with pytest.raises(FedlensError, match=REFUSED[words]) as caught:
        config_of(*words.split())
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith((".", "?"))


@pytest.mark.parametrize("rule", ["random", "least_sensitive"])
def test_a_density_that_trains_nothing_is_refused(
    rule: str, calibrated: Callable[..., Experiment]
) -> None:
    tiny = [f"sparse.rule={rule}", "sparse.density=1e-7"]
    with pytest.raises(
        FedlensError, match=r"sparse.density=1e-07 of \d+ weights rounds to no weight"
    ):
        calibrated(*tiny)
    with pytest.raises(FedlensError, match="rounds to no weight"):  # and again, of the same run
        calibrated(*tiny)
