"""A search of real runs: it reads no test image, survives being killed, and its best can be run."""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedlens.config.schema import Config
from fedlens.data.images import Images
from fedlens.experiments.run import resume, start
from fedlens.runtime.stop import Abandoned
from fedlens.store.run_folder import RunFolder, runs
from tests.integration.conftest import FEDERATED, ON_FEATURES, TINY, Order, Tiny, facts
from tests.integration.test_leakage import change_test_split

KILLED, OUT_OF_TIME = -9, -27  # SIGKILL, SIGPROF
SMALL = [word for word in TINY if not word.startswith("train.lr=")]
Session = Callable[..., dict[str, Any]]
WORDS = ["quickstart", *SMALL, *ON_FEATURES, "--search", "train.lr=log:1e-3:10", "--name", "it"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def never(images: Images) -> Images:
    raise AssertionError("the test split was opened")


def outcome(root: Path) -> dict[str, Any]:
    """The outcome of a search without its times."""
    record: dict[str, Any] = json.loads((root / "tune/it/trials.json").read_text())
    for trial in record["trials"]:
        del trial["seconds"]
    return {key: record[key] for key in ("trials", "best", "importance", "space")}


def test_a_search_never_opens_the_test_split_and_its_best_can_be_run(
    fedlens, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        change_test_split(patch, never)
        code, out, err = fedlens("tune", *WORDS, "--trials", "7")
    assert code == 0, err
    assert "trial 7 of 7" in err
    assert "best so far" in err
    assert "fedlens run runs/tune/it/best.yaml" in out
    folder = Path("runs/tune/it")
    for name in ("history.png", "slices.png", "importance.png", "trials.csv", "study.db"):
        assert (folder / name).stat().st_size > 0
    search = outcome(Path("runs"))
    assert len(search["trials"]) == 7
    best = search["trials"][search["best"] - 1]
    for run in runs(folder / "runs"):
        assert run.result is None or "test" not in run.result
        assert not run.checkpoints.exists()
        assert "test" not in json.dumps(run.journal("test_curve").read())
    code, _, err = fedlens("tune", *WORDS, "--trials", "7")
    assert (code, "is finished" in err) == (0, True)
    code, out, err = fedlens("run", str(folder / "best.yaml"), "threads=1")
    assert code == 0, err
    (tested,) = runs(Path("runs"))
    assert tested.result is not None
    assert tested.result["validation"]["top1"] == best["value"]  # the trial, bit for bit
    assert "test" in tested.result


@pytest.fixture(scope="module")
def session(zygote: Order) -> Session:
    """What becomes of a search in a child of the zygote."""

    def send(root: Path, **how: Any) -> dict[str, Any]:
        return zygote("tune", *WORDS, "--trials", "6", "--runs", str(root), **how)

    return send


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
def test_a_search_killed_at_random_moments_has_the_same_outcome(
    session: Session, tmp_path: Path
) -> None:
    """Killed at file operations and after some time, also while the database is written."""
    draw = random.Random(8)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    undisturbed = session(whole)
    assert undisturbed["status"] == 0
    for _ in range(2):
        assert session(killed, die_at=draw.randrange(20, 60))["status"] == KILLED
    moment = draw.uniform(0.1, 0.3) * undisturbed["seconds"]
    assert session(killed, after=moment)["status"] == OUT_OF_TIME
    assert session(killed)["status"] == 0
    assert outcome(killed) == outcome(whole)
    assert (killed / "tune/it/slices.png").exists()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["quickstart", "--search", "train.lrr=1,2"], "did you mean 'train.lr'"),
        (["quickstart", "--search", "train.lr=log:0:1"], "must start above 0"),
        (["quickstrat"], "did you mean 'quickstart'"),
        (["absent.yaml"], "absent.yaml cannot be read"),
        (["quickstart", "--pruner", "medain"], "did you mean 'median'"),
        (["quickstart", "--name", "../up"], "must be one plain folder name"),
        (["quickstart", "run.name=mine"], "--name"),
        (
            ["quickstart", "data.validation=0", "evaluate.select=last"],
            "compares trials on validation images",
        ),
        (
            [*WORDS, "--trials", "2", "train.clip_norm=1", "backbone.freeze_blocks=1"],
            "goes with train.trainable=full",
        ),
    ],
)
def test_mistakes_are_one_sentence(fedlens, words: list[str], complaint: str) -> None:
    code, _, err = fedlens("tune", *words)
    assert code == 2
    last = err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert complaint in last


def test_a_search_whose_trials_all_fail_says_so(fedlens) -> None:
    words = [*SMALL, *ON_FEATURES, "--search", "train.lr=log:1e30:1e32", "--trials", "2"]
    code, _, err = fedlens("tune", "quickstart", *words, "--name", "it")
    assert code == 2
    assert "No trial of it was completed (2 failed)" in err.splitlines()[-1]
    assert "lower the learning rate" in Path("runs/tune/it/trials.csv").read_text()
    assert not Path("runs/tune/it/best.yaml").exists()


def test_help_has_an_example(fedlens) -> None:
    code, out, _ = fedlens("tune", "--help")
    assert code == 0
    for word in ("fedlens tune sparse_fedavg", "log:1e-4:1", "best.yaml", "--trials", "--timeout"):
        assert word in out


@pytest.mark.parametrize("mode", [ON_FEATURES, [*FEDERATED, *ON_FEATURES]])
def test_a_run_may_leave_the_test_split_unread(
    fedlens, mode: list[str], tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        change_test_split(patch, never)
        untested = start(tiny(*mode, "evaluate.test=false"))
    tested = start(tiny(*mode))
    assert untested.name != tested.name
    assert untested.result is not None
    assert tested.result is not None
    assert "test" not in untested.result
    assert "per_client" not in untested.result
    assert untested.choice == untested.result["choice"] == tested.result["choice"]
    assert untested.result["validation"] == tested.result["validation"]
    code, out, _ = fedlens("ls", "--runs", str(untested.path.parent))
    assert (code, "unreadable" in out) == (0, False)
    code, out, _ = fedlens("show", str(untested.path))
    assert (code, "–" in out) == (0, True)
    code, _, err = fedlens("arithmetic", "alpha", str(untested.path))
    assert code == 2
    assert "was not evaluated on the test split: run it with evaluate.test=true" in err


class Watcher:
    def __init__(self, enough: int = 99) -> None:
        self.enough = enough
        self.seen: list[tuple[int, float]] = []

    def __call__(self, unit: int, top1: float) -> None:
        self.seen.append((unit, top1))
        if unit == self.enough:
            raise Abandoned("that will do")


def curve(folder: RunFolder, unit: str) -> list[tuple[int, float]]:
    records = folder.journal("metrics").read()
    return [(r[unit], r["validation"]["top1"]) for r in records if "validation" in r]


def both(make: Callable[..., Config], *words: str) -> list[Config]:
    return [make(*words, root=root) for root in ("whole", "abandoned")]


@pytest.mark.parametrize(
    ("mode", "unit"),
    [(ON_FEATURES, "epoch"), ([*FEDERATED, "head=ridge", "augment=none"], "round")],
)
def test_an_abandoned_run_has_not_failed_and_resumes_to_the_same_result(
    mode: list[str], unit: str, tiny: Tiny
) -> None:
    whole, config = both(tiny, *mode, "checkpoint.every=9")
    watcher = Watcher()
    undisturbed = start(whole, watch=watcher)
    assert watcher.seen == curve(undisturbed, unit)
    assert [number for number, _ in watcher.seen] == (
        [1, 2, 3] if unit == "epoch" else [0, 1, 2, 3]
    )
    with pytest.raises(Abandoned):
        start(config, watch=Watcher(enough=2))
    (folder,) = runs(Path(config.run.root))
    assert (folder.state(), folder.failure) == ("interrupted", None)
    again = Watcher()
    assert facts(start(config, watch=again)) == facts(undisturbed)
    assert again.seen == watcher.seen  # validations before it was abandoned are reported again


def test_an_abandoned_run_can_be_resumed_from_its_folder(tiny: Tiny) -> None:
    config = tiny(*ON_FEATURES)
    with pytest.raises(Abandoned):
        start(config, watch=Watcher(enough=1))
    (folder,) = runs(Path(config.run.root))
    assert resume(folder).state() == "finished"
