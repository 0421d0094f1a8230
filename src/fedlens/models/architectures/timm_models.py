"""What timm knows of its models: their inputs, their weights on the hub, and their names."""

from difflib import get_close_matches
from functools import cache
from typing import Any

import timm
import torch
from timm.models import get_pretrained_cfg, is_model
from torch import nn

from fedlens.errors import FedlensError

PREFIX = "timm:"  # of a timm model's name on the command line


@cache
def facts(name: str) -> dict[str, Any]:
    """The facts that a row of the package states by its traits, and the full name with its tag."""
    try:
        config = get_pretrained_cfg(name) if is_model(name) else None
    except RuntimeError:  # the architecture exists, the tag does not
        config = None
    if config is None:
        close = get_close_matches(name, _known(), n=1)
        hint = f"did you mean '{PREFIX}{close[0]}'?" if close else "timm.list_models() lists all."
        raise FedlensError(f"timm has no model '{name}': {hint}")
    full = f"{config.architecture}.{config.tag}" if config.tag else config.architecture
    with torch.device("meta"):  # shapes only, without memory for the weights
        shape = timm.create_model(name, pretrained=False, num_classes=0)
    patch = getattr(getattr(shape, "patch_embed", None), "patch_size", 1)
    classifier = config.classifier or ()
    return {
        "full_name": full,
        "patch": (patch if isinstance(patch, int) else patch[0]) if config.fixed_input_size else 1,
        "resolution": config.input_size[-1],
        "mean": config.mean,
        "std": config.std,
        "files": (f"{full}.safetensors", f"{full}.pth"),
        "repository": config.hf_hub_id,
        "classifier": (classifier,) if isinstance(classifier, str) else tuple(classifier),
        "paper": config.origin_url or f"https://huggingface.co/{config.hf_hub_id or 'timm'}",
        "sized": config.fixed_input_size,  # it has position embeddings for one resolution
    }


def create(name: str, resolution: int, *, sized: bool = True) -> nn.Module:
    """The model without its classifier, with random weights; a sized one is for that resolution."""
    size: dict[str, Any] = {"img_size": resolution} if sized else {}
    try:
        return timm.create_model(name, pretrained=False, num_classes=0, **size)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise FedlensError(
            f"timm cannot build {PREFIX}{name} at {resolution} px ({error})."
        ) from error


def near(name: str) -> str | None:
    """How the timm model that is called `name`, or nearly so, is chosen."""
    known = [name] if name in _known() else get_close_matches(name, _known(), n=1, cutoff=0.8)
    return f"{PREFIX}{known[0]}" if known else None


@cache
def _known() -> tuple[str, ...]:
    return (*timm.list_models(), *timm.list_pretrained())
