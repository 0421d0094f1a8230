"""Pretrained weights: found, read without running code, checked, and loaded strictly.

A file may differ from the model in three things only: the pretraining's head, DINOv2's mask token,
and the size of the position grid, which is resampled (bicubic, as in timm).
"""

import math
import os
import pickle
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
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
from fedlens.models.architectures import backbones
from fedlens.models.architectures.backbones import Backbone
from fedlens.models.architectures.module_features import FeatureModule
from fedlens.paths import expanded

HUB_FILE = "model.safetensors"
TIMEOUT_S = 8.0  # for the hub's first answer, so that a missing network is reported soon
WRAPPERS = ("state_dict", "model", "teacher")
PREFIXES = ("module.", "backbone.")


class WrongWeights(FedlensError):
    """A file does not have the hash that was asked for."""


@dataclass(frozen=True)
class LoadedWeights:
    """The weights file of a run, for its records."""

    path: Path
    sha256: str


def find(row: Backbone, explicit: Path | None = None, *, download: bool = True) -> Path:
    """The file: `explicit`, else under FEDLENS_WEIGHTS, in the caches, else from the hub."""
    if explicit is not None:
        place = _existing(explicit, "backbone.weights")
        if path := _at(place, row):
            return path
        raise FedlensError(f"{place} has no {_names(row)}: set backbone.weights to the file.")
    if not row.files:
        raise FedlensError(f"{row.name} has no published weights: set backbone.weights to a file.")
    places = [files.cache_dir() / "weights"]
    if named := os.environ.get("FEDLENS_WEIGHTS"):
        places.insert(0, _existing(Path(named), "FEDLENS_WEIGHTS"))
    for place in places:
        if path := _at(place, row):
            return path
    if row.repository:
        cached = try_to_load_from_cache(row.repository, HUB_FILE)
        if isinstance(cached, str):
            return Path(cached)
    if not download:
        raise _unavailable(row, "downloading is off")
    return _download(row)


def verify(row: Backbone, path: Path, *, expected_sha256: str | None = None) -> LoadedWeights:
    """Loads the file into a new backbone, to check that it fits."""
    return load(backbones.create(row), row, path, expected_sha256=expected_sha256)


def load(
    backbone: nn.Module, row: Backbone, path: Path, *, expected_sha256: str | None = None
) -> LoadedWeights:
    """Fills `backbone` from the file at `path`, every parameter or none."""
    try:
        sha256 = files.sha256(path)
    except OSError as error:
        raise FedlensError(f"{path} cannot be opened ({error.strerror}).") from error
    if expected_sha256 is not None and sha256 != expected_sha256.lower():
        raise WrongWeights(
            f"{path} has sha256 {sha256}, not {expected_sha256}: use the file with that hash, or "
            "change backbone.sha256."
        )
    dropped = row.classifier
    if isinstance(backbone, FeatureModule):  # the file is of the module itself
        dropped = (*dropped, *backbone.classifier)
        backbone = backbone.module
    tensors = _fitted(backbone, dropped, read(path))
    if fault := params.mismatch(backbone.state_dict(), tensors):
        raise FedlensError(f"{path} does not fit {row.name}: {fault}.")
    backbone.load_state_dict(tensors, strict=True)
    return LoadedWeights(path, sha256)


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
        raise FedlensError(f"{path} is not a state dict (only names and tensors): save one.")
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
        with warnings.catch_warnings():  # torch warns of files that it then refuses
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise FedlensError(
            f"{path} is damaged or has more than tensors, and unpickling it could run any code: "
            "save only the state dict, best as safetensors."
        ) from error
    except Exception as error:  # torch names no type for a damaged file: RuntimeError, EOFError, …
        raise _unreadable(path) from error


def _fitted(
    backbone: nn.Module, heads: Sequence[str], tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """`tensors` without heads and mask token, with position embeddings on the model's grid.

    timm's checkpoint_filter_fn also resamples patch embeddings, and so would accept the weights of
    another patch size.
    """
    dropped = ("mask_token", *(f"{head}." for head in heads))
    kept = {name: value for name, value in tensors.items() if not name.startswith(dropped)}
    wanted, stored = backbone.state_dict().get("pos_embed"), kept.get("pos_embed")
    on_a_grid = hasattr(getattr(backbone, "patch_embed", None), "grid_size")
    if wanted is not None and stored is not None and wanted.ndim == stored.ndim == 3 and on_a_grid:
        grid: tuple[int, int] = cast(Any, backbone).patch_embed.grid_size
        prefix = wanted.shape[1] - math.prod(grid)  # class and register tokens are not on it
        patches = stored.shape[1] - prefix
        if patches > 0 and math.isqrt(patches) ** 2 == patches:
            kept["pos_embed"] = resample_abs_pos_embed(stored, list(grid), num_prefix_tokens=prefix)
    return kept


def _at(place: Path, row: Backbone) -> Path | None:
    """`place` itself if it is a file, else the row's file in that folder."""
    if place.is_file():
        return place
    return next((place / name for name in row.files if (place / name).is_file()), None)


def _names(row: Backbone) -> str:
    return " or ".join(row.files) or f"file for {row.name}"


def _existing(path: Path, source: str) -> Path:
    path = expanded(path)
    if not path.exists():
        raise FedlensError(f"{source} is {path}, which does not exist.")
    return path


def _download(row: Backbone) -> Path:
    if row.repository is None:
        raise _unavailable(row, "none are published")
    try:
        # One request before the download, whose retries would take half a minute to fail.
        _await_answer(hf_hub_url(row.repository, HUB_FILE))
        return Path(hf_hub_download(row.repository, HUB_FILE, etag_timeout=TIMEOUT_S))
    except Exception as error:  # the hub's client has changed its HTTP library more than once
        raise _unavailable(row, " ".join(str(error).split()) or type(error).__name__) from error


def _await_answer(url: str) -> None:
    """Asks the hub for the file; raises what went wrong, or a timeout.

    The client's own timeout holds for each address and not for looking up the host's name, so the
    request is left to a thread.
    """
    failures: list[Exception] = []

    def ask() -> None:
        try:
            get_hf_file_metadata(url, timeout=TIMEOUT_S)
        except Exception as error:
            failures.append(error)

    request = Thread(target=ask, daemon=True)  # does not keep the process alive
    request.start()
    request.join(TIMEOUT_S)
    if request.is_alive():
        raise TimeoutError(f"no answer from the hub within {TIMEOUT_S:g} s")
    if failures:
        raise failures[0]


def _unavailable(row: Backbone, reason: str) -> FedlensError:
    return FedlensError(
        f"The weights of {row.name} were not found and could not be downloaded ({reason}): put "
        f"{_names(row)} into {files.cache_dir() / 'weights'} or the folder FEDLENS_WEIGHTS, or use "
        "the synthetic benchmark (backbone=vit_pico data=synthetic)."
    )


def _unreadable(path: Path) -> FedlensError:
    return FedlensError(f"{path} is damaged or incomplete: download it again.")
