"""Tensors and masks in a few numbers, whatever they are called and in whatever order they come."""

import base64
import hashlib
import zlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

PROJECTIONS = 16
SAMPLED = 32768  # places of a mask that are kept, so that two masks can be laid over each other


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Equal if and only if the tensors are, bit for bit; names and order do not count."""
    return _hashed(sorted(_of_one(tensor) for tensor in tensors))


def digest_in_order(tensors: Iterable[torch.Tensor]) -> str:
    """The same where the order does count."""
    return _hashed([_of_one(tensor) for tensor in tensors])


def sketch(tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """The norm, and sums under signs drawn for each shape: near if and only if the tensors are.

    Tensors of equal shape have equal signs, so that their order does not count.
    """
    square, sums = 0.0, np.zeros(PROJECTIONS)
    for tensor in sorted(tensors, key=lambda one: tuple(one.shape)):
        values = tensor.detach().double().reshape(-1).numpy()
        square += float(values @ values)
        sums += _signs(tuple(tensor.shape)) @ values
    return {"norm": float(np.sqrt(square)), "projections": sums.tolist()}


def described(tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    return {
        "sha256": digest(tensors),
        "count": sum(tensor.numel() for tensor in tensors),
        "sketch": sketch(tensors),
    }


def of_masks(masks: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Counts, the hash, and a sample of the bits; of equal shapes the model's order is kept."""
    by_shape = sorted((mask.bool() for mask in masks), key=lambda mask: tuple(mask.shape))
    bits = torch.cat([mask.reshape(-1) for mask in by_shape]).numpy()
    places = np.random.RandomState(7).randint(0, len(bits), SAMPLED)
    packed = zlib.compress(np.packbits(bits[places]).tobytes(), 9)
    return {
        "sha256": digest(by_shape),
        "trained": int(bits.sum()),
        "total": len(bits),
        "trained_by_tensor": [int(mask.sum()) for mask in by_shape],
        "sampled_bits": base64.b64encode(packed).decode(),
    }


def overlap(one: str, other: str) -> float:
    """The share of the sampled places where two masks agree, those left out by both not counted."""
    a, b = (
        np.unpackbits(np.frombuffer(zlib.decompress(base64.b64decode(bits)), np.uint8))
        for bits in (one, other)
    )
    return float((a & b).sum() / max(1, (a | b).sum()))


def _of_one(tensor: torch.Tensor) -> str:
    value = tensor.detach().cpu().contiguous()
    total = hashlib.sha256(f"{value.dtype} {tuple(value.shape)}\n".encode())
    total.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _hashed(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@lru_cache(maxsize=64)
def _signs(shape: tuple[int, ...]) -> np.ndarray:
    """RandomState is frozen by numpy's promise, so that these are the same everywhere."""
    size = int(np.prod(shape))
    draw = np.random.RandomState(zlib.crc32(repr(shape).encode()))
    raw = np.frombuffer(draw.bytes(-(-size * PROJECTIONS // 8)), np.uint8)
    bits = np.unpackbits(raw)[: size * PROJECTIONS].reshape(PROJECTIONS, size)
    return bits * 2.0 - 1.0
