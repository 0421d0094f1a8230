"""A run interrupted at any step, under any option, resumes and ends with the same bits."""

import shutil
from pathlib import Path

import pytest
import torch

from fedlens import files
from fedlens.config.compose import load
from fedlens.errors import FedlensError
from fedlens.experiments.run import resume, start
from fedlens.store.checkpoints import TENSORS, Checkpoints
from fedlens.store.run_folder import RunFolder, runs
from tests.integration.conftest import FEDERATED, ON_FEATURES, Tiny, facts, interrupted_at

FEW = ["data.train_per_class=2", "data.test_per_class=1"]
MODES = {
    "plain": [],
    "strong augmentation": ["augment=strong"],
    "dropout, smoothing, clipping": [
        "head.dropout=0.3", "train.label_smoothing=0.1", "train.clip_norm=1",
        "train.optimizer.nesterov=true",
    ],
    "micro-batches": ["train.micro_batch=20"],
    "last block": ["train.trainable=last_blocks:1"],
    "biases and norms": ["train.trainable=biases_and_norms"],
    "LoRA": ["train.trainable=lora"],
    "BatchNorm trained": [
        "backbone=timm:test_resnet", "backbone.resolution=32", "backbone.pretrained=false",
    ],
    "frozen blocks": ["backbone.freeze_blocks=2"],
    "head on features": ["train=head", "augment=none"],
    "head on images": ["train=head"],
    "ridge, then full": ["head=ridge"],
    "ridge alone": ["head=ridge", "train.trainable=head", "augment=none"],
    "class means alone": ["head=class_means", "train.trainable=head", "augment=none"],
    "rare evaluation, last selected": [
        "evaluate.every=2", "checkpoint.every=2", "evaluate.select=last",
    ],
    "shortened epochs": ["train.steps_per_epoch=3"],
    "no validation": ["data.validation=0", "evaluate.select=last"],
    "sparse": ["head=ridge", "sparse.density=0.1", "sparse.examples=8", "train.clip_norm=1"],
    "AdamW": ["train.optimizer=adamw", "train.lr=0.001", "train.optimizer.weight_decay=0.1"],
    "AdamW, sparse": [
        "train.optimizer=adamw", "train.lr=0.001", "sparse.density=0.1", "head=ridge",
        "sparse.rule=random",
    ],
}  # fmt: skip

RESNET = ["backbone=timm:test_resnet", "backbone.resolution=32", "backbone.pretrained=false"]
FEDERATIONS = {
    "fedavg": [],
    "LoRA": ["head=ridge", "train.trainable=lora", "train.trainable.rank=2"],
    "LoRA, products averaged": [
        "head=ridge", "train.trainable=lora", "train.trainable.average=products",
    ],
    "linearised": ["head=ridge", "train.trainable=linearised"],
    "BatchNorm averaged": RESNET,
    "BatchNorm local": [*RESNET, "backbone.batch_norm=local"],
    "fedprox": [*ON_FEATURES, "algorithm=fedprox", "algorithm.proximal=0.5"],
    "scaffold": ["algorithm=scaffold", "partition=classes", "partition.classes_per_client=25"],
    "scaffold on features": [*ON_FEATURES, "algorithm=scaffold", "checkpoint.every=2"],
    "scaffold on features, one by one": [
        *ON_FEATURES, "algorithm=scaffold", "engine.vectorise=false",
    ],
    "fedavgm": [*ON_FEATURES, "algorithm=fedavgm"],
    "fedadam": [*ON_FEATURES, "algorithm=fedadam"],
    "fedyogi": [*ON_FEATURES, "algorithm=fedyogi"],
    "fednova with stragglers": [
        *ON_FEATURES, "algorithm=fednova", "federated.min_local_steps=1",
        "federated.local_steps=4",
    ],
    "median": [*ON_FEATURES, "algorithm=median"],
    "trimmed mean": [*ON_FEATURES, "algorithm=trimmed_mean", "algorithm.aggregator.trim=0.34"],
    "norm clipping": [
        *ON_FEATURES, "algorithm=norm_clipping", "algorithm.aggregator.clip_norm=0.1",
    ],
    "cyclic sampling": [
        *ON_FEATURES, "algorithm=cyclic", "federated.clients=6", "federated.participation=0.5",
    ],
    "clients that drop out": [*ON_FEATURES, "federated.dropout=0.4", "algorithm=scaffold"],
    "rare evaluation and checkpoints": [*ON_FEATURES, "evaluate.every=2", "checkpoint.every=5"],
    "ridge, then last block": ["head=ridge", "train.trainable=last_blocks:1"],
    "sparse, masks voted by clients": [
        "head=ridge", "sparse.density=0.1", "sparse.examples=8", "sparse.rounds=1",
        "sparse.source=clients", "sparse.voting=majority", "algorithm=fedadam",
    ],
    "AdamW, sparse": [
        "train.optimizer=adamw", "train.lr=0.001", "head=ridge", "sparse.density=0.1",
        "sparse.rule=lowest_magnitude",
    ],
    "workers": [
        "train.trainable=last_blocks:1",
        "algorithm=scaffold", "engine=parallel", "engine.threads_per_client=1", "engine.workers=2",
    ],
    "head solved again": [
        "train.trainable=last_blocks:1", "head=ridge", "federated.refit_head=2",
        "algorithm.average=last",
    ],
    "trained under a head on fewer blocks, prefix cached": [
        "backbone.freeze_blocks=2", "augment=none", "train.trainable=full", "head=deep_ridge",
        "head.layers=4", "head.train_layers=0", "federated.refit_head=2",
        "federated.refit_examples=5", "evaluate.select=last",
    ],
    "GHBM": [*ON_FEATURES, "algorithm=ghbm", "algorithm.correction.tau=2"],
    "GHBM, sparse": [
        "head=ridge", "sparse.density=0.1", "sparse.rule=random", "algorithm=ghbm",
        "algorithm.average=last",
    ],
    "FedCM, workers": [
        "train.trainable=last_blocks:1", "algorithm=fedcm", "engine=parallel",
        "engine.threads_per_client=1", "engine.workers=2",
    ],
    "FedDyn": [*ON_FEATURES, "algorithm=feddyn", "algorithm.correction.alpha=0.1"],
    "exponential average, BatchNorm averaged": [*RESNET, "algorithm.average=exponential"],
    "exponential average, sparse, last selected": [
        "head=ridge", "sparse.density=0.1", "sparse.rule=random", "evaluate.select=last",
        "algorithm.average=exponential", "algorithm=fedadam", "algorithm.server.momentum=0",
        "train.optimizer=adamw", "train.lr=0.001",
    ],
    "chain": [
        "train.trainable=last_blocks:1", "algorithm=chain", "federated.clients=6",
        "federated.participation=0.5", "algorithm.carry_momentum=true", "algorithm.proximal=0.1",
        "algorithm.proximal_to=round",
    ],
    "chain with measured controls": [
        "train.trainable=last_blocks:1", "algorithm=scaffold", "algorithm.sampling=chain",
        "algorithm.measure_controls=true", "federated.clients=6", "federated.participation=0.5",
    ],
    "two chains, BatchNorm averaged": [
        *RESNET, "algorithm=chain", "algorithm.sampling.chains=2", "federated.clients=4",
        "federated.participation=1",
    ],
    "chains on features, clients drop out": [
        *ON_FEATURES, "algorithm=chain", "algorithm.sampling.order=opposite",
        "federated.clients=4", "federated.participation=0.5", "federated.dropout=0.3",
        "algorithm.carry_momentum=true",
    ],
}  # fmt: skip

# Safe points at which a mode is stopped, if it has so many; modes take turns.
EPOCH_STOPS = [(1, 4), (3, 6), (4, 6), (3, 4)]
# With three clients, validation and a test curve, a round has five safe points.
STOPS = [(6, 2), (4, 7), (5, 8), (7, 3)]


def test_a_shortened_epoch_has_the_configured_number_of_steps(tiny: Tiny) -> None:
    folder = start(tiny("train.epochs=2", "train.steps_per_epoch=3"))
    assert [line["steps"] for line in folder.journal("metrics").read()] == [3, 3]


@pytest.mark.parametrize("mode", MODES)
def test_interrupted_and_resumed(mode: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    common = [*MODES[mode], *FEW, "train.epochs=2", "evaluate.test_curve=true"]
    expected = facts(start(tiny(*common, root="whole")))
    cut = tiny(*common, root="cut")
    points = EPOCH_STOPS[list(MODES).index(mode) % len(EPOCH_STOPS)]
    stops = sum(interrupted_at(cut, one, monkeypatch) for one in points)
    assert stops >= 1
    assert facts(start(cut)) == expected


@pytest.mark.parametrize("mode", FEDERATIONS)
def test_a_federation_interrupted_and_resumed(
    mode: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stops between clients of a round, in its evaluation, and on the test curve."""
    common = [*FEDERATED, *FEDERATIONS[mode], *FEW, "evaluate.test_curve=true", "run.name=it"]
    expected = facts(start(tiny(*common, root="whole")))
    cut = tiny(*common, root="cut")
    folder = RunFolder(Path(cut.run.root) / "it")
    stops = 0
    for points in STOPS[list(FEDERATIONS).index(mode) % len(STOPS)]:
        stops += interrupted_at(cut, points, monkeypatch)
        present, needed = client_files(folder)
        assert present >= needed
    assert stops >= 2
    assert facts(start(cut)) == expected
    present, needed = client_files(folder)
    assert present == needed
    keeping = {"algorithm=scaffold", "algorithm=feddyn", "backbone.batch_norm=local"}
    remembers = keeping & set(common)
    assert bool(present) == bool(remembers)


def client_files(folder: RunFolder) -> tuple[set[str], set[str]]:
    """The files in clients/, and those that the checkpoints refer to."""
    states = Checkpoints(folder.checkpoints).states()
    needed = {name for state in states for name in state["clients"].values()}
    return {path.name for path in (folder.path / "clients").glob("*")}, needed


def test_a_damaged_checkpoint_does_not_change_the_result(
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


def test_a_damaged_checkpoint_leaves_the_client_states_intact(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = [*FEDERATED, *ON_FEATURES, "algorithm=scaffold", "run.name=it"]
    expected = facts(start(tiny(*common, root="whole")))
    cut = tiny(*common, root="cut")
    assert interrupted_at(cut, 10, monkeypatch)  # in round 3
    folder = RunFolder(Path(cut.run.root) / "it")
    (max(folder.checkpoints.iterdir()) / TENSORS).write_bytes(b"nonsense")
    assert facts(resume(folder)) == expected
    log = folder.log.read_text()
    assert "is damaged" in log
    assert "resuming from checkpoint round-000001" in log


def test_a_lost_client_state_is_named(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any state there is no checkpoint to use, so the run starts from its beginning."""
    common = [*FEDERATED, *ON_FEATURES, "algorithm=scaffold", "federated.participation=1"]
    expected = facts(start(tiny(*common, root="whole")))
    cut = tiny(*common, root="cut")
    assert interrupted_at(cut, 9, monkeypatch)
    (folder,) = runs(Path(cut.run.root))
    for path in (folder.path / "clients").iterdir():
        path.write_bytes(b"nonsense")
    assert facts(resume(folder)) == expected
    log = folder.log.read_text()
    assert "client-0-round-000001.safetensors is lost or damaged" in log
    assert "starts again from its beginning" in log


def test_a_federation_may_resume_under_another_engine(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = [*FEDERATED, "train.trainable=last_blocks:1"]
    expected = facts(start(tiny(*common, root="whole")))
    cut = tiny(*common, root="cut")
    assert interrupted_at(cut, 7, monkeypatch)
    (folder,) = runs(Path(cut.run.root))
    assert facts(resume(folder, ["engine=parallel", "engine.workers=2"])) == expected
    stored = load(folder.config).engine
    assert (stored.name, stored.workers, stored.threads_per_client) == ("parallel", 2, 1)


def test_early_stopping_survives_an_interruption(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["train.epochs=30", "train.lr=1e-12", "train.early_stopping=2"]
    folder = start(tiny(*options, root="whole"))
    assert folder.result is not None
    assert folder.result["units"] == 3
    cut = tiny(*options, root="cut")
    for points in (9, 12):
        interrupted_at(cut, points, monkeypatch)
    assert facts(start(cut)) == facts(folder)


def test_other_data_or_another_config_are_refused(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny("run.name=it")
    assert interrupted_at(config, 8, monkeypatch)
    with pytest.raises(FedlensError, match="a different config"):
        start(tiny("run.name=it", "train.lr=0.01"))
    folder = RunFolder(Path(config.run.root) / "it")
    manifest = folder.manifest
    assert manifest is not None
    folder.write("manifest", {**manifest, "inputs": {"data": "other", "weights": None}})
    with pytest.raises(FedlensError, match="it began with different data"):
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


def test_a_compiled_model_trains_to_nearly_the_same_losses(
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


def test_cached_features_of_another_seeds_network_are_not_used(tiny: Tiny) -> None:
    head = ["train=head", "augment=none", "evaluate.select=last"]
    choices = []
    for seed, root in ((0, "a"), (1, "b"), (1, "c")):
        folder = start(tiny(*head, f"seed={seed}", root=root))
        choices.append(folder.result["choice"]["parameters"] if folder.result else None)
        if root == "b":
            shutil.rmtree(files.cache_dir() / "features")
    assert choices[0] != choices[1] == choices[2]


def test_an_empty_validation_split_is_refused(tiny: Tiny) -> None:
    with pytest.raises(FedlensError, match="rounds to no image"):
        start(tiny("data.validation=0.0001"))
