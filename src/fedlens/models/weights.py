"""Pretrained weights: found, read without running code, checked, and loaded strictly.

Only three things may differ between a file and the model: the pretraining's own head, DINOv2's
mask token, and the size of the position grid, which is resampled (bicubic, as in timm).
"""

import math
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import (
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    try_to_load_from_cache,
)
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.layers.pos_embed import resample_abs_pos_embed
from torch import nn

from fedlens import files, params
from fedlens.errors import FedlensError
from fedlens.models import backbones
from fedlens.models.backbones import Backbone

HUB_FILE = "model.safetensors"
PATIENCE = 10  # seconds for the hub's first answer: offline should be said soon
WRAPPERS = ("state_dict", "model", "teacher")
PREFIXES = ("module.", "backbone.")


@dataclass(frozen=True)
class LoadedWeights:
    """What the records say about a run's starting point."""

    path: Path
    sha256: str


def find(row: Backbone, explicit: Path | None = None, *, download: bool = True) -> Path:
    """The file: `explicit`, else under FEDLENS_WEIGHTS, in the caches, else from the hub."""
    if explicit is not None:
        place = _existing(explicit, "backbone.weights")
        if found := _at(place, row):
            return found
        raise FedlensError(f"{place} holds no {_names(row)}: name the file in backbone.weights.")
    if not row.files:
        raise FedlensError(f"{row.name} has no published weights: name a file in backbone.weights.")
    places = [files.cache_dir() / "weights"]
    if named := os.environ.get("FEDLENS_WEIGHTS"):
        places.insert(0, _existing(Path(named), "FEDLENS_WEIGHTS"))
    for place in places:
        if found := _at(place, row):
            return found
    if row.repository:
        cached = try_to_load_from_cache(row.repository, HUB_FILE)
        if isinstance(cached, str):
            return Path(cached)
    if not download:
        raise _unavailable(row, "downloading is off")
    return _download(row)


def verify(row: Backbone, path: Path, *, expected_sha256: str | None = None) -> LoadedWeights:
    """For the command line: the file fits the row, key by key."""
    return load(backbones.create(row), row, path, expected_sha256=expected_sha256)


def load(
    backbone: nn.Module, row: Backbone, path: Path, *, expected_sha256: str | None = None
) -> LoadedWeights:
    """Fills `backbone` from the file at `path`, every parameter or none."""
    try:
        found = files.sha256(path)
    except OSError as error:
        raise FedlensError(f"{path} cannot be opened ({error.strerror}).") from error
    if expected_sha256 is not None and found != expected_sha256.lower():
        raise FedlensError(
            f"{path} has sha256 {found}, not {expected_sha256}: it is another file than the one "
            "that was asked for."
        )
    given = _fitted(backbone, row, read(path))
    if fault := params.mismatch(backbone.state_dict(), given):
        raise FedlensError(f"{path} does not fit {row.name}: {fault}.")
    backbone.load_state_dict(given, strict=True)
    return LoadedWeights(path, found)


def read(path: Path) -> dict[str, torch.Tensor]:
    """The tensors in a safetensors file or a checkpoint, without wrappers and prefixes."""
    if path.suffix == ".safetensors":
        content = _read_safetensors(path)
    elif path.suffix in (".pth", ".pt", ".bin"):
        content = _read_pickle(path)
    else:
        raise FedlensError(f"{path} is neither .safetensors nor .pth, .pt or .bin.")
    tensors = _unwrapped(content)
    if not isinstance(tensors, dict) or not all(map(torch.is_tensor, tensors.values())):
        raise FedlensError(f"{path} holds no state dict (names and tensors, nothing else).")
    for prefix in PREFIXES:
        tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
    return tensors


def _unwrapped(content: Any) -> Any:
    for name in WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(name), dict):
            return _unwrapped(content[name])
    return content


def _read_safetensors(path: Path) -> dict[str, Any]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise _unreadable(path) from error


def _read_pickle(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise FedlensError(
            f"{path} is damaged or holds more than tensors, and unpickling that could run any "
            "code: take the state dict alone, best as safetensors."
        ) from error
    except Exception as error:  # torch names no type for a damaged file: RuntimeError, EOFError, …
        raise _unreadable(path) from error


def _fitted(
    backbone: nn.Module, row: Backbone, given: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """`given` without what no backbone keeps, its position embeddings on the model's grid.

    timm's checkpoint_filter_fn would do this too, but it also resamples patch embeddings, and so
    would take the weights of one patch size for those of another.
    """
    dropped = ("mask_token", *(f"{head}." for head in row.classifier))
    kept = {name: value for name, value in given.items() if not name.startswith(dropped)}
    ours, theirs = backbone.state_dict().get("pos_embed"), kept.get("pos_embed")
    if ours is not None and theirs is not None and ours.ndim == theirs.ndim == 3:
        grid: tuple[int, int] = cast(Any, backbone).patch_embed.grid_size
        prefix = ours.shape[1] - math.prod(grid)  # class and register tokens have no place in it
        patches = theirs.shape[1] - prefix
        if patches > 0 and math.isqrt(patches) ** 2 == patches:
            kept["pos_embed"] = resample_abs_pos_embed(theirs, list(grid), num_prefix_tokens=prefix)
    return kept


def _at(place: Path, row: Backbone) -> Path | None:
    """`place` itself if it is a file, else the row's file in that folder."""
    if place.is_file():
        return place
    return next((place / name for name in row.files if (place / name).is_file()), None)


def _names(row: Backbone) -> str:
    return " or ".join(row.files) or f"file for {row.name}"


def _existing(path: Path, source: str) -> Path:
    path = path.expanduser()
    if not path.exists():
        raise FedlensError(f"{source} names {path}, which does not exist.")
    return path


def _download(row: Backbone) -> Path:
    if row.repository is None:
        raise _unavailable(row, "timm publishes none")
    try:
        # Asked once before the download, whose own retries would take half a minute to say no.
        get_hf_file_metadata(hf_hub_url(row.repository, HUB_FILE), timeout=PATIENCE)
        return Path(hf_hub_download(row.repository, HUB_FILE, etag_timeout=PATIENCE))
    except Exception as error:  # the hub's client has changed its HTTP library more than once
        raise _unavailable(row, " ".join(str(error).split()) or type(error).__name__) from error


def _unavailable(row: Backbone, reason: str) -> FedlensError:
    return FedlensError(
        f"The weights of {row.name} are not here and could not be downloaded ({reason}): put "
        f"{_names(row)} into {files.cache_dir() / 'weights'} or the folder "
        "FEDLENS_WEIGHTS names, or try the embedded world: backbone=vit_pico data=synthetic."
    )


def _unreadable(path: Path) -> FedlensError:
    return FedlensError(f"{path} cannot be read: it is damaged or incomplete, so fetch it again.")
