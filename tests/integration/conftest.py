"""Runs on the synthetic benchmark that are small enough to take a second."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedlens import cli, files
from fedlens.config.compose import compose
from fedlens.config.schema import Config
from fedlens.experiments.run import start
from fedlens.federated.engines import rows
from fedlens.runtime.stop import Interrupted, StopRequest
from fedlens.store.run_folder import RunFolder

TINY = [
    "backbone.pretrained=false",
    "backbone.resolution=16",  # four patches
    "data.train_per_class=4",
    "data.test_per_class=2",
    "train.epochs=3",
    "train.batch_size=64",
    "train.schedule.warmup=0.1",
    "train.lr=0.05",
    "threads=1",
]
FEDERATED = [
    "federated.clients=5",
    "federated.participation=0.6",
    "federated.rounds=3",
    "federated.local_steps=2",
    "train.batch_size=16",
]
ON_FEATURES = ["train=head", "augment=none"]

Tiny = Callable[..., Config]
Call = Callable[..., tuple[int, str, str]]
Order = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module", autouse=True)
def _short_probes() -> Iterator[None]:
    """Which engine is faster is measured once, not a dozen times: either gives the same bits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "PROBES", 1)
        yield


@pytest.fixture
def fedlens(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """Runs the command with these words and returns its exit code, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedlens", *words])
        code = 0
        try:
            cli.main()
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        printed = capfd.readouterr()
        return code, printed.out, printed.err

    return call


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Order]:
    """Sends one order to zygote.py and returns its report: what becomes of these words of a command
    line in a process that is killed on request.

    A module that is None cannot be imported, so Flower is to it as if it were not installed.
    """
    path = Path(__file__).with_name("zygote.py")
    program = f"""
import runpy, sys
sys.modules["flwr"] = sys.modules["ray"] = None
runpy.run_path({str(path)!r}, run_name="__main__")
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tmp_path_factory.mktemp("zygote"),
        env=os.environ | {"COLUMNS": "200"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def send(*argv: str, **how: Any) -> dict[str, Any]:
        process.stdin.write(json.dumps({"argv": argv, **how}) + "\n")
        process.stdin.flush()
        report: dict[str, Any] = json.loads(process.stdout.readline())
        return report

    yield send
    process.stdin.close()
    process.wait(timeout=60)  # it ends slowly on a busy machine
    process.stdout.close()


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    """A smaller quickstart, with further overrides, in a folder of this test."""

    def make(*overrides: str, root: str = "runs", experiment: str = "quickstart") -> Config:
        return compose(experiment, [*TINY, f"run.root={tmp_path / root}", *overrides])

    return make


def empty_cache(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """A cache with nothing in it but the images of the synthetic benchmark, which take seconds to
    draw."""
    images = files.cache_dir() / "synthetic"
    folder.mkdir()
    (folder / "synthetic").symlink_to(images)
    patch.setenv("FEDLENS_CACHE", str(folder))


def facts(folder: RunFolder) -> dict[str, Any]:
    """What must be equal, bit for bit, between two runs of the same config."""
    result = folder.result
    assert result is not None, f"{folder.name} is {folder.state()}: {folder.failure}"
    same = ("choice", "validation", "test", "facts", "unit", "units")
    return {
        "metrics": folder.journal("metrics").path.read_bytes(),
        "test_curve": folder.journal("test_curve").path.read_bytes(),
        "result": json.dumps({key: result[key] for key in same}),
    }


class StopAfter:
    """Interrupts a run at its n-th safe point."""

    def __init__(self, points: int) -> None:
        self.left = points

    def check(self, request: StopRequest) -> None:
        self.left -= 1
        if self.left == 0:
            raise Interrupted("SIGTERM")


def interrupted_at(config: Config, points: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    stop_after = StopAfter(points)
    with monkeypatch.context() as patch:
        patch.setattr(StopRequest, "check", lambda self: stop_after.check(self))
        try:
            start(config)
        except Interrupted:
            return True
    return False
