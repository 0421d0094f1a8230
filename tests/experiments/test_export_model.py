"""A model by timm's names: timm gives the same logits, or it is said that it cannot."""

import json
from typing import Any

import pytest
import timm
import torch

from fedlens.config.compose import compose
from fedlens.experiments.export_model import _named, _timm_agrees, _timm_form, _weights
from fedlens.models import heads
from fedlens.models.architectures import backbones
from fedlens.models.classifier import Classifier
from fedlens.store import exported_model

# timm's classifier, and whether it is all that follows the features
FORMS = {
    "test_vit": (("head",), True),
    "test_resnet": (("fc",), True),
    "test_convnext": (("head.fc",), True),
    "test_efficientnet": (("classifier",), True),
    "test_nfnet": (("head.fc",), True),
    "resnetv2_18": (("head.fc",), True),  # a 1×1 convolution
    "deit_tiny_distilled_patch16_224": (("head", "head_dist"), True),
    "levit_128s": (("head.linear", "head_dist.linear"), False),  # normalises before it
}


def classifier_of(name: str) -> tuple[Classifier, int]:
    row = backbones.find(f"timm:{name}")
    resolution = row.resolution if "224" in name or name == "levit_128s" else 64
    backbone = backbones.create(row, resolution=resolution)
    head = heads.linear(backbones.width(backbone), 7, seed=0)
    model = Classifier(backbone, head).eval()
    draw = torch.Generator().manual_seed(0)
    for key, value in model.state_dict().items():
        if key.endswith("running_mean"):
            value.uniform_(-0.5, 0.5, generator=draw)
    return model, resolution


@pytest.mark.parametrize("name", FORMS)
def test_timm_gives_the_same_logits_or_is_known_not_to(name: str) -> None:
    model, resolution = classifier_of(name)
    form = _timm_form(model.backbone, resolution)
    assert form is not None
    assert form.architecture == name
    classifier, agrees = FORMS[name]
    assert form.classifier == classifier
    tensors = _named(model, form.classifier)
    assert _timm_agrees(form, tensors, model, resolution) == agrees
    if agrees:
        other = timm.create_model(name, num_classes=7, **form.arguments).eval()
        other.load_state_dict(tensors)
        images = torch.randn(3, 3, resolution, resolution)
        with torch.inference_mode():
            assert torch.allclose(other(images), model(images), atol=1e-4)


def test_other_parameters_do_not_agree() -> None:
    model, resolution = classifier_of("test_vit")
    form = _timm_form(model.backbone, resolution)
    assert form is not None
    tensors = _named(model, form.classifier)
    model.head.weight.data *= 2
    assert not _timm_agrees(form, tensors, model, resolution)


def weights_of(*overrides: str) -> dict[str, Any]:
    config = compose("centralized", list(overrides))
    row = backbones.find(config.backbone)
    cfg = getattr(backbones.create(row), "pretrained_cfg", {})
    return _weights(config, row, dict(cfg), "1f0c")


@pytest.mark.slow
def test_the_licence_is_that_of_the_weights() -> None:
    dino = weights_of("backbone=dino_vits16")
    assert (dino["license"], dino["repository"]) == (
        "apache-2.0",
        "timm/vit_small_patch16_224.dino",
    )
    assert weights_of("backbone=timm:swin_tiny_patch4_window7_224.ms_in1k")["license"] == "mit"
    assert weights_of("backbone=timm:vit_tiny_patch16_224.augreg_in21k")["license"] == "apache-2.0"
    pico = weights_of("backbone=vit_pico")
    assert (pico["license"], pico["repository"]) == ("apache-2.0", None)
    assert "fedlens" in pico["source"]
    own = weights_of("backbone=dino_vits16", "backbone.weights=/home/me/mine.pth")
    assert (own["license"], own["source"]) == (None, "the file mine.pth")  # a file may be anything
    scratch = weights_of("backbone=dino_vits16", "backbone.pretrained=false")
    assert (scratch["license"], scratch["source"], scratch["repository"]) == (None, None, None)


def test_a_model_that_timm_cannot_build_is_loaded_by_fedlens(tmp_path: Any) -> None:
    model, resolution = classifier_of("levit_128s")
    config = {
        "label_names": list("abcdefg"),
        "pretrained_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3},
        "fedlens": {
            "run": "one",
            "backbone": "timm:levit_128s.fb_dist_in1k",
            "classifier": ["head"],
            "resolution": resolution,
        },
    }
    exported_model.write(tmp_path / "model", _named(model, ("head",)), config, "")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["fedlens"]["schema"] == 1
    images = torch.randn(2, 3, resolution, resolution)
    with torch.inference_mode():
        assert torch.equal(exported_model.load_model(tmp_path / "model")(images), model(images))
