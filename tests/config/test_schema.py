import subprocess
import sys
from dataclasses import asdict, replace
from importlib.resources import files

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given
from hypothesis import strategies as st

from fedlens.config import checks
from fedlens.config.compose import (
    amend,
    changed,
    command,
    compose,
    documentation,
    experiments,
    load,
    to_yaml,
    word,
)
from fedlens.config.identity import identity, run_name
from fedlens.config.labels import labels
from fedlens.config.options import groups, options
from fedlens.config.schema import (
    Config,
    FederatedConfig,
    cohort_size,
    cycle,
    keys,
    rounds,
    unit,
)
from fedlens.errors import FedlensError
from fedlens.registry import RowSettings


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("train.lrr=0.1", "Unknown config key 'train.lrr': did you mean 'train.lr'"),
        ("lr=0.1", "Unknown config key 'lr'"),
        ("+train.extra=1", "keys are fixed"),
        ("~seed", "keys are fixed"),
        ("train.lr=fast", "train.lr: Value 'fast'"),
        ("train.lr=null", "train.lr: field 'train.lr' is not Optional"),
        ("train.lr=-1", "train.lr=-1.0 must be positive"),
        ("train.lr=[1", "not of the form key=value"),
        ("nonsense", "not of the form key=value"),
        ("backbone=vit_tinny", "did you mean 'vit_tiny'"),
        ("head=ridgy", "did you mean 'ridge'"),
        ("train=7", "train=7 is unknown: choose from full, head"),
        ("train.trainable=last_block:2", "did you mean 'last_blocks:COUNT'"),
        ("train.trainable=last_blocks:0", r"train.trainable.count=0 must be in \[1, 10000\]"),
        ("train.schedule.name=cosinus", "did you mean 'cosine'"),
        ("train.precision=fp16", "choose from amp, fp32"),
        ("train.optimizer.momentum=1", r"train.optimizer.momentum=1.0 must be in \[0, 1\)"),
        ("train.batch_size=0", r"must be in \[1, 1000000\]"),
        ("data.validation=1", r"data.validation=1.0 must be in \[0, 1\)"),
        ("data.validation=0", "evaluate.select=last"),
        ("backbone.freeze_blocks=-1", r"must be in \[0, 10000\]"),
        ("head.dropout=1", r"head.dropout=1.0 must be in \[0, 1\)"),
        ("evaluate.test=maybe", "evaluate.test: Value 'maybe'"),
        ("evaluate.select=test", "evaluate.select=test is unknown: did you mean"),
        ("experiment=ridge", "The experiment comes first: fedlens run ridge"),
        ("device=tpu", "device=tpu is unknown"),
        ("seed=-1", r"seed=-1 must be in \[0, 9007199254740992\]"),
        ("checkpoint.keep_last=0", "1 or more"),
        ("run.name=../up", "one plain folder name"),
        ("run.name=/tmp/x", "one plain folder name"),
        ("run.name=..", "one plain folder name"),
        ("seed=1,2", "one value per key"),
        ("data=cifar100,synthetic", "one value per key"),
        ("backbone=timm", "backbone=timm needs backbone.model .its name in timm"),
        ("backbone=resnet18", "did you mean 'timm:resnet18'?"),
        ("device=auto:1", "device=auto:1 is unknown"),
        ("train.lr=inf", "finite"),
        ("augment.crop_padding=-1", r"in \[0, 4096\]"),
        ("augment.colour_jitter=1.5", r"must be in \[0, 1\]"),
        ("augment.randaugment=-1", r"in \[0, 100\]"),
        ("augment.magnitude=31", r"must be in \[0, 30\]"),
        ("partition=dirichlett", "partition=dirichlett is unknown: did you mean 'dirichlet'"),
        ("partition.name=clases", "partition=clases is unknown: did you mean 'classes'"),
        ("algorithm=fedavgg", "algorithm=fedavgg is unknown: did you mean 'fedavg"),
        ("algorithm.aggregator=meen", "algorithm.aggregator=meen is unknown: did you mean 'mean'"),
        ("algorithm.server=adm", "algorithm.server=adm is unknown: did you mean 'adam'"),
        ("engine=paralel", "engine=paralel is unknown: did you mean 'parallel'"),
        ("engine.name=seriell", "engine=seriell is unknown: did you mean 'serial'"),
        ("engine.workers=0", "engine.workers is not read by engine=serial: .* choose parallel or"),
        ("engine.threads_per_client=0", r"threads_per_client=0 must be in \[1, 1024\]"),
        ("federated.clients=0", "federated.clients=0 must be 1 or more"),
        ("federated.client=5", "did you mean 'federated.clients'"),
        ("federated.participation=0", r"federated.participation=0.0 must be in \(0, 1\]"),
        ("federated.participation=2", r"federated.participation=2.0 must be in \(0, 1\]"),
        ("federated.participation=nan", r"federated.participation=nan must be in \(0, 1\]"),
        ("federated.local_steps=0", "federated.local_steps=0 must be 1 or more"),
        ("federated.min_local_steps=5", "min_local_steps=5 must lie between 1 and .*local_steps=4"),
        ("federated.min_local_steps=0", "federated.min_local_steps=0 must be 1 or more"),
        ("federated.rounds=foo", "federated.rounds=foo must be auto, or 0 or more"),
        ("federated.rounds=-1", "federated.rounds=-1 must be 0 or more"),
        ("federated.local_step_budget=0", "federated.local_step_budget=0 must be 1 or more"),
        ("federated.dropout=1", r"federated.dropout=1.0 must be in \[0, 1\)"),
        ("federated.dropout=-0.1", r"federated.dropout=-0.1 must be in \[0, 1\)"),
        ("partition.classes_per_client=5", "is not read by partition=iid: .* or choose classes"),
        ("partition.alpha=0.3", "is not read by partition=iid: .* or choose dirichlet"),
        ("partition.sigma=1", "is not read by partition=iid: .* or choose quantity"),
        ("partition.min_size=1", "leave it out, or choose dirichlet or quantity"),
        ("algorithm.proximal=-1", "algorithm.proximal=-1.0 must be 0 or more"),
        ("algorithm.proximal=nan", "algorithm.proximal=nan must be 0 or more and finite"),
        ("algorithm.aggregator.trim=0.1", "is not read by algorithm.aggregator=mean: .*trimmed"),
        ("algorithm.aggregator.clip=1", "is not read by algorithm.aggregator=mean"),
        ("algorithm.server.lr=0", "algorithm.server.lr=0.0 must be positive"),
        ("algorithm.server.momentum=0", "or choose momentum or adam or yogi"),
        ("algorithm.server.beta2=0", "or choose adam or yogi"),
        ("algorithm.server.tau=1", "or choose adam or yogi"),
        ("privacy.name=centrall", "did you mean 'central'"),
        ("privacy.clip_norm=0", "privacy.clip_norm=0.0 must be positive"),
        ("privacy.noise_multiplier=inf", "noise_multiplier=inf must be positive and finite"),
        ("privacy.epsilon=1", r"privacy.epsilon=1.0 must be in \(0, 1\)"),
        ("privacy.delta=0", r"privacy.delta=0.0 must be in \(0, 1\)"),
        ("privacy.max_update_value=0", "privacy.max_update_value=0.0 must be positive"),
        ("privacy.secure=true", "privacy goes through Flower"),
    ],
)
def test_bad_overrides_are_one_sentence(override: str, complaint: str) -> None:
    with pytest.raises(FedlensError, match=complaint) as caught:
        compose("centralized", [override])
    assert "\n" not in str(caught.value)


def test_an_unknown_experiment_is_suggested() -> None:
    with pytest.raises(FedlensError, match="did you mean 'centralized'"):
        compose("centralised", [])


@pytest.mark.parametrize("name", options("experiment"))
def test_every_experiment_composes_and_documents_itself(name: str) -> None:
    config = compose(name, [])
    assert config.experiment == name
    entry = next(e for e in experiments() if e.name == name)
    for line in (f"command: fedlens run {name}", "cost:", "expect:"):
        assert line in entry.documentation


@pytest.mark.slow
@pytest.mark.parametrize("group", [g for g in groups() if g != "experiment"])
def test_every_option_of_every_group_composes(group: str) -> None:
    for option in options(group):
        compose("fedavg_iid", [f"{group}={option}"])


def test_any_timm_backbone_can_be_named() -> None:
    config = compose("centralized", ["backbone=timm:resnet18.a1_in1k"])
    assert (config.backbone.name, config.backbone.model) == ("timm", "resnet18.a1_in1k")
    assert config.backbone.resolution is None
    assert "_timm-resnet18.a1_in1k_" in run_name(config)
    assert labels(config)["backbone"] == "timm:resnet18.a1_in1k"


def test_another_backbone_brings_its_own_resolution() -> None:
    config = compose("centralized", ["backbone=vit_tiny"])
    assert config.backbone.resolution == 224
    assert changed(config, {"backbone": "vit_pico"}).backbone.resolution == 32
    small = changed(config, {"backbone.resolution": 64})
    assert changed(small, {"backbone": "vit_pico"}).backbone.resolution == 64


def test_overrides_set_keys_presets_and_rows() -> None:
    words = ["train.lr=0.01", "backbone=vit_tiny", "data=cifar100", "seed=1"]
    config = compose("centralized", words)
    assert (config.train.lr, config.backbone.name, config.seed) == (0.01, "vit_tiny", 1)


def test_a_config_survives_its_file(tmp_path) -> None:
    config = compose("ridge", ["seed=3", "train.clip_norm=0.5"])
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert load(path) == config
    path.write_text(to_yaml(config) + "extra: 1\n")
    with pytest.raises(FedlensError, match="not a config of this version"):
        load(path)
    for nonsense in ("", "- 1\n"):
        path.write_text(nonsense)
        with pytest.raises(FedlensError, match="names no experiment"):
            load(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FedlensError, match="not a config of this version"):
        load(path)
    path.write_text("]")
    with pytest.raises(FedlensError, match="not a config of this version"):
        load(path)


def test_the_name_says_what_the_run_is_and_changes_with_what_decides_it() -> None:
    config = compose("centralized", ["backbone=vit_tiny", "data.root=/somewhere", "seed=4"])
    assert run_name(config).startswith("centralized_cifar100_vit_tiny-224px_linear-full_s4_")
    elsewhere = compose("centralized", ["backbone=vit_tiny", "seed=4", "threads=1", "device=cpu"])
    assert run_name(elsewhere) == run_name(config)
    slower = replace(config, train=replace(config.train, lr=1e-5))
    assert run_name(slower) != run_name(config)
    subset = replace(config, data=config.data.but(train_per_class=5))
    assert "cifar100-subset" in run_name(subset)
    named = replace(config, run=replace(config.run, name="mine"))
    assert run_name(named) == "mine"


def test_the_identity_ignores_the_folder_of_weights_but_not_their_name() -> None:
    def with_weights(path: str) -> Config:
        return compose("centralized", [f"backbone.weights={path}"])

    assert identity(with_weights("/a/x.pth")) == identity(with_weights("/b/x.pth"))
    assert identity(with_weights("/a/x.pth")) != identity(with_weights("/a/y.pth"))


def test_closed_form_heads_need_validation_or_given_numbers() -> None:
    common = ["data.validation=0", "evaluate.select=last"]
    with pytest.raises(FedlensError, match=r"head\.temperature"):
        compose("ridge", common)
    compose("ridge", [*common, "head.temperature=20", "head.l2=100"])


def test_all_keys_are_listed_once() -> None:
    every = list(keys())
    assert len(every) == len(set(every))
    assert {"seed", "train", "train.lr", "train.schedule.warmup"} <= set(every)
    assert {"algorithm.aggregator.trim", "partition.alpha", "head.l2"} <= set(every)


def test_a_run_that_has_begun_may_move_but_not_change() -> None:
    config = compose("ridge", ["seed=3"])
    moved = amend(config, ["data.root=/content", "threads=3", "checkpoint.minutes=1", "device=cpu"])
    assert (moved.data.root, moved.threads, moved.checkpoint.minutes) == ("/content", 3, 1.0)
    assert run_name(moved) == run_name(config)
    assert amend(config, ["tracker=tensorboard"]).tracker.name == "tensorboard"
    for override in ("train.lr=1", "seed=4", "backbone=vit_tiny", "run.name=other"):
        with pytest.raises(FedlensError, match="cannot be changed"):
            amend(config, [override])
    with pytest.raises(FedlensError, match=r"did you mean 'checkpoint\.every'"):
        amend(config, ["checkpoint.ever=1"])
    with pytest.raises(FedlensError, match="could not be converted"):
        amend(config, ["threads=many"])


def test_a_run_that_has_begun_may_change_its_engine() -> None:
    config = compose("fedavg_iid", [])
    moved = amend(config, ["engine=parallel", "engine.workers=3"])
    assert (moved.engine.name, moved.engine.workers) == ("parallel", 3)
    assert run_name(moved) == run_name(config)
    with pytest.raises(FedlensError, match="engine=paralel is unknown: did you mean 'parallel'"):
        amend(config, ["engine=paralel"])
    for override in ("federated.rounds=7", "algorithm=scaffold", "partition.alpha=1"):
        with pytest.raises(FedlensError, match="cannot be changed"):
            amend(config, [override])


def test_the_options_that_a_config_knows_are_those_of_the_functions() -> None:
    """The config loads no torch, so it cannot import them."""
    from fedlens.sparse import calibration, masks, voting
    from fedlens.sparse.sensitivity import fisher

    for names, options_of in [
        (checks.SCOPES, masks.SCOPES),
        (checks.METHODS, calibration.METHODS),
        (checks.LABELS, fisher.LABELS),
        (checks.TARGETS, fisher.TARGETS),
        (checks.VOTES, voting.VOTES),
    ]:
        assert set(names) == set(options_of)


@pytest.mark.parametrize(
    ("clients", "participation", "size"),
    [
        (100, 0.1, 10),
        (100, 0.07, 7),  # 0.07 · 100 is 7.000000000000001
        (100, 0.29, 29),  # 0.29 · 100 is 28.999999999999996
        (100, 0.101, 11),
        (10, 0.25, 3),
        (100, 1e-6, 1),
        (1, 0.5, 1),
        (37, 1.0, 37),
    ],
)
def test_a_cohort_is_the_share_rounded_up(clients: int, participation: float, size: int) -> None:
    assert cohort_size(FederatedConfig(clients, participation)) == size


@pytest.mark.parametrize(("clients", "participation"), [(100, 0.3), (100, 0.6), (7, 0.5)])
def test_cyclic_cohorts_of_unequal_size_are_refused(clients: int, participation: float) -> None:
    words = [f"federated.clients={clients}", f"federated.participation={participation}"]
    assert compose("fedavg_iid", words)
    for name in ("cyclic", "chain"):
        with pytest.raises(FedlensError, match="cohorts of equal size that add up to all clients"):
            compose("fedavg_iid", [*words, f"algorithm={name}"])


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["algorithm.sampling.chains=3"], r"chains=3 does not divide the 10 clients of a round"),
        (["algorithm.sampling.chains=0"], r"chains=0 must be 1 or more"),
        (["algorithm.sampling.order=sorted"], r"order=sorted is unknown"),
        (["algorithm.correction=fedcm"], r"correction=fedcm corrects clients that all start from"),
        (
            ["algorithm.sampling.order=opposite", "algorithm.scaffold=true"],
            r"keeps one control variate of each",
        ),
        (
            ["algorithm.scaffold=true", "algorithm.carry_momentum=true"],
            r"how far it moved",
        ),
        (["algorithm.measure_controls=true"], r"set algorithm\.scaffold=true"),
        (["backbone.batch_norm=local"], r"batch_norm=local keeps layers of each client"),
        (["algorithm.aggregator=regmean"], r"several clients have one: choose another"),
        (["privacy.secure=true", "engine=flower_simulation"], r"privacy.secure=true adds up"),
        (["privacy.name=central", "engine=flower_simulation"], r"needs uniformly drawn cohorts"),
        (
            ["algorithm.sampling.order=opposite", "federated.keep_updates=1"],
            r"visits every client twice",
        ),
        (["algorithm.proximal_to=round"], r"set algorithm\.proximal"),
        (["algorithm.proximal_to=global"], r"algorithm.proximal_to=global is unknown"),
        (
            ["algorithm.carry_momentum=true", "train.optimizer.momentum=0"],
            r"needs momentum to pass on",
        ),
        (
            ["algorithm.carry_momentum=true", "train.optimizer=adamw"],
            r"needs momentum to pass on",
        ),
        (
            ["algorithm.carry_momentum=true", "privacy.name=local", "engine=flower_simulation"],
            r"send more than the update that privacy protects",
        ),
    ],
)
def test_what_does_not_go_with_chains_is_refused(overrides: list[str], complaint: str) -> None:
    with pytest.raises(FedlensError, match=complaint):
        compose("fedavg_iid", ["algorithm=chain", *overrides])


@pytest.mark.parametrize("sampling", ["uniform", "cyclic"])
def test_what_passes_along_a_chain_needs_one(sampling: str) -> None:
    words = [f"algorithm.sampling={sampling}", "algorithm.proximal=0.1"]
    for along in ("carry_momentum=true", "proximal_to=round"):
        with pytest.raises(FedlensError, match=r"are for chains: set algorithm\.sampling=chain"):
            compose("fedavg_iid", [*words, f"algorithm.{along}"])


@pytest.mark.parametrize(
    ("clients", "participation"),
    [(2, 1.0), (3, 1.0), (100, 0.02), (100, 0.021), (7, 3 / 7), (1023, 1.0), (1024, 1.0)],
)
def test_the_cohort_of_secure_aggregation_is_checked_before_anything_loads(
    clients: int, participation: float
) -> None:
    pytest.importorskip("flwr")
    from fedlens.federated.flower.secure_aggregation import MAX_CLIENTS as MOST
    from fedlens.federated.flower.secure_aggregation import MIN_CLIENTS as FEWEST

    words = [f"federated.clients={clients}", f"federated.participation={participation}"]
    words += ["engine=flower_simulation", "privacy.secure=true"]
    if FEWEST <= cohort_size(FederatedConfig(clients, participation)) <= MOST:
        assert compose("quickstart_fedavg", words).privacy.secure
    else:
        with pytest.raises(FedlensError, match=f"needs from {FEWEST} to {MOST} clients in each"):
            compose("quickstart_fedavg", words)


@pytest.mark.slow
def test_a_config_is_composed_without_torch() -> None:
    program = (
        "import sys; from fedlens.config.compose import compose; compose('fedavg_iid', []); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


ALGORITHMS: dict[str, dict[str, object]] = {
    "fedavg": {},
    "fedprox": {"proximal": 0.01},
    "scaffold": {"scaffold": True},
    "ghbm": {"correction": {"name": "ghbm", "beta": 0.9, "tau": None}},
    "fedcm": {"correction": {"name": "fedcm", "alpha": 0.1}},
    "feddyn": {"correction": {"name": "feddyn", "alpha": 0.01}},
    "fedavgm": {"server": {"name": "momentum", "momentum": 0.9, "lr": 1.0}},
    "fedadam": {
        "server": {"name": "adam", "momentum": 0.9, "beta2": 0.99, "tau": 0.001, "lr": 0.01}
    },
    "fedyogi": {
        "server": {"name": "yogi", "momentum": 0.9, "beta2": 0.99, "tau": 0.001, "lr": 0.01}
    },
    "fednova": {"aggregator": {"name": "fednova"}},
    "cyclic": {"sampling": {"name": "cyclic"}},
    "chain": {"sampling": {"name": "chain", "chains": 1, "order": "shuffled"}},
    "cyclic_ties": {
        "sampling": {"name": "cyclic"},
        "aggregator": {"name": "ties", "density": 0.2, "scale": 1.0},
    },
    "median": {"aggregator": {"name": "median"}},
    "trimmed_mean": {"aggregator": {"name": "trimmed_mean", "trim": 0.1}},
    "norm_clipping": {"aggregator": {"name": "clipped_mean", "clip_norm": 1.0}},
    "task_arithmetic": {"aggregator": {"name": "task_arithmetic", "scale": 0.1}},
    "ties": {"aggregator": {"name": "ties", "density": 0.2, "scale": 1.0}},
    "dare": {"aggregator": {"name": "dare", "density": 0.2, "scale": 1.0}},
    "breadcrumbs": {
        "aggregator": {"name": "breadcrumbs", "density": 0.2, "outliers": 0.01, "scale": 1.0}
    },
    "consensus": {
        "aggregator": {"name": "consensus", "agreement": 2, "threshold": None, "scale": 1.0}
    },
    "regmean": {"aggregator": {"name": "regmean", "alpha": 0.9, "ridge": 1e-6, "scale": 1.0}},
    "fisher_average": {"aggregator": {"name": "fisher_average", "floor": 1e-6, "scale": 1.0}},
    "tsv_merge": {"aggregator": {"name": "tsv_merge", "mean": True, "scale": 1.0}},
    "iso_c": {"aggregator": {"name": "iso_c", "mean": True, "scale": 1.0}},
}


@pytest.mark.slow
def test_every_algorithm_preset_differs_from_fedavg_as_its_name_says() -> None:
    plain = asdict(compose("fedavg_iid", []).algorithm)
    assert set(ALGORITHMS) == set(options("algorithm"))
    for name, expected in ALGORITHMS.items():
        algorithm = asdict(compose("fedavg_iid", [f"algorithm={name}"]).algorithm)
        assert algorithm == {**plain, **expected}, name


@pytest.mark.parametrize(
    ("name", "partition", "trainable", "head"),
    [
        ("fedavg_iid", "iid", "full", "linear"),
        ("fedavg_noniid", "classes", "full", "linear"),
        ("federated_head", "iid", "head", "linear"),
        ("federated_ridge", "iid", "head", "ridge"),
    ],
)
def test_the_federated_experiments(name: str, partition: str, trainable: str, head: str) -> None:
    config = compose(name, [])
    assert (config.partition.name, config.head.name) == (partition, head)
    assert config.train.trainable.name == trainable
    assert (config.federated.clients, config.federated.participation) == (100, 0.1)
    assert (unit(config), rounds(config)) == ("round", 500)
    assert unit(compose("centralized", [])) == "epoch"


@pytest.mark.parametrize("name", ["sparse_centralized", "sparse_fedavg", "quickstart_sparse"])
def test_the_sparse_experiments_freeze_a_closed_form_head(name: str) -> None:
    config = compose(name, [])
    assert (config.head.name, config.head.freeze, config.train.trainable.name) == (
        "ridge",
        True,
        "full",
    )
    assert (config.sparse.density, config.sparse.rule.name) == (0.1, "least_sensitive")
    assert "_least-sensitive-0.1_" in run_name(config)
    assert "sensitive" not in run_name(compose(name, ["sparse.density=null"]))


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["sparse.density=0"], "density=0.0 must be in"),
        (["sparse.density=1.5"], r"density=1.5 must be in \(0, 1\]"),
        (["sparse.rule=least_senstive"], "did you mean 'least_sensitive'"),
        (["sparse.scope=layer"], "sparse.scope=layer is unknown"),
        (["sparse.labels=drawn"], "sparse.labels=drawn is unknown"),
        (["sparse.voting=union"], "sparse.voting is among clients"),
        (["sparse.source=clients", "federated.clients=null"], "source=clients needs clients"),
        (["sparse.clients=101", "sparse.source=clients"], "sparse.clients=101 are more than"),
        (["sparse.rounds=0"], "sparse.rounds=0 must be 1 or more"),
        (["train=head"], "masks the backbone, which train.trainable=head leaves"),
        (["data.validation=0", "head.temperature=1", "head.l2=1",
          "evaluate.select=last"], "nothing to calibrate on"),
        (["algorithm=ties", "algorithm.aggregator.density=0"], "aggregator.density=0.0 must be in"),
        (
            ["algorithm=ties", "algorithm.statistics_examples=10"],
            "algorithm.statistics_examples is not read by algorithm.aggregator=ties",
        ),
        (["algorithm=regmean", "algorithm.statistics_examples=0"], "must be 1 or more"),
        (
            ["algorithm=regmean", "engine=flower_simulation", "privacy.name=local"],
            "algorithm.aggregator=regmean needs statistics of each client's data, which privacy",
        ),
        (["head=trained", "head.steps=0"], "head.steps=0 must be 1 or more"),
        (["federated.keep_updates=-1"], "keep_updates=-1 must be 0 or more"),
    ],
)  # fmt: skip
def test_impossible_sparse_settings_are_refused(overrides: list[str], complaint: str) -> None:
    with pytest.raises(FedlensError, match=complaint):
        compose("sparse_fedavg", overrides)


def test_the_name_of_a_federated_run_says_how_it_is_federated() -> None:
    name = run_name(compose("fedavg_noniid", ["algorithm=scaffold", "federated.local_steps=8"]))
    assert "_nc=10_scaffold-J8_s0_" in name
    dirichlet = ["partition=dirichlet", "partition.alpha=0.1"]
    assert "_dirichlet-alpha=0.1_fedavg-J4_" in run_name(compose("fedavg_iid", dirichlet))
    assert "fedavg" not in run_name(compose("centralized", []))
    assert run_name(compose("fedavg_iid", ["engine=parallel"])) == (
        run_name(compose("fedavg_iid", ["engine=serial"]))
    )


@pytest.mark.parametrize(("steps", "expected"), [(1, 2000), (4, 500), (16, 125), (3, 667)])
def test_rounds_follow_from_the_budget_of_local_steps(steps: int, expected: int) -> None:
    assert rounds(compose("fedavg_iid", [f"federated.local_steps={steps}"])) == expected
    assert rounds(compose("fedavg_iid", [f"federated.local_steps={steps}",
                                         "federated.rounds=7"])) == 7  # fmt: skip


def test_a_run_that_is_not_tested_is_another_run_and_has_no_test_curve() -> None:
    untested = compose("centralized", ["evaluate.test=false"])
    assert run_name(untested) != run_name(compose("centralized", []))
    with pytest.raises(FedlensError, match=r"leave evaluate\.test_curve out"):
        compose("centralized", ["evaluate.test=false", "evaluate.test_curve=true"])


FEDADAM = "algorithm=fedadam"  # a server and its learning rate
OVERRIDES = [
    ["seed=3", "train.lr=1e-5", "train.clip_norm=0.5", "threads=1", "data.root=/somewhere"],
    [
        "backbone=vit_tiny",
        "data=synthetic",
        "train.optimizer.momentum=0.8",
        "train.optimizer.nesterov=true",
        "data.train_per_class=7",
    ],
    ["algorithm=consensus", "engine=parallel", "backbone.weights='/a b/x=1,2.pth'"],
]


@pytest.mark.parametrize(("place", "name"), list(enumerate(options("experiment"))))
def test_a_command_gives_its_config_again(place: int, name: str) -> None:
    config = compose(name, OVERRIDES[place % len(OVERRIDES)])
    words = command(config)
    assert words[:3] == ["fedlens", "run", name]
    assert identity(compose(name, words[3:])) == identity(config)
    assert not any(one.startswith(("threads", "data.root", "engine")) for one in words)


def test_a_command_has_only_what_differs_from_its_experiment() -> None:
    config = compose("quickstart", ["train.lr=0.1", "run.name=it", "seed=2"])
    assert command(config) == ["fedlens", "run", "quickstart", "seed=2"]
    named = compose("ridge", ["backbone=timm:resnet18.a1_in1k", "head.temperature=2"])
    assert command(named)[3:5] == ["backbone=timm", "backbone.model=resnet18.a1_in1k"]
    assert "head.temperature=2.0" in command(named)
    undone = compose("sparse_fedavg", ["sparse.density=null", "federated.clients=5"])
    assert {"sparse.density=null", "federated.clients=5"} <= set(command(undone))


@pytest.mark.slow
@given(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()))
@example("null")
@example("1e-3")
@example("it's \\'here\\")
@example(["a", 1, None, "b,c"])
def test_a_word_is_read_as_the_value_it_was_made_of(value: object) -> None:
    if isinstance(value, str) and ("${" in value or not value.isprintable()):
        return  # OmegaConf's own, and what no command line holds
    parsed = OverridesParser.create().parse_override(f"key={word(value)}")
    assert parsed.value() == value
    assert type(parsed.value()) is type(value)


@pytest.mark.slow
def test_an_experiment_may_be_a_file(tmp_path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "# @package _global_\n# Mine.\n#\n# cost: none\n"
        "defaults:\n  - /experiment/quickstart\nhead: {name: ridge}\ntrain: {lr: 0.5}\n"
    )
    from_file = compose(str(path), ["seed=3", "head.temperature=2"])
    by_words = compose("quickstart", ["head=ridge", "train.lr=0.5", "seed=3", "head.temperature=2"])
    assert from_file == by_words
    assert documentation(str(path)) == "Mine.\n\ncost: none"
    path.write_text("train: {lr: 0.5}\n")  # without the line that is for Hydra
    assert compose(str(path), []) == compose("centralized", ["train.lr=0.5"])


@pytest.mark.parametrize("name", ["quickstart_sparse", "fedavg_noniid"])
def test_a_copy_of_an_experiment_is_that_experiment(name: str, tmp_path) -> None:
    ours = files("fedlens.config.presets").joinpath("experiment", f"{name}.yaml")
    (tmp_path / "copy.yml").write_text(ours.read_text())
    assert compose(str(tmp_path / "copy.yml"), []) == compose(name, [])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("train: {lrr: 1}", "mine.yaml: train.lrr: Key 'lrr' not in 'TrainConfig'"),
        ("train: {lr: fast}", "mine.yaml: train.lr: Value 'fast'"),
        ("train: {lr: -1}", "mine.yaml: train.lr=-1.0 must be positive"),
        ("lr: 1", "mine.yaml: lr: Key 'lr' not in 'Config'"),
        ("train: {lr: 1", r"mine.yaml is not a YAML file \(line"),
        ("- 1", "is not an experiment"),
        ("", "is not an experiment"),
        ("\x00", "is not a YAML file"),
        ("defaults: [/experiment/quickstrt]", "Could not load 'experiment/quickstrt'"),
        ("defaults: [override /trein: head]", "Could not override 'trein'"),
        ("experiment: mine", "experiment=mine is not a known experiment"),
    ],
)
def test_a_bad_experiment_file_is_refused_in_a_sentence(
    text: str, complaint: str, tmp_path
) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(FedlensError, match=complaint) as caught:
        compose(str(tmp_path / "mine.yaml"), [])
    assert "\n" not in str(caught.value)


def test_an_experiment_file_that_is_not_there(tmp_path) -> None:
    with pytest.raises(FedlensError, match=r"absent\.yaml cannot be read: No such file"):
        compose(str(tmp_path / "absent.yaml"), [])


def test_a_changed_config_is_checked_like_a_composed_one() -> None:
    config = compose("quickstart", ["threads=1"])
    other = changed(config, {"train.lr": 0.3, "train.schedule.name": "step", "head.freeze": True})
    words = ["threads=1", "train.lr=0.3", "train.schedule.name=step", "head.freeze=true"]
    assert other == compose("quickstart", words)
    assert config == compose("quickstart", ["threads=1"])
    for values in ({"train.lr": -1}, {"train.epochs": 1.5}, {"train.lrr": 1}):
        with pytest.raises(FedlensError):
            changed(config, values)


def test_a_chosen_row_keeps_what_was_set_for_all_rows_of_its_kind_and_nothing_else() -> None:
    ridge = compose("ridge", ["head.dropout=0.2", "head.l2=3"])
    linear = changed(ridge, {"head": "linear"})
    assert linear.head == RowSettings(
        name="linear", freeze=False, dropout=0.2, layers=0, tokens="class", random_features=None,
        train_layers=None,
    )  # fmt: skip
    assert changed(linear, {"head": "ridge"}).head.freeze
    frozen = changed(ridge, {"head": "linear", "head.freeze": True, "train.trainable": "full"})
    assert changed(frozen, {"head": "trained"}).head.freeze
    adam = compose("fedavg_iid", ["algorithm=fedadam", "algorithm.server=momentum"])
    assert adam.algorithm.server == RowSettings(name="momentum", momentum=0.9, lr=0.01)
    whole = changed(adam, {"algorithm.server": {"name": "sgd"}})
    assert whole.algorithm.server == RowSettings(name="sgd", lr=1.0)


def test_a_row_is_chosen_before_its_parameters_are_set_whatever_the_order() -> None:
    words = ["algorithm.aggregator.density=0.5", "algorithm.aggregator=ties"]
    config = compose("fedavg_iid", words)
    assert config == compose("fedavg_iid", words[::-1])
    assert config.algorithm.aggregator.density == 0.5


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["algorithm=fednova"], "algorithm.aggregator=fednova needs .*train.optimizer=sgd"),
        (["algorithm=scaffold"], "algorithm.scaffold=true needs .*use train.optimizer=sgd"),
        (["algorithm=ghbm"], "algorithm.correction=ghbm needs .*use train.optimizer=sgd"),
        (["algorithm=fedcm"], "algorithm.correction=fedcm needs .*use train.optimizer=sgd"),
        (["train.optimizer.momentum=0"], "is not read by train.optimizer=adamw: .* choose sgd"),
    ],
)
def test_adamw_refuses_what_it_does_not_define(overrides: list[str], complaint: str) -> None:
    with pytest.raises(FedlensError, match=complaint):
        compose("fedavg_iid", ["train.optimizer=adamw", *overrides])
    assert compose("fedavg_iid", ["train.optimizer=adamw"]).train.optimizer.beta1 == 0.9


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["algorithm.scaffold=true", "algorithm.correction=ghbm"], "leave it or .*=ghbm out"),
        (["algorithm=feddyn", "algorithm.proximal=0.1"], "has a proximal term of its own"),
        (["algorithm=feddyn", "algorithm.aggregator=median"], "use algorithm.aggregator=mean"),
        (["algorithm=feddyn", "algorithm.server.lr=2"], "=sgd with learning rate 1"),
        (["algorithm=feddyn", "algorithm.correction.alpha=0"], "alpha=0.0 must be positive"),
        (["algorithm=feddyn", "train.trainable=lora", "train.trainable.average=products"],
         "is an exact mean, which algorithm.correction=feddyn moves on"),
        (["algorithm=feddyn", "backbone.batch_norm=local"], "both keep client states"),
        (["algorithm=ghbm", "algorithm.correction.tau=0"], "tau=0 must be 1 or more"),
        (["algorithm=ghbm", "algorithm.correction.alpha=0.1"], "is not read by .*=ghbm"),
        (["algorithm=fedcm", "privacy=central", "engine=flower_simulation"],
         "algorithm.correction=fedcm sends tensors beside the parameters"),
        (["algorithm=ghbm", "federated.clients=null"], "ghbm is about clients"),
        (["algorithm.average=last", "federated.clients=null"], "averages rounds' global models"),
        (["algorithm.average=lost"], "did you mean 'last'"),
    ],
)  # fmt: skip
def test_corrections_and_averages_that_cannot_be(overrides: list[str], complaint: str) -> None:
    with pytest.raises(FedlensError, match=complaint):
        compose("fedavg_iid", overrides)


@pytest.mark.parametrize(
    ("clients", "participation", "rounds"), [(100, 0.1, 10), (10, 0.3, 4), (7, 1.0, 1), (5, 0.6, 2)]
)
def test_a_cycle_visits_every_client_once(clients: int, participation: float, rounds: int) -> None:
    federated = FederatedConfig(clients, participation)
    assert cycle(federated) == rounds
    assert cohort_size(federated) * rounds >= clients > cohort_size(federated) * (rounds - 1)


@pytest.mark.parametrize(
    "override",
    [
        "partition=classes",
        "algorithm=cyclic",
        "algorithm=median",
        FEDADAM,
        "algorithm.server.lr=2",
        "algorithm=fedprox",
        "algorithm=scaffold",
    ],
)
def test_what_only_clients_read_has_no_effect_in_central_training(override: str) -> None:
    assert checks.without_effect(compose("quickstart", [])) == []
    assert len(checks.without_effect(compose("quickstart", [override]))) == 1 + (
        override == FEDADAM
    )
    assert checks.without_effect(compose("quickstart_fedavg", [override])) == []


def test_defaults_of_new_rows_name_no_run() -> None:
    plain = compose("fedavg_noniid", [])
    named = compose("fedavg_noniid", ["algorithm.correction=none", "algorithm.average=none"])
    assert run_name(named) == run_name(plain)
    other = compose("fedavg_noniid", ["algorithm.average=last"])
    assert "evaluated-by-the-mean-of-the-last-models" in run_name(other) != run_name(plain)
