"""Backbones as rows of one table: how timm builds them, their inputs and their weights.

A backbone maps normalised images [B, 3, R, R] to features [B, D] and has no classifier.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from typing import Any, cast

import timm
import torch
from timm.models import get_pretrained_cfg, is_model
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from fedlens import rng
from fedlens.errors import FedlensError, suggest
from fedlens.models.stem import ConvStem

Channels = tuple[float, float, float]

IMAGENET_MEAN: Channels = (0.485, 0.456, 0.406)
IMAGENET_STD: Channels = (0.229, 0.224, 0.225)
HALF: Channels = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class Backbone:
    """Either a model of timm, or the arguments of a small VisionTransformer."""

    name: str
    patch: int  # the resolution is a multiple of it; 1: any resolution
    resolution: int
    mean: Channels
    std: Channels
    paper: str
    timm_name: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[str, ...] = ()  # local names of its weights, in order of preference
    repository: str | None = None  # on the Hugging Face hub
    classifier: tuple[str, ...] = ("head",)  # the pretraining's head, dropped on loading
    sized: bool = True  # has position embeddings, so it is built for one resolution


TABLE = {
    row.name: row
    for row in (
        Backbone(
            name="dino_vits16",
            timm_name="vit_small_patch16_224.dino",
            patch=16,
            resolution=224,
            mean=IMAGENET_MEAN,
            std=IMAGENET_STD,
            files=("dino_deitsmall16_pretrain.pth", "vit_small_patch16_224.dino.safetensors"),
            repository="timm/vit_small_patch16_224.dino",
            paper="Caron et al., 2021, https://arxiv.org/abs/2104.14294",
        ),
        Backbone(
            name="dinov2_vits14",
            timm_name="vit_small_patch14_dinov2.lvd142m",
            patch=14,
            resolution=224,  # pretrained at 518, five times the tokens; 224 keeps a study feasible
            mean=IMAGENET_MEAN,
            std=IMAGENET_STD,
            files=("dinov2_vits14_pretrain.pth", "vit_small_patch14_dinov2.lvd142m.safetensors"),
            repository="timm/vit_small_patch14_dinov2.lvd142m",
            paper="Oquab et al., 2023, https://arxiv.org/abs/2304.07193",
        ),
        Backbone(
            name="vit_tiny",
            timm_name="vit_tiny_patch16_224.augreg_in21k_ft_in1k",
            patch=16,
            resolution=224,
            mean=HALF,
            std=HALF,
            files=("vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors",),
            repository="timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k",
            paper="Steiner et al., 2021, https://arxiv.org/abs/2106.10270",
        ),
        Backbone(  # pretrained by fedlens on synthetic classes: there is no file
            name="vit_pico",
            arguments={
                "patch_size": 8,
                "embed_dim": 96,
                "depth": 4,
                "num_heads": 3,
                "class_token": False,
                "global_pool": "avg",
                "embed_layer": ConvStem,
            },
            patch=8,
            resolution=32,
            mean=HALF,
            std=HALF,
            paper="Dosovitskiy et al., 2020, https://arxiv.org/abs/2010.11929",
        ),
    )
}


def find(name: str) -> Backbone:
    """The row called `name`; `timm:<name>` gives a row of any model of timm."""
    if name.startswith("timm:"):
        return _from_timm(name.removeprefix("timm:"))
    if name not in TABLE:
        raise FedlensError(
            f"There is no backbone '{name}': {suggest(name, [*TABLE, 'timm:<any name>'])}"
        )
    return TABLE[name]


@cache
def _from_timm(name: str) -> Backbone:
    try:
        config = get_pretrained_cfg(name) if is_model(name) else None
    except RuntimeError:  # the architecture exists, the tag does not
        config = None
    if config is None:
        known = [*timm.list_models(), *timm.list_pretrained()]
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean 'timm:{near[0]}'?" if near else "timm.list_models() lists them all."
        raise FedlensError(f"timm has no model '{name}': {hint}")
    full = f"{config.architecture}.{config.tag}" if config.tag else config.architecture
    with torch.device("meta"):  # shapes only, without memory for the weights
        shape = timm.create_model(name, pretrained=False, num_classes=0)
    patch = getattr(getattr(shape, "patch_embed", None), "patch_size", 1)
    classifier = config.classifier or ()
    return Backbone(
        name=f"timm:{full}",
        timm_name=full,
        patch=(patch if isinstance(patch, int) else patch[0]) if config.fixed_input_size else 1,
        resolution=config.input_size[-1],
        mean=cast(Channels, config.mean),
        std=cast(Channels, config.std),
        files=(f"{full}.safetensors", f"{full}.pth"),
        repository=config.hf_hub_id,
        classifier=(classifier,) if isinstance(classifier, str) else tuple(classifier),
        sized=config.fixed_input_size,
        paper=config.origin_url or f"https://huggingface.co/{config.hf_hub_id or 'timm'}",
    )


def create(row: Backbone, *, resolution: int | None = None, seed: int = 0) -> nn.Module:
    """The backbone with random weights from `seed`; the global generator is left unchanged."""
    resolution = row.resolution if resolution is None else resolution
    check_resolution(row, resolution)
    size: dict[str, Any] = {"img_size": resolution} if row.sized else {}
    with rng.scoped(rng.generator(seed, "backbone", row.name)):
        if row.timm_name is None:
            return VisionTransformer(num_classes=0, **size, **row.arguments)
        try:
            return timm.create_model(row.timm_name, pretrained=False, num_classes=0, **size)
        except (TypeError, ValueError, AssertionError, RuntimeError) as error:
            raise FedlensError(
                f"timm cannot build {row.name} at {resolution} px ({error})."
            ) from error


def check_resolution(row: Backbone, resolution: int) -> None:
    """Refuses a resolution that is not a whole number of patches."""
    below = resolution // row.patch * row.patch
    if below != resolution or resolution < 1:
        fits = [size for size in (below, below + row.patch) if size > 0]
        raise FedlensError(
            f"{row.name} has patches of {row.patch} px, so resolution={resolution} must be a "
            f"multiple of it: choose {' or '.join(map(str, fits))}."
        )


def width(backbone: nn.Module) -> int:
    """D, the length of a feature vector."""
    features = getattr(backbone, "head_hidden_size", None) or backbone.num_features
    return int(cast(int, features))


def freeze_blocks(backbone: nn.Module, n: int) -> None:
    """Freezes the embeddings and the first n blocks; n = 0 freezes nothing."""
    if n == 0:
        return
    depth = _depth(backbone)
    if not 0 < n <= depth:
        raise FedlensError(f"freeze_blocks={n} must be in 0 to {depth}, the number of blocks.")
    for block, parameter in _by_block(backbone, depth):
        if block < n:
            parameter.requires_grad_(False)


def last_blocks(backbone: nn.Module, n: int) -> None:
    """Exactly the last n blocks and the final norm require gradients."""
    depth = _depth(backbone)
    if not 1 <= n <= depth:
        raise FedlensError(f"last_blocks:{n} must be in 1 to {depth}, the number of blocks.")
    for block, parameter in _by_block(backbone, depth):
        parameter.requires_grad_(block >= depth - n)


def _depth(backbone: nn.Module) -> int:
    blocks = getattr(backbone, "blocks", None)
    patches = hasattr(backbone, "patch_embed")  # some convolutional nets call their stages blocks
    if not patches or not isinstance(blocks, nn.Sequential | nn.ModuleList):
        raise FedlensError(
            f"{type(backbone).__name__} has no sequence of transformer blocks: train or freeze all "
            "of it."
        )
    return len(blocks)


def _by_block(backbone: nn.Module, depth: int) -> Iterator[tuple[int, nn.Parameter]]:
    """Each parameter with its block's number; −1 for embeddings, `depth` after the blocks."""
    for name, parameter in backbone.named_parameters():
        head, _, rest = name.partition(".")
        if head == "blocks":
            yield int(rest.partition(".")[0]), parameter
        else:
            after = head in ("norm", "fc_norm", "attn_pool", "head")
            yield depth if after else -1, parameter
