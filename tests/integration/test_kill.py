"""A run killed at any moment and resumed ends as if it had never been interrupted."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedlens.experiments.records import RunFolder
from tests.integration.conftest import TINY, facts

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")

KILLED, INTERRUPTED = -9, 75
OPTIONS = [
    *TINY,
    "head.dropout=0.2",
    "evaluate.test_curve=true",
    "checkpoint.minutes=0.0001",  # also in the middle of epochs
    "train.schedule.name=linear",
]

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def order() -> Iterator[Run]:
    """Sends one order to the zygote and returns its report."""
    zygote = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("zygote.py"))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip

    def send(root: Path, **how: Any) -> dict[str, Any]:
        argv = ["run", "quickstart", *OPTIONS, f"run.root={root}", "run.name=it"]
        assert zygote.stdin is not None
        assert zygote.stdout is not None
        zygote.stdin.write(json.dumps({"argv": argv, **how}) + "\n")
        zygote.stdin.flush()
        answer: dict[str, Any] = json.loads(zygote.stdout.readline())
        return answer

    yield send
    assert zygote.stdin is not None
    assert zygote.stdout is not None
    zygote.stdin.close()
    zygote.wait(timeout=10)
    zygote.stdout.close()


@pytest.fixture(scope="module")
def whole(
    order: Run, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], int, float]:
    """The run nobody disturbed: its facts, its number of file operations, its seconds."""
    root = tmp_path_factory.mktemp("whole")
    order(root)  # draws and caches the embedded world
    started = time.monotonic()
    again = tmp_path_factory.mktemp("again")
    report = order(again)
    seconds = time.monotonic() - started
    assert report["status"] == 0
    assert facts(RunFolder(root / "it")) == facts(RunFolder(again / "it"))
    return facts(RunFolder(root / "it")), report["calls"], seconds


def test_killed_again_and_again(order: Run, whole: Any, tmp_path: Path) -> None:
    """Each session dies one file operation later than the one before, until one gets through."""
    expected, calls, _ = whole
    deaths = 0
    for die_at in range(1, 2 * calls):
        if order(tmp_path, die_at=die_at)["status"] == 0:
            break
        deaths += 1
    assert deaths >= 15
    assert facts(RunFolder(tmp_path / "it")) == expected


@pytest.mark.parametrize("share", [n / 10 for n in range(1, 10)])
def test_killed_at_one_file_operation(order: Run, whole: Any, tmp_path: Path, share: float) -> None:
    expected, calls, _ = whole
    assert order(tmp_path, die_at=round(share * calls))["status"] == KILLED
    assert order(tmp_path)["status"] == 0
    assert facts(RunFolder(tmp_path / "it")) == expected


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_killed_in_the_middle_of_writing_a_checkpoint(
    order: Run, whole: Any, tmp_path: Path, nth: int
) -> None:
    assert order(tmp_path, half_write=nth)["status"] == KILLED
    assert order(tmp_path)["status"] == 0
    assert facts(RunFolder(tmp_path / "it")) == whole[0]


@pytest.mark.parametrize("seed", [0, 1])
def test_killed_at_random_moments(order: Run, whole: Any, tmp_path: Path, seed: int) -> None:
    expected, _, seconds = whole
    moments = random.Random(seed)
    statuses = [
        order(tmp_path, delay=moments.uniform(0.1, 0.7) * seconds)["status"] for _ in "12345"
    ]
    assert KILLED in statuses
    assert order(tmp_path)["status"] == 0
    assert facts(RunFolder(tmp_path / "it")) == expected


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_asked_to_stop_it_saves_and_says_how_to_go_on(
    order: Run, whole: Any, tmp_path: Path, name: str
) -> None:
    expected, _, seconds = whole
    codes = set()
    for share in (0.6, 0.4, 0.5, 0.3):
        codes.add(order(tmp_path, delay=share * seconds, signal=name)["status"])
        if INTERRUPTED in codes:
            break
    assert INTERRUPTED in codes
    assert order(tmp_path)["status"] == 0
    folder = RunFolder(tmp_path / "it")
    assert facts(folder) == expected
    assert f"stopped by {name}" in folder.log.read_text()


def test_a_finished_run_is_left_alone(order: Run, tmp_path: Path) -> None:
    assert order(tmp_path)["status"] == 0
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    assert order(tmp_path)["status"] == 0
    assert before == {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
