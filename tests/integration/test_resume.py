"""Interrupted at any step, under any option, a run goes on to the same bits."""

import shutil
from pathlib import Path

import pytest
import torch

from fedlens import files
from fedlens.errors import FedlensError
from fedlens.experiments.checkpoint import TENSORS
from fedlens.experiments.config import Config
from fedlens.experiments.records import RunFolder
from fedlens.experiments.run import resume, start
from fedlens.experiments.signals import Interrupted, StopRequest
from tests.integration.conftest import Tiny, facts

MODES = {
    "plain": [],
    "strong augmentation": ["augment=strong"],
    "dropout, smoothing, clipping": [
        "head.dropout=0.3", "train.label_smoothing=0.1", "train.clip_norm=1", "train.nesterov=true",
    ],
    "micro-batches": ["train.micro_batch=20"],
    "last block": ["train.what=last_blocks:1"],
    "frozen blocks": ["backbone.freeze_blocks=2"],
    "head on features": ["train=head", "augment=none"],
    "head on images": ["train=head"],
    "ridge, then full": ["head=ridge"],
    "ridge alone": ["head=ridge", "train.what=head", "augment=none"],
    "class means alone": ["head=class_means", "train.what=head", "augment=none"],
    "rare evaluation, last selected": [
        "evaluate.every=2", "checkpoint.every=2", "evaluate.select=last",
    ],
    "no validation": ["data.validation=0", "evaluate.select=last"],
}  # fmt: skip


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


@pytest.mark.parametrize("mode", MODES)
def test_interrupted_and_resumed(mode: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    common = [*MODES[mode], "train.epochs=2", "evaluate.test_curve=true"]
    expected = facts(start(tiny(*common, root="whole")))
    cut = tiny(*common, root="cut")
    stops = sum(interrupted_at(cut, points, monkeypatch) for points in (1, 3, 4, 6))
    assert stops >= 1
    assert facts(start(cut)) == expected


def test_a_damaged_checkpoint_costs_time_not_truth(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = facts(start(tiny(root="whole")))
    cut = tiny(root="cut")
    assert interrupted_at(cut, 16, monkeypatch)
    folder = next(RunFolder(p.parent) for p in Path(cut.run.root).glob("*/config.yaml"))
    newest = max(folder.checkpoints.iterdir())
    (newest / TENSORS).write_bytes(b"nonsense")
    assert facts(resume(folder)) == expected
    assert "is damaged" in folder.log.read_text()


def test_early_stopping_is_remembered(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["train.epochs=30", "train.lr=1e-12", "train.early_stopping=2"]
    folder = start(tiny(*options, root="whole"))
    assert folder.result is not None
    assert folder.result["epochs"] == 3
    cut = tiny(*options, root="cut")
    for points in (9, 12):
        interrupted_at(cut, points, monkeypatch)
    assert facts(start(cut)) == facts(folder)


def test_other_weights_or_another_config_are_not_gone_on_with(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny("run.name=it")
    assert interrupted_at(config, 8, monkeypatch)
    with pytest.raises(FedlensError, match="another config"):
        start(tiny("run.name=it", "train.lr=0.01"))
    folder = RunFolder(Path(config.run.root) / "it")
    manifest = folder.manifest
    assert manifest is not None
    folder.write("manifest", {**manifest, "inputs": {"data": "other", "weights": None}})
    with pytest.raises(FedlensError, match="other data than are here now"):
        start(config)
    assert folder.state() == "failed"


def test_the_run_records_every_session(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny()
    assert interrupted_at(config, 8, monkeypatch)
    folder = start(config)
    assert folder.manifest is not None
    assert len(folder.manifest["sessions"]) == 2
    session = folder.manifest["sessions"][0]
    assert session["threads"] == 1
    assert {"torch", "timm", "fedlens"} <= session["versions"].keys()


def test_a_compiled_model_trains_to_nearly_the_same(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = start(tiny("run.name=plain"))
    compiled = []

    def compile_without_a_compiler(model: torch.nn.Module) -> object:
        compiled.append(model)
        return torch_compile(model, backend="eager")

    torch_compile = torch.compile
    monkeypatch.setattr(torch, "compile", compile_without_a_compiler)
    fast = start(tiny("train.compile=true", "run.name=compiled"))
    assert len(compiled) == 1
    losses = [[r["train"]["loss"] for r in f.journal("metrics").read()] for f in (plain, fast)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_features_of_another_seed_s_network_are_not_taken(tiny: Tiny) -> None:
    head = ["train=head", "augment=none", "evaluate.select=last"]
    choices = []
    for seed, root in ((0, "a"), (1, "b"), (1, "c")):
        folder = start(tiny(*head, f"seed={seed}", root=root))
        choices.append(folder.result["choice"]["parameters"] if folder.result else None)
        if root == "b":
            shutil.rmtree(files.cache_dir() / "features")
    assert choices[0] != choices[1] == choices[2]


def test_a_validation_split_of_nothing_is_refused(tiny: Tiny) -> None:
    with pytest.raises(FedlensError, match="none at all"):
        start(tiny("data.validation=0.0001"))
