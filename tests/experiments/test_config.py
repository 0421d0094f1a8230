from dataclasses import replace

import pytest

from fedlens.errors import FedlensError
from fedlens.experiments.compose import amend, compose, experiments, groups, load, options, to_yaml
from fedlens.experiments.config import Config, essence, keys, run_name, validate


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
        ("train.what=last_block:2", "did you mean 'last_blocks:N'"),
        ("train.what=last_blocks:0", "at least 1"),
        ("train.schedule.name=cosinus", "did you mean 'cosine'"),
        ("train.precision=fp16", "choose from amp, fp32"),
        ("train.momentum=1", r"must lie in \[0, 1\)"),
        ("train.batch_size=0", "at least 1"),
        ("data.validation=1", r"must lie in \[0, 1\)"),
        ("data.validation=0", "evaluate.select=last"),
        ("backbone.freeze_blocks=-1", "0 or more"),
        ("head.dropout=1", r"\[0, 1\)"),
        ("evaluate.select=test", "evaluate.select=test is unknown: did you mean"),
        ("experiment=ridge", "first word"),
        ("device=tpu", "device=tpu is unknown"),
        ("seed=-1", "0 or more"),
        ("checkpoint.keep_last=0", "at least 1"),
        ("run.name=../up", "one plain folder name"),
        ("run.name=/tmp/x", "one plain folder name"),
        ("run.name=..", "one plain folder name"),
        ("seed=1,2", "one value per key"),
        ("data=cifar100,synthetic", "one value per key"),
        ("backbone=timm", "needs a name"),
        ("device=auto:1", "device=auto:1 is unknown"),
        ("train.lr=inf", "finite"),
        ("augment.crop_padding=-1", "0 or more"),
        ("augment.colour_jitter=1.5", r"must lie in \[0, 1\]"),
        ("augment.randaugment=-1", "0 or more"),
        ("augment.magnitude=31", r"must lie in \[0, 30\]"),
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
    for word in (f"command: fedlens run {name}", "cost:", "expect:"):
        assert word in entry.documentation


@pytest.mark.parametrize("group", [g for g in groups() if g != "experiment"])
def test_every_option_of_every_group_composes(group: str) -> None:
    for option in options(group):
        if (group, option) != ("backbone", "timm"):
            compose("centralized", [f"{group}={option}"])


def test_any_timm_backbone_can_be_named() -> None:
    config = compose("centralized", ["backbone=timm:resnet18.a1_in1k"])
    assert config.backbone.name == "timm:resnet18.a1_in1k"


def test_the_issue_s_own_example() -> None:
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
    subset = replace(config, data=replace(config.data, train_per_class=5))
    assert "cifar100-subset" in run_name(subset)
    named = replace(config, run=replace(config.run, name="mine"))
    assert run_name(named) == "mine"


def test_the_essence_ignores_where_weights_lie_but_not_which() -> None:
    def with_weights(path: str) -> Config:
        return compose("centralized", [f"backbone.weights={path}"])

    assert essence(with_weights("/a/x.pth")) == essence(with_weights("/b/x.pth"))
    assert essence(with_weights("/a/x.pth")) != essence(with_weights("/a/y.pth"))


def test_closed_form_heads_need_validation_or_given_numbers() -> None:
    common = ["data.validation=0", "evaluate.select=last"]
    with pytest.raises(FedlensError, match=r"head\.temperature"):
        compose("ridge", common)
    compose("ridge", [*common, "head.temperature=20", "head.ridge_lambda=100"])


def test_all_keys_are_listed_once() -> None:
    found = list(keys())
    assert len(found) == len(set(found))
    assert {"seed", "train", "train.lr", "train.schedule.warmup"} <= set(found)
    validate(Config())


def test_a_begun_run_may_move_but_not_change() -> None:
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
