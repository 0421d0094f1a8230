"""The command line: help, a run from start to end, and mistakes reported in one sentence."""

import os
from pathlib import Path

import pytest

from fedlens.store.run_folder import RunFolder
from tests.integration.conftest import TINY

REAL = ("FEDLENS_DATA", "FEDLENS_WEIGHTS")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "words", [[], ["run"], ["resume"], ["ls"], ["show"], ["config"], ["data"], ["weights"]]
)
def test_every_command_has_help(fedlens, words: list[str]) -> None:
    code, out, _ = fedlens(*words, "--help")
    assert code == 0
    assert "Usage" in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["lss"], "No such command 'lss'. Did you mean 'ls'? See `fedlens --help`."),
        (["ls", "there"], "Got unexpected extra argument (there). See `fedlens ls --help`."),
        (["ls", "--nope"], "No such option '--nope'. See `fedlens ls --help`."),
        (["run"], "Missing argument 'EXPERIMENT'. See `fedlens run --help`."),
        (["show", "--runs"], "Option '--runs' requires an argument. See"),
        (["ls", "--last", "x"], "Invalid value for '--last': 'x' is not a valid integer"),
    ],
)
def test_words_that_no_command_takes_are_refused_in_a_sentence(
    fedlens, words: list[str], sentence: str
) -> None:
    code, out, err = fedlens(*words)
    assert code == 2
    assert not out
    assert err.startswith(f"error: {sentence}")
    assert err.count("\n") == 1


def test_a_run_from_start_to_show(fedlens) -> None:
    code, out, err = fedlens("run", "quickstart", *TINY)
    assert code == 0
    for word in ("synthetic", "vit_pico", "test", "validation", "runs/quickstart"):
        assert word in out
    assert "epoch 3 of 3" in err
    code, out, _ = fedlens("ls")
    assert code == 0
    assert "finished" in out
    assert "%" in out
    code, out, _ = fedlens("show", "quickstart")
    assert code == 0
    assert "fedlens run quickstart" in out
    code, out, _ = fedlens("resume", "quickstart")
    assert (code, "nothing to do" in out) == (0, True)
    (folder,) = Path("runs").iterdir()
    for name in ("config.yaml", "manifest.json", "metrics.jsonl", "log.txt", "result.json"):
        assert (folder / name).exists()
    first = (folder / "log.txt").read_text().splitlines()[0]
    assert [len(first.split(" | ")), first.split(" | ")[1]] == [3, "INFO"]


def assert_refused(result: tuple[int, str, str], *words: str) -> None:
    code, _, err = result
    assert code == 2
    last = err.strip().splitlines()[-1]
    assert last.startswith("error: "), err
    for word in words:
        assert word in last
    assert "Traceback" not in err


def test_mistakes_are_one_sentence(fedlens, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in REAL:
        monkeypatch.delenv(name, raising=False)
    assert_refused(fedlens("run", "centralised"), "did you mean 'centralized'")
    assert_refused(fedlens("run", "quickstart", "train.lrr=1"), "did you mean 'train.lr'")
    assert_refused(fedlens("show", "nothing"), "there are no runs")
    assert_refused(fedlens("data", "verify", "cifar10"), "did you mean 'cifar100'")
    assert_refused(fedlens("data", "verify"), "fedlens data fetch")
    assert_refused(fedlens("run", "quickstart", "backbone.resolution=30"), "px", "resolution=30")
    assert_refused(fedlens("run", "quickstart", "backbone=timm:resnet_18"), "did you mean")
    assert_refused(fedlens("run", "quickstart", "backbone.weights=absent.pth"), "does not exist")
    assert_refused(fedlens("run", "quickstart", *TINY, "backbone.freeze_blocks=99"), "blocks")
    assert_refused(fedlens("run", "quickstart", *TINY, "train.trainable=last_blocks:99"), "blocks")
    assert_refused(fedlens("run", "quickstart", *TINY, "device=cuda:7"), "device=auto")


def test_a_run_that_diverges_fails_in_a_sentence_and_is_listed(fedlens) -> None:
    words = [*TINY, "train.lr=1e30", "run.name=wild"]
    assert_refused(fedlens("run", "quickstart", *words), "lower the learning rate")
    code, out, _ = fedlens("ls")
    assert (code, "failed" in out) == (0, True)
    code, out, _ = fedlens("show", "wild")
    assert "lower the learning rate" in out


def test_a_folder_that_cannot_be_created_is_refused(fedlens, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert_refused(fedlens("run", "quickstart", *TINY, "run.root=file"), "Cannot write to")


def test_a_disk_that_fills_up_mid_run_loses_nothing(
    fedlens, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedlens.store import checkpoints

    real, saves = checkpoints.save_file, []

    def filling(tensors: object, path: Path) -> None:
        saves.append(path)
        if len(saves) == 2:
            raise OSError(28, "No space left on device")
        real(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "save_file", filling)
        assert_refused(fedlens("run", "quickstart", *TINY, "run.name=it"), "No space left")
    assert len(list(Path("runs/it/checkpoints").iterdir())) == 1
    code, _, err = fedlens("resume", "it")
    assert code == 0
    assert "resuming from checkpoint" in err


def test_configs_are_listed_and_printed(fedlens) -> None:
    code, out, _ = fedlens("config")
    assert code == 0
    for word in ("centralized", "head_only", "ridge", "quickstart", "cost:", "expect:"):
        assert word in out
    code, out, _ = fedlens("config", "centralized", "train.lr=0.25")
    assert code == 0
    assert "lr: 0.25" in out
    assert out.startswith("# Central baseline")


def test_data_and_weights_are_described(fedlens) -> None:
    code, out, _ = fedlens("data", "describe", "synthetic")
    assert code == 0
    assert "sealed" in out
    code, out, _ = fedlens("weights", "list")
    assert code == 0
    assert "dino_vits16" in out


def test_real_files_verify(fedlens) -> None:
    if not os.environ.get("FEDLENS_DATA"):
        pytest.skip("FEDLENS_DATA is not set")
    code, out, _ = fedlens("data", "verify")
    assert code == 0
    assert out.count("ok") == 3


def test_broken_runs_do_not_hide_others(fedlens) -> None:
    for name in ("good", "bad", "worse"):
        fedlens("run", "quickstart", *TINY, "train.epochs=1", f"run.name={name}")
    Path("runs/bad/result.json").write_text("{")
    Path("runs/worse/result.json").write_text("{}")
    code, out, _ = fedlens("ls")
    assert code == 0
    assert out.count("unreadable") == 2
    assert "finished" in out
    before = RunFolder(Path("runs/good")).result
    for name in ("bad", "worse"):  # only a whole result finishes a run
        assert fedlens("resume", name)[0] == 0
        result = RunFolder(Path("runs", name)).result
        assert result is not None
        assert before is not None
        assert result["test"] == before["test"]
