"""A run killed at any moment and resumed ends with the bits of an uninterrupted run."""

import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedlens import files
from fedlens.store.checkpoints import Checkpoints
from fedlens.store.run_folder import RunFolder
from tests.integration.conftest import FEDERATED, ON_FEATURES, TINY, Order, facts

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")

KILLED, OUT_OF_TIME, INTERRUPTED = -9, -27, 75  # SIGKILL, SIGPROF, what fedlens exits with
OPTIONS = [
    *TINY,
    "data.train_per_class=2",
    "data.test_per_class=1",
    "head.dropout=0.2",
    "evaluate.test_curve=true",
    "checkpoint.minutes=0.0001",  # also in the middle of epochs
    "train.schedule.name=linear",
]

FEDERATION = [
    *TINY,
    *FEDERATED,
    *ON_FEATURES,
    "algorithm=scaffold",
    "algorithm.server=momentum",
    "evaluate.test_curve=true",
]

SPARSE = [
    *TINY,
    *FEDERATED,
    "federated.rounds=2",
    "federated.keep_updates=1",
    "head=ridge",
    "sparse.density=0.1",
    "sparse.rounds=2",
    "sparse.examples=8",
]

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def order(zygote: Order) -> Run:
    """What becomes of a run in a child of the zygote."""

    def send(root: Path, options: list[str] = OPTIONS, **how: Any) -> dict[str, Any]:
        return zygote("run", "quickstart", *options, f"run.root={root}", "run.name=it", **how)

    return send


@pytest.fixture(scope="module")
def whole(
    order: Run, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], int, float]:
    """The undisturbed run: its facts, its number of file operations, its seconds of CPU time."""
    return undisturbed(order, tmp_path_factory, OPTIONS)


@pytest.fixture(scope="module")
def whole_federation(
    order: Run, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], int, float]:
    return undisturbed(order, tmp_path_factory, FEDERATION)


@pytest.fixture(scope="module")
def whole_sparse(
    order: Run, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], int, float]:
    return undisturbed(order, tmp_path_factory, SPARSE)


def undisturbed(
    order: Run, tmp_path_factory: pytest.TempPathFactory, options: list[str]
) -> tuple[dict[str, Any], int, float]:
    root = tmp_path_factory.mktemp("whole")
    order(root, options)  # draws and caches the synthetic benchmark
    again = tmp_path_factory.mktemp("again")
    report = order(again, options)
    assert report["status"] == 0
    assert facts(RunFolder(root / "it")) == facts(RunFolder(again / "it"))
    return facts(RunFolder(root / "it")), report["calls"], report["seconds"]


def test_killed_repeatedly(order: Run, whole: Any, tmp_path: Path) -> None:
    """Each session is killed three file operations later than the one before, until one ends."""
    expected, calls, _ = whole
    deaths = 0
    for die_at in range(1, 2 * calls, 3):
        if order(tmp_path, die_at=die_at)["status"] == 0:
            break
        deaths += 1
    assert deaths >= 10
    assert facts(RunFolder(tmp_path / "it")) == expected


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_killed_at_one_file_operation(order: Run, whole: Any, tmp_path: Path, share: float) -> None:
    expected, calls, _ = whole
    assert order(tmp_path, die_at=round(share * calls))["status"] == KILLED
    assert order(tmp_path)["status"] == 0
    assert facts(RunFolder(tmp_path / "it")) == expected


@pytest.mark.parametrize("nth", [1, 3])  # without an earlier one, and with some
def test_killed_in_the_middle_of_writing_a_checkpoint(
    order: Run, whole: Any, tmp_path: Path, nth: int
) -> None:
    assert order(tmp_path, half_write=nth)["status"] == KILLED
    assert order(tmp_path)["status"] == 0
    assert facts(RunFolder(tmp_path / "it")) == whole[0]


def kill_at_random_moments(order: Run, whole: Any, root: Path, options: list[str]) -> None:
    """Several times, the first time before the end, and then lets the run end."""
    _, _, seconds = whole
    moments = random.Random(0)
    while order(root, options, after=moments.uniform(0.1, 0.7) * seconds)["status"] == 0:
        shutil.rmtree(root / "it")  # faster than the undisturbed run: a CPU's speed varies
        seconds /= 2
    for _ in range(4):
        status = order(root, options, after=moments.uniform(0.1, 0.7) * seconds)["status"]
        assert status in (0, OUT_OF_TIME)
    assert order(root, options)["status"] == 0


def test_killed_at_random_moments(order: Run, whole: Any, tmp_path: Path) -> None:
    kill_at_random_moments(order, whole, tmp_path, OPTIONS)
    assert facts(RunFolder(tmp_path / "it")) == whole[0]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_makes_it_save_and_stop(order: Run, whole: Any, tmp_path: Path, name: str) -> None:
    expected, calls, _ = whole
    assert order(tmp_path, die_at=calls // 2, signal=name)["status"] == INTERRUPTED
    assert order(tmp_path)["status"] == 0
    folder = RunFolder(tmp_path / "it")
    assert facts(folder) == expected
    assert f"stopped by {name}" in folder.log.read_text()


def test_a_finished_run_is_not_changed(order: Run, tmp_path: Path) -> None:
    assert order(tmp_path)["status"] == 0
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    assert order(tmp_path)["status"] == 0
    assert before == {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}


def is_tidy(folder: RunFolder) -> bool:
    """Whether clients/ has exactly the files that checkpoints refer to, and no partial one."""
    states = Checkpoints(folder.checkpoints).states()
    needed = {name for state in states for name in state["clients"].values()}
    return needed == {path.name for path in (folder.path / "clients").iterdir()}


def test_a_federation_killed_repeatedly(order: Run, whole_federation: Any, tmp_path: Path) -> None:
    """Each session is killed some file operations later than the one before."""
    expected, calls, _ = whole_federation
    deaths = 0
    for die_at in range(2, 2 * calls, 7):
        if order(tmp_path, FEDERATION, die_at=die_at)["status"] == 0:
            break
        deaths += 1
    assert deaths >= 5
    assert facts(RunFolder(tmp_path / "it")) == expected
    assert is_tidy(RunFolder(tmp_path / "it"))


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_a_federation_killed_at_one_file_operation(
    order: Run, whole_federation: Any, tmp_path: Path, share: float
) -> None:
    expected, calls, _ = whole_federation
    assert order(tmp_path, FEDERATION, die_at=round(share * calls))["status"] == KILLED
    assert order(tmp_path, FEDERATION)["status"] == 0
    assert facts(RunFolder(tmp_path / "it")) == expected
    assert is_tidy(RunFolder(tmp_path / "it"))


@pytest.mark.parametrize(
    ("nth", "of"), [(2, "checkpoint"), (2, "client_states"), (4, "client_states")]
)
def test_a_federation_killed_in_the_middle_of_writing(
    order: Run, whole_federation: Any, tmp_path: Path, nth: int, of: str
) -> None:
    assert order(tmp_path, FEDERATION, half_write=nth, of=of)["status"] == KILLED
    assert order(tmp_path, FEDERATION)["status"] == 0
    assert facts(RunFolder(tmp_path / "it")) == whole_federation[0]
    assert is_tidy(RunFolder(tmp_path / "it"))


def test_a_federation_killed_at_random_moments(
    order: Run, whole_federation: Any, tmp_path: Path
) -> None:
    kill_at_random_moments(order, whole_federation, tmp_path, FEDERATION)
    assert facts(RunFolder(tmp_path / "it")) == whole_federation[0]
    assert is_tidy(RunFolder(tmp_path / "it"))


def test_a_sparse_federation_killed_repeatedly(
    order: Run, whole_sparse: Any, tmp_path: Path
) -> None:
    """Before its masks are written it calibrates again, since the cache is empty.

    Calibration writes nothing: a kill during it is a kill at the next file operation.
    """
    expected, calls, _ = whole_sparse
    folder = RunFolder(tmp_path / "it")
    deaths = {"without masks": 0, "with masks": 0, "in rounds": 0}
    for die_at in (*range(1, 12, 3), *range(12, 3 * calls, 6)):
        if not folder.masks.exists():
            shutil.rmtree(files.cache_dir() / "masks", ignore_errors=True)
        if order(tmp_path, SPARSE, die_at=die_at)["status"] == 0:
            break
        when = "in rounds" if folder.journal("metrics").read() else "with masks"
        deaths[when if folder.masks.exists() else "without masks"] += 1
    assert min(deaths.values()) >= 1, deaths
    assert facts(folder) == expected


def test_a_sparse_federation_killed_while_its_masks_are_written(
    order: Run, whole_sparse: Any, tmp_path: Path
) -> None:
    """At every file operation from the masks in the cache to their record."""
    expected, calls, _ = whole_sparse
    folder, cache = RunFolder(tmp_path / "it"), files.cache_dir() / "masks"

    def killed(die_at: int) -> tuple[bool, bool, bool]:
        """Where the masks are: in the cache, in the run's folder, in its record."""
        shutil.rmtree(folder.path, ignore_errors=True)
        shutil.rmtree(cache, ignore_errors=True)
        assert order(tmp_path, SPARSE, die_at=die_at)["status"] == KILLED
        cached = bool(list(cache.glob("[!.]*.safetensors")))
        return cached, folder.masks.exists(), (folder.path / "masks.json").exists()

    begun = next(die_at for die_at in range(6, calls, 5) if any(killed(die_at)))
    seen = set()
    for die_at in range(begun - 5, calls):
        stage = killed(die_at)
        if stage not in seen:
            seen.add(stage)
            assert order(tmp_path, SPARSE)["status"] == 0
            assert facts(folder) == expected
        if all(stage):
            break
    assert len(seen) == 4  # none, in the cache, in the run's folder, recorded


def test_workers_end_with_the_run_they_work_for(order: Run, tmp_path: Path) -> None:
    """A killed run leaves no process that would hold its lock, so it can be resumed."""
    options = [
        *TINY,
        *FEDERATED,
        "train.trainable=last_blocks:1",
        "engine=parallel",
        "engine.workers=2",
    ]
    report = order(tmp_path / "whole", options)
    assert report["status"] == 0
    assert order(tmp_path / "cut", options, die_at=round(0.6 * report["calls"]))["status"] == KILLED
    assert order(tmp_path / "cut", options)["status"] == 0
    whole, cut = (RunFolder(tmp_path / name / "it") for name in ("whole", "cut"))
    assert facts(cut) == facts(whole)
