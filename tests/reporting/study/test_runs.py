import random
import shutil
from pathlib import Path

import pytest
import yaml

from fedlens.config.schema import RUNTIME_KEYS, Config
from fedlens.errors import FedlensError
from fedlens.files import write_json
from fedlens.reporting.study.runs import identity, read, repetitions, setting
from fedlens.store.run_folder import RunFolder
from tests.reporting import run_records
from tests.reporting.run_records import (
    CENTRAL,
    RIDGE,
    config_of,
    leaves,
    methods_of,
    put,
    study_of,
    write_run,
)


def test_runs_that_differ_in_their_seed_alone_are_one_method(tmp_path: Path) -> None:
    for seed, test in ((2, 0.5), (0, 0.4), (1, 0.6)):
        write_run(tmp_path, seed=seed, test=test)
    (method,) = methods_of(tmp_path)
    assert method.seeds == (0, 1, 2)
    assert method.by_seed() == pytest.approx({0: 40.0, 1: 60.0, 2: 50.0})
    assert (method.test.mean, method.test.deviation) == pytest.approx((50.0, 10.0))


@pytest.mark.parametrize(
    ("key", "value"),
    [("threads", 3), ("device", "cpu"), ("run.root", "elsewhere"), ("run.name", "mine"),
     ("data.root", "/data"), ("engine.name", "parallel"), ("engine.threads_per_client", 2),
     ("tracker.name", "wandb"), ("checkpoint.every", 5)],
)  # fmt: skip
def test_circumstances_do_not_make_another_method(key: str, value: object, tmp_path: Path) -> None:
    write_run(tmp_path, seed=0)
    write_run(tmp_path, {key: value}, seed=1)
    assert [method.seeds for method in methods_of(tmp_path)] == [(0, 1)]


@pytest.mark.parametrize(
    "key",
    sorted(
        key for key in leaves(config_of())
        if key != "seed"
        and not any(key == one or key.startswith(f"{one}.") for one in RUNTIME_KEYS)
    ),
)  # fmt: skip
def test_every_key_that_decides_a_result_makes_another_method(key: str) -> None:
    changed = config_of()
    put(changed, key, "something else")
    assert identity(changed) != identity(config_of())
    assert identity(changed, [key]) == identity(config_of(), [key])


def test_weights_are_the_same_wherever_their_file_lies() -> None:
    here, there, other = (
        identity(config_of({"backbone.weights": path}))
        for path in ("/a/dino.pth", "/b/c/dino.pth", "/a/else.pth")
    )
    assert here == there != other


def test_identity_leaves_the_config_as_it_was() -> None:
    config = config_of({"backbone.weights": "/a/dino.pth"})
    identity(config, ["train"])
    assert config == config_of({"backbone.weights": "/a/dino.pth"})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "synthetic benchmark, ViT pico at 32 px"),
        ({"data.name": "cifar100"}, "CIFAR-100, ViT pico at 32 px"),
        ({"backbone.resolution": 64}, "synthetic benchmark, ViT pico at 64 px"),
        ({"backbone.pretrained": False}, "synthetic benchmark, ViT pico at 32 px, from scratch"),
        ({"data.train_per_class": 5}, "synthetic benchmark, 5 images per class, ViT pico at 32 px"),
        (
            {"data.test_per_class": 9},
            "synthetic benchmark, 9 test images per class, ViT pico at 32 px",
        ),
        ({"data.validation": 0.2}, "synthetic benchmark, validation 0.2, ViT pico at 32 px"),
    ],
)
def test_settings_are_told_apart_and_never_mix(
    changes: dict[str, object], expected: str, tmp_path: Path
) -> None:
    write_run(tmp_path, seed=0)
    write_run(tmp_path, changes, seed=1)
    settings = study_of(tmp_path).settings
    assert expected in settings
    assert len(settings) == (2 if changes else 1)
    assert all(setting(m.runs[0]) == where for where, methods in settings.items() for m in methods)


def test_a_folder_runs_and_names_are_all_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = write_run(tmp_path / "runs", seed=0, name="first_of_all")
    write_run(tmp_path / "runs", seed=1, name="second")
    monkeypatch.chdir(tmp_path)

    def names(*places: str) -> list[str]:
        return [run.name for run in read([Path(place) for place in places]).runs]

    assert names("runs") == ["first_of_all", "second"]
    assert names(str(first), "runs/second") == ["first_of_all", "second"]
    assert names("second") == names("cond") == ["second"]
    assert names("runs", "second", str(first)) == ["first_of_all", "second"]
    monkeypatch.chdir(first)
    assert names(".") == ["first_of_all"]


def test_what_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FedlensError, match=r"no runs in .*empty"):
        read([tmp_path / "empty"])
    with pytest.raises(FedlensError, match="No run 'nowhere'"):
        read([Path("nowhere")])


def test_the_same_run_in_two_places_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", name="twin")
    shutil.copytree(run, tmp_path / "b" / "twin")
    with pytest.raises(FedlensError, match=r"twin and .*twin are the same run"):
        read([tmp_path / "a", tmp_path / "b"])


def test_the_order_of_paths_does_not_matter(tmp_path: Path) -> None:
    places = [write_run(tmp_path, {"train.lr": lr}, seed=s) for lr in (0.1, 0.2) for s in (0, 1)]
    told = [[run.name for run in method.runs] for method in read(places).methods]
    random.Random(0).shuffle(places)
    assert [[run.name for run in method.runs] for method in read(places).methods] == told


def test_runs_that_are_not_finished_are_counted_and_no_more(tmp_path: Path) -> None:
    write_run(tmp_path, seed=0)
    begun, failed = (write_run(tmp_path, seed=seed, name=f"s{seed}") for seed in (1, 2))
    for run in (begun, failed):
        (run / "result.json").unlink()
    run_records.dump(failed / "failure.json", {"message": "no"})
    study = study_of(tmp_path)
    assert [run.seed for run in study.runs] == [0]
    assert study.unfinished == {"s1": "interrupted", "s2": "failed"}


def test_runs_that_never_met_the_test_split_are_left_out(tmp_path: Path) -> None:
    """As a search of hyper-parameters makes them: they are neither results nor unfinished."""
    write_run(tmp_path, seed=0)
    searched = write_run(tmp_path, {"evaluate.test": False}, seed=1)
    result = run_records.load(searched / "result.json")
    del result["test"]
    run_records.dump(searched / "result.json", result)
    study = study_of(tmp_path)
    assert [run.seed for run in study.runs] == [0]
    assert study.unfinished == {}


def test_without_a_finished_run_there_is_nothing_to_report(tmp_path: Path) -> None:
    (write_run(tmp_path) / "result.json").unlink()
    with pytest.raises(FedlensError, match="no finished run"):
        study_of(tmp_path)


def broken(run: Path, how: str) -> None:
    name, _, key = how.partition(" without ")
    path = run / name
    if key:
        found = run_records.load(path)
        del found[key]
        run_records.dump(path, found)
    elif how.startswith("no "):
        (run / how.removeprefix("no ")).unlink()
    elif how.startswith("cut "):
        path = run / how.removeprefix("cut ")
        path.write_text(path.read_text(encoding="utf-8")[:-20], encoding="utf-8")
    else:
        path = run / how.removeprefix("empty ")
        path.write_text("", encoding="utf-8")


@pytest.mark.parametrize(
    "how",
    ["no manifest.json", "cut manifest.json", "empty manifest.json", "no metrics.jsonl",
     "empty metrics.jsonl", "cut result.json", "empty config.yaml",
     "manifest.json without sessions", "manifest.json without inputs", "result.json without units",
     "result.json without choice", "result.json without facts"],
)  # fmt: skip
def test_a_broken_run_is_named_in_one_sentence(how: str, tmp_path: Path) -> None:
    run = write_run(tmp_path, name="the_broken_one")
    broken(run, how)
    with pytest.raises(FedlensError, match="the_broken_one") as caught:
        study_of(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_config_that_is_no_yaml_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path, name="the_broken_one")
    (run / "config.yaml").write_text("a: [", encoding="utf-8")
    with pytest.raises(FedlensError, match="the_broken_one"):
        study_of(tmp_path)


def test_keys_that_a_run_was_made_without_have_their_defaults(tmp_path: Path) -> None:
    write_run(tmp_path, seed=0)
    old = write_run(tmp_path, seed=1)
    config = yaml.safe_load((old / "config.yaml").read_text(encoding="utf-8"))
    del config["evaluate"]["test"], config["train"]["schedule"]["stages"], config["checkpoint"]
    (old / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    (method,) = methods_of(tmp_path)
    assert method.seeds == (0, 1)
    assert method.runs[1].config["evaluate"]["test"] is Config().evaluate.test


def test_megabytes_are_both_ways_over_all_rounds_and_what_came_before(tmp_path: Path) -> None:
    """Two rounds of 2 MB down and 1 MB up; a ridge head needs 5 MB of statistics first."""
    plain, ridge = write_run(tmp_path / "a"), write_run(tmp_path / "b", RIDGE)
    alone = write_run(tmp_path / "c", run_records.HEAD_ONLY, trains=False)
    pooled = write_run(tmp_path / "d", CENTRAL)
    found = [read([run]).runs[0].megabytes for run in (plain, ridge, alone, pooled)]
    assert found == [6.0, 11.0, 5.0, None]


def test_validation_is_a_mean_only_where_every_seed_has_it(tmp_path: Path) -> None:
    write_run(tmp_path, seed=0, validation=0.4)
    other = write_run(tmp_path, seed=1, validation=0.6)
    assert methods_of(tmp_path)[0].validation == pytest.approx(50.0)
    run_records.edit(other / "result.json", "validation", None)
    assert methods_of(tmp_path)[0].validation is None


def test_repetitions_differ_in_their_seed_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_run(tmp_path, seed=1, test=0.5)
    write_run(tmp_path, seed=0, test=0.25)
    write_run(tmp_path, {"threads": 7}, seed=2, test=0.75)
    write_run(tmp_path, {"train.lr": 0.5}, seed=3)  # another method
    write_run(tmp_path, seed=1, test=0.9, name="the same seed again")
    unfinished = write_run(tmp_path, seed=4)
    (unfinished / "result.json").unlink()
    other_data = write_run(tmp_path, seed=5)
    manifest = RunFolder(other_data).manifest or {}
    inputs = {**manifest["inputs"], "data": "other"}
    write_json(other_data / "manifest.json", {**manifest, "inputs": inputs})
    found = repetitions(RunFolder(folder))
    assert [(run.seed, run.test) for run in found] == [(0, 25.0), (1, 50.0), (2, 75.0)]
    assert not caplog.records
    (write_run(tmp_path, seed=6, name="damaged") / "result.json").write_text("{")
    assert len(repetitions(RunFolder(folder))) == 3
    assert "damaged is left out" in caplog.text
