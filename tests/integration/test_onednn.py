"""A run multiplies by what is faster on its machine, and keeps to it."""

from pathlib import Path

import pytest
import torch
import yaml

from fedlens.config.compose import load
from fedlens.config.identity import run_name
from fedlens.experiments.build import build
from fedlens.experiments.preparation.local_data import whole
from fedlens.experiments.run import resume, start
from fedlens.models.architectures import onednn
from fedlens.models.architectures.onednn import OneDnnLinear
from fedlens.runtime.stop import StopRequest
from fedlens.store.run_folder import runs
from tests.integration.conftest import FEDERATED, Tiny, facts, interrupted_at

pytestmark = pytest.mark.skipif(not onednn.available(), reason="this build of torch has no oneDNN")


def measured(monkeypatch: pytest.MonkeyPatch, *, faster: bool) -> None:
    monkeypatch.setattr(onednn, "is_faster", lambda: faster)


@pytest.mark.parametrize("faster", [True, False])
@pytest.mark.parametrize("asked", [None, True, False])
def test_a_run_takes_what_was_asked_for_or_what_is_faster(
    asked: bool | None, *, faster: bool, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(monkeypatch, faster=faster)
    config = tiny("train.epochs=1", *([] if asked is None else [f"onednn={str(asked).lower()}"]))
    folder = start(config)
    assert run_name(config) == run_name(tiny("train.epochs=1"))  # it is the same run
    assert load(folder.config).onednn is (faster if asked is None else asked)


@pytest.mark.parametrize("faster", [True, False])
def test_an_interrupted_run_keeps_to_its_choice(
    faster: bool, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = facts(start(tiny(*FEDERATED, f"onednn={str(faster).lower()}", root="whole")))
    for again in ("run", "resume"):
        measured(monkeypatch, faster=faster)
        config = tiny(*FEDERATED, root=again)
        assert interrupted_at(config, 6, monkeypatch)
        (folder,) = runs(Path(config.run.root))
        measured(monkeypatch, faster=not faster)  # on another machine
        assert facts(start(config) if again == "run" else resume(folder)) == expected
        assert load(folder.config).onednn is faster


def test_a_run_that_began_before_there_was_a_choice_goes_on_without(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(*FEDERATED, "onednn=false")
    assert interrupted_at(config, 6, monkeypatch)
    (folder,) = runs(Path(config.run.root))
    stored = yaml.safe_load(folder.config.read_text(encoding="utf-8"))
    del stored["onednn"]
    folder.config.write_text(yaml.safe_dump(stored), encoding="utf-8")
    measured(monkeypatch, faster=True)
    assert load(resume(folder).config).onednn is False


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        (["onednn=true"], True),
        (["onednn=false"], False),
        ([], False),  # whoever starts a run decides
        (["onednn=true", "train.trainable=linearised"], False),
        (["onednn=true", "train.compile=true"], False),
    ],
    ids=str,
)
def test_the_layers_of_the_backbone_are_changed(
    options: list[str], *, changed: bool, tiny: Tiny
) -> None:
    config = tiny(*options)
    device, stop = torch.device("cpu"), StopRequest()
    experiment = build(config, device, stop, whole(config))
    kinds = {type(one) is OneDnnLinear for one in experiment.backbone.modules()}
    assert (True in kinds) is changed


def test_what_is_cached_by_one_is_not_taken_for_the_other(tiny: Tiny) -> None:
    device, stop = torch.device("cpu"), StopRequest()
    configs = [tiny("onednn=true"), tiny("onednn=false")]
    keys = [build(one, device, stop, whole(one)).extractor.key("train", None) for one in configs]
    assert keys[0] != keys[1]


def test_results_differ_by_rounding_only(tiny: Tiny) -> None:
    losses = []
    for chosen in ("true", "false"):
        result = start(tiny(*FEDERATED, f"onednn={chosen}", root=chosen)).result
        assert result is not None
        losses.append(result["validation"]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
