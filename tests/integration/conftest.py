"""A world small enough to be lived through in a second."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedlens.experiments.compose import compose
from fedlens.experiments.config import Config
from fedlens.experiments.records import RunFolder

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

Tiny = Callable[..., Config]


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
    same = ("choice", "validation", "test", "facts", "epochs")
    return {
        "metrics": folder.journal("metrics").path.read_bytes(),
        "test_curve": folder.journal("test_curve").path.read_bytes(),
        "result": json.dumps({key: result[key] for key in same}),
    }
