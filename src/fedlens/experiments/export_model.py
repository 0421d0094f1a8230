"""The whole model of a finished run, for the world outside: tensors by timm's names, and facts.

A checkpoint holds what a run has trained. The rest, with BatchNorm's statistics, comes from the
backbone the run started from.
"""

import shlex
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import PurePath
from typing import Any, cast

import timm
import torch
from torch import nn

from fedlens import params, rng
from fedlens.config import compose
from fedlens.config.schema import Config
from fedlens.errors import FedlensError
from fedlens.experiments.build import reading
from fedlens.experiments.loaded_run import LoadedRun
from fedlens.experiments.preparation.local_data import dataset
from fedlens.experiments.preparation.provenance import setting
from fedlens.models import heads
from fedlens.models.architectures import backbones
from fedlens.models.architectures.backbones import Backbone
from fedlens.models.classifier import Classifier
from fedlens.models.deep_features import deepen
from fedlens.registry import backbone as backbone_registry
from fedlens.store.analysis_records import require_result

HEAD, OTHER_HEAD = "head", "fedlens_head"  # names of the head in a model that timm does not know
TOLERANCE = 1e-4  # of logits, which other kernels may compute in another order


@dataclass(frozen=True)
class WholeModel:
    tensors: dict[str, torch.Tensor]  # by their names in the timm model, where there is one
    config: dict[str, Any]  # of config.json


@dataclass(frozen=True)
class TimmForm:
    """How timm builds the same model: its name, its arguments, and where its classifier is."""

    architecture: str
    arguments: dict[str, Any]
    classifier: tuple[str, ...]


def whole_model(run: LoadedRun, config: Config) -> WholeModel:
    """The model that was tested, and all that config.json says of it."""
    if run.experiment.model.origin:
        raise FedlensError(
            f"{run.folder.name} trained a first-order expansion of its backbone, which no plain "
            "model computes: export a run with another train.trainable."
        )
    row = backbones.find(config.backbone)
    resolution = config.backbone.resolution
    assert resolution is not None  # a run's own config has it
    model = _plain_model(run, config, row, resolution)
    form = _timm_form(model.backbone, resolution)
    tensors = _named(model, form.classifier) if form else {}
    loadable = form is not None and _timm_agrees(form, tensors, model, resolution)
    if form is None or not loadable:
        taken = any(name.startswith(f"{HEAD}.") for name in model.backbone.state_dict())
        own = OTHER_HEAD if taken else HEAD
        form = TimmForm(form.architecture if form else row.name, {}, (own,))
        tensors = _named(model, form.classifier)
    return WholeModel(tensors, _config(run, config, row, model, form, loadable=loadable))


def _plain_model(run: LoadedRun, config: Config, row: Backbone, resolution: int) -> Classifier:
    """A new model with the run's parameters, and with the buffers of its backbone.

    `tuned` has the parameters of the model that was trained, which is the head alone where it was
    trained on features; the others are the backbone's own.
    """
    known = {
        f"backbone.{key}": value for key, value in run.experiment.backbone.state_dict().items()
    }
    known |= run.tuned
    classes, width = known["head.weight"].shape
    head = heads.linear(width, classes, seed=0)
    backbone = backbones.create(row, resolution=resolution)
    deepen(backbone, reading(config), resolution=resolution)
    model = Classifier(backbone, head)
    state = {name: known[name] for name in model.state_dict() if name in known}
    if fault := params.mismatch(model.state_dict(), state):
        raise FedlensError(f"The model of {run.folder.name} is not complete: {fault}.")
    model.load_state_dict(state)
    return model.eval()


def _timm_form(backbone: nn.Module, resolution: int) -> TimmForm | None:
    """None if the backbone was not built by timm's `create_model`."""
    cfg = getattr(backbone, "pretrained_cfg", None)
    if not cfg or not cfg.get("architecture"):
        return None
    classifier = cfg.get("classifier") or HEAD
    return TimmForm(
        architecture=cfg["architecture"],
        arguments={"img_size": resolution} if cfg.get("fixed_input_size") else {},
        classifier=(classifier,) if isinstance(classifier, str) else tuple(classifier),
    )


def _named(model: Classifier, classifier: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The model's tensors; a model with several classifiers averages them, so each is the head."""
    tensors = dict(model.backbone.state_dict())
    for name in classifier:
        for part, value in model.head.state_dict().items():
            tensors[f"{name}.{part}"] = value.clone()
    return tensors


def _timm_agrees(
    form: TimmForm, tensors: dict[str, torch.Tensor], model: Classifier, resolution: int
) -> bool:
    """Whether timm's model takes these tensors and gives the same logits.

    It does not where timm has more layers before its classifier than in its features. Shapes are
    made timm's: some of its classifiers are 1×1 convolutions.
    """
    with rng.scoped(rng.generator(0, "export")):
        images = torch.randn(2, 3, resolution, resolution)
        other = timm.create_model(
            form.architecture,
            pretrained=False,
            num_classes=model.head.out_features,
            **form.arguments,
        ).eval()
    expected = other.state_dict()
    for name in form.classifier:
        weight = expected.get(f"{name}.weight")
        if weight is not None and weight.numel() == tensors[f"{name}.weight"].numel():
            tensors[f"{name}.weight"] = tensors[f"{name}.weight"].reshape(weight.shape)
    if params.mismatch(expected, tensors):
        return False
    other.load_state_dict(tensors)
    with torch.inference_mode():
        return torch.allclose(other(images), model(images), rtol=TOLERANCE, atol=TOLERANCE)


def _config(
    run: LoadedRun,
    config: Config,
    row: Backbone,
    model: Classifier,
    form: TimmForm,
    *,
    loadable: bool,
) -> dict[str, Any]:
    """The keys of timm's hub, then the package's own under `fedlens`."""
    result = require_result(run.folder)
    inputs = run.experiment.input_hashes
    resolution = config.backbone.resolution or row.resolution
    backbone, classes = model.backbone, model.head.out_features
    cfg: dict[str, Any] = dict(getattr(backbone, "pretrained_cfg", None) or {})
    weights = _weights(config, row, cfg, inputs.get("weights"))
    pool = getattr(backbone, "global_pool", None)
    classifier: Any = form.classifier[0] if len(form.classifier) == 1 else list(form.classifier)
    return {
        "architecture": form.architecture,
        "num_classes": classes,
        "num_features": model.head.in_features,
        **({"global_pool": pool} if isinstance(pool, str) and pool else {}),
        "label_names": list(dataset(config).classes),
        "model_args": form.arguments,
        "pretrained_cfg": {
            "num_classes": classes,
            "input_size": [3, resolution, resolution],
            "fixed_input_size": bool(form.arguments),
            "interpolation": "bicubic",
            "crop_pct": 1.0,
            "crop_mode": "squash",  # the whole image, as a square
            "mean": list(row.mean),
            "std": list(row.std),
            **({"first_conv": cfg["first_conv"]} if cfg.get("first_conv") else {}),
            "classifier": classifier,
            **({"license": weights["license"]} if weights["license"] else {}),
        },
        "fedlens": {
            "run": run.folder.name,
            **setting(config),
            "version": version("fedlens"),
            "backbone": row.name,
            "own_backbone": backbone_registry[config.backbone.name].function is not None,
            "features": config.backbone.features,
            "reading": reading(config).content,
            "resolution": resolution,
            "classifier": list(form.classifier),
            "loads_in_timm": loadable,
            "weights": weights,
            "data_sha256": inputs["data"],
            "parameters_sha256": result["choice"]["parameters"],
            "choice": {key: result["choice"][key] for key in ("chosen_on", "unit")},
            "test": {key: value for key, value in result["test"].items() if key != "per_class"},
            "validation": result["validation"],
            "command": shlex.join(compose.command(config)),
        },
    }


def _weights(
    config: Config, row: Backbone, cfg: dict[str, Any], sha256: str | None
) -> dict[str, Any]:
    """Where the weights came from that the run started with, and under which licence."""
    settings = config.backbone
    source, licence = None, None
    if settings.pretrained and settings.weights:
        source = f"the file {PurePath(settings.weights).name}"
    elif settings.pretrained and row.repository:
        source, licence = row.repository, cast("str | None", cfg.get("license"))
    elif settings.pretrained and row.name == "vit_pico":
        source, licence = "pretrained by fedlens on images that it draws", "apache-2.0"
    elif settings.pretrained:
        source = row.name
    return {
        "pretrained": settings.pretrained,
        "source": source,
        "repository": row.repository if source == row.repository else None,
        "license": licence,
        "sha256": sha256,
    }
