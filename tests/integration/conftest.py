"""A world small enough to be lived through in a second."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedlens import cli
from fedlens.config.compose import compose
from fedlens.config.schema import Config
from fedlens.experiments.run import start
from fedlens.runtime.stop import Interrupted, StopRequest
from fedlens.store.run_folder import RunFolder

TINY = [
    "backbone.pretrained=false",
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


@pytest.fixture
def fedlens(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """The command with these words: exit code, what it printed, and what it said on stderr."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedlens", *words])
        code = 0
        try:
            cli.main()
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        said = capfd.readouterr()
        return code, said.out, said.err

    return call


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    """The quickstart in miniature; further overrides, and a folder for its runs."""

    def make(*overrides: str, root: str = "runs", experiment: str = "quickstart") -> Config:
        return compose(experiment, [*TINY, f"run.root={tmp_path / root}", *overrides])

    return make


def facts(folder: RunFolder) -> dict[str, Any]:
    """All that must be equal between two runs of the same config, bit for bit."""
    result = folder.result
    assert result is not None, f"{folder.name} is {folder.state()}: {folder.failure}"
    same = ("choice", "validation", "test", "facts", "unit", "units")
    return {
        "metrics": folder.journal("metrics").path.read_bytes(),
        "test_curve": folder.journal("test_curve").path.read_bytes(),
        "result": json.dumps({key: result[key] for key in same}),
    }


class Patience:
    """Asks the run to stop at its n-th safe point."""

    def __init__(self, points: int) -> None:
        self.left = points

    def check(self, request: StopRequest) -> None:
        self.left -= 1
        if self.left == 0:
            raise Interrupted("SIGTERM")


def interrupted_at(config: Config, points: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    patience = Patience(points)
    with monkeypatch.context() as patch:
        patch.setattr(StopRequest, "check", lambda self: patience.check(self))
        try:
            start(config)
        except Interrupted:
            return True
    return False
