"""Masks on disk: one bit per weight, with their provenance and a digest of both.

A safetensors file: under each name the bits in row-major order, eight to a byte, lowest bit first;
in the header a JSON text with shapes, provenance and digest. Equal content gives equal files.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fedlens import files, params
from fedlens.errors import FedlensError
from fedlens.params import Params
from fedlens.sparse.masks import Masks

HEADER = "fedlens_masks"  # one key only: safetensors writes several in random order


def save(path: Path, masks: Params, provenance: Mapping[str, Any]) -> None:
    """`provenance` is any JSON object: rule, density, seed, data, weights, …"""
    header = {
        "shapes": {name: list(mask.shape) for name, mask in masks.items()},
        "provenance": dict(provenance),
        "seal": _seal(masks, provenance),
    }
    bits = {name: packed(mask) for name, mask in masks.items()}
    with files.replacing(path) as temporary:
        save_file(bits, temporary, metadata={HEADER: json.dumps(header, allow_nan=False)})


def load(path: Path) -> tuple[Masks, dict[str, Any]]:
    """The masks, in the order in which they were saved, and their provenance."""
    if not path.exists():
        raise FedlensError(f"There are no masks at {path}: check the path, or calibrate first.")
    try:
        with safe_open(path, framework="np") as stored:
            header = files.parse_json((stored.metadata() or {})[HEADER])
            masks = {
                name: unpacked(torch.from_numpy(stored.get_tensor(name)), shape)
                for name, shape in header["shapes"].items()
            }
        provenance: dict[str, Any] = header["provenance"]
        intact = _seal(masks, provenance) == header["seal"]
    except KeyError as error:
        raise FedlensError(
            f"{path} does not hold masks saved by fedlens: check the path."
        ) from error
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError) as error:
        raise FedlensError(f"{path} is damaged ({error}): calibrate again.") from error
    if not intact:
        raise FedlensError(f"{path} is damaged (it does not match its digest): calibrate again.")
    return masks, provenance


def packed(mask: torch.Tensor) -> torch.Tensor:
    """The mask's bits, as uint8."""
    return torch.from_numpy(np.packbits(mask.cpu().numpy(), axis=None, bitorder="little"))


def unpacked(bits: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    if math.prod(shape) > 8 * bits.numel():
        raise ValueError(f"{bits.numel()} bytes for a mask of shape {tuple(shape)}")
    unpacked_bits = np.unpackbits(bits.numpy(), count=int(np.prod(shape)), bitorder="little")
    return torch.from_numpy(unpacked_bits.view(np.bool_).reshape(shape))


def _seal(masks: Params, provenance: Mapping[str, Any]) -> str:
    text = json.dumps(dict(provenance), sort_keys=True, allow_nan=False)
    return hashlib.sha256(f"{params.digest(masks)} {text}".encode()).hexdigest()
