"""Backbones: the package's rows, what is known of each before it is built, and how it is built.

A backbone maps normalised images [B, 3, R, R] to features [B, D] and has no classifier.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, cast

from timm.models.vision_transformer import VisionTransformer
from torch import nn

from fedlens import rng
from fedlens.errors import FedlensError
from fedlens.models.architectures import timm_models
from fedlens.models.architectures.module_features import with_features
from fedlens.models.architectures.stem import ConvStem
from fedlens.registry import Row, RowSettings, backbone

Channels = tuple[float, float, float]

HALF: Channels = (0.5, 0.5, 0.5)
PICO: dict[str, Any] = {  # the architecture of vit_pico, which its file's name hashes
    "patch_size": 8,
    "embed_dim": 96,
    "depth": 4,
    "num_heads": 3,
    "class_token": False,
    "global_pool": "avg",
    "embed_layer": ConvStem,
}


@dataclass(frozen=True)
class Backbone:
    """What is known of a backbone before it is built."""

    name: str
    build: Callable[[int], nn.Module]  # from a resolution, with random weights
    resolution: int | None = None  # None: it says none, so the images' own is taken
    patch: int = 1  # the resolution is a multiple of it; 1: any resolution
    mean: Channels = HALF
    std: Channels = HALF
    paper: str = ""
    files: tuple[str, ...] = ()  # local names of its weights, in order of preference
    repository: str | None = None  # on the Hugging Face hub
    classifier: tuple[str, ...] = ("head",)  # the pretraining's head, dropped on loading


@backbone(
    label="DINO ViT-S/16",
    paper="Caron et al., 2021, https://arxiv.org/abs/2104.14294",
    order=1,
    pretrained=True,
    patch=16,
    resolution=224,
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    files=("dino_deitsmall16_pretrain.pth", "vit_small_patch16_224.dino.safetensors"),
    repository="timm/vit_small_patch16_224.dino",
)
def dino_vits16(resolution: int) -> nn.Module:
    """ViT-S/16, self-supervised with DINO on ImageNet: the backbone of the study."""
    return timm_models.create("vit_small_patch16_224.dino", resolution)


@backbone(
    label="DINOv2 ViT-S/14",
    paper="Oquab et al., 2023, https://arxiv.org/abs/2304.07193",
    order=2,
    pretrained=True,
    patch=14,
    resolution=224,  # pretrained at 518, five times the tokens; 224 keeps a study feasible
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    files=("dinov2_vits14_pretrain.pth", "vit_small_patch14_dinov2.lvd142m.safetensors"),
    repository="timm/vit_small_patch14_dinov2.lvd142m",
)
def dinov2_vits14(resolution: int) -> nn.Module:
    """ViT-S/14, self-supervised with DINOv2."""
    return timm_models.create("vit_small_patch14_dinov2.lvd142m", resolution)


@backbone(
    label="ViT-Ti/16",
    paper="Steiner et al., 2021, https://arxiv.org/abs/2106.10270",
    order=3,
    pretrained=True,
    patch=16,
    resolution=224,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    files=("vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors",),
    repository="timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k",
)
def vit_tiny(resolution: int) -> nn.Module:
    """ViT-Ti/16, supervised (AugReg, ImageNet-21k then 1k): real results on a laptop."""
    return timm_models.create("vit_tiny_patch16_224.augreg_in21k_ft_in1k", resolution)


@backbone(
    label="ViT pico",
    paper="Dosovitskiy et al., 2020, https://arxiv.org/abs/2010.11929",
    order=4,
    pretrained=True,
    patch=8,
    resolution=32,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
)
def vit_pico(resolution: int) -> nn.Module:
    """A ViT of well under 1 M parameters, pretrained by fedlens itself on other synthetic classes.

    Its weights are shipped with the package.
    """
    return VisionTransformer(num_classes=0, img_size=resolution, **PICO)


@backbone(label="model of timm", name="timm", argument="model", order=5, pretrained=True)
def timm_model(
    resolution: int,
    *,
    model: Annotated[str, "its name in timm, as in backbone=timm:resnet18"],
) -> nn.Module:
    """Any model of timm, with the weights that timm publishes for it."""
    known = timm_models.facts(model)
    return timm_models.create(known["full_name"], resolution, sized=known["sized"])


def find(choice: str | RowSettings) -> Backbone:
    """The backbone of that name, or of a config's settings."""
    settings = backbone.settings(choice, "backbone") if isinstance(choice, str) else choice
    row = backbone[settings.name]
    common = {one.name for one in backbone.common}
    own = {name: value for name, value in settings.parameters.items() if name not in common}
    name, known = backbone.spelled(settings), row.traits
    if row.name == "timm":
        known = timm_models.facts(settings.model)
        name = f"{timm_models.PREFIX}{known['full_name']}"
    elif row.function is not None:
        known = {"files": (f"{row.name}.safetensors", f"{row.name}.pth"), "classifier": (), **known}
    if settings.resolution is not None:
        known = {**known, "resolution": settings.resolution}
    return Backbone(
        name=name,
        build=partial(_build, row, name, own, settings.features),
        paper=known.get("paper", row.paper),
        **{key: known[key] for key in _FACTS if key in known},
    )


_FACTS = ("resolution", "patch", "mean", "std", "files", "repository", "classifier")


def _build(
    row: Row, name: str, own: Mapping[str, Any], features: str | None, resolution: int
) -> nn.Module:
    """What the row's function returns; a module from outside the package gets its features."""
    function = row.make
    takes_resolution = "resolution" in inspect.signature(function).parameters
    arguments = {**own, **({"resolution": resolution} if takes_resolution else {})}
    if row.function is None:
        module = function(**arguments)
        if features is None:
            return cast(nn.Module, module)
    else:
        try:
            module = function(**arguments)
        except FedlensError:
            raise
        except Exception as error:  # somebody's function: it may raise anything
            raise FedlensError(
                f"backbone={name} cannot be built ({type(error).__name__}: {error})."
            ) from error
    if not isinstance(module, nn.Module):
        raise FedlensError(
            f"backbone={name} returned a {type(module).__name__}: it must return an nn.Module."
        )
    return with_features(module, name=name, resolution=resolution, features=features)


def create(row: Backbone, *, resolution: int | None = None, seed: int = 0) -> nn.Module:
    """The backbone with random weights from `seed`; the global generator is left unchanged."""
    resolution = checked_resolution(row, resolution)
    with rng.scoped(rng.generator(seed, "backbone", row.name)):
        return row.build(resolution)


def checked_resolution(row: Backbone, resolution: int | None) -> int:
    """The resolution, else the row's own; refuses one that is not a whole number of patches."""
    resolution = row.resolution if resolution is None else resolution
    if resolution is None:
        raise FedlensError(
            f"backbone={row.name} has no default resolution: set backbone.resolution."
        )
    below = resolution // row.patch * row.patch
    if below != resolution or resolution < 1:
        fits = [size for size in (below, below + row.patch) if size > 0]
        raise FedlensError(
            f"{row.name} has patches of {row.patch} px, so resolution={resolution} must be a "
            f"multiple of it: choose {' or '.join(map(str, fits))}."
        )
    return resolution


def width(module: nn.Module) -> int:
    """D, the length of a feature vector."""
    features = getattr(module, "head_hidden_size", None) or module.num_features
    return int(cast(int, features))
