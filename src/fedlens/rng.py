"""Random generators by address: generator(seed, purpose, *ids), without a global state.

A draw depends on its purpose (order of epoch 3, crop of step 17, client 42), not on earlier draws,
so a resumed run needs no stored generator state.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


def address(seed: int, purpose: str, *ids: int | str) -> int:
    """A 63-bit seed, different for every (seed, purpose, ids)."""
    text = repr((int(seed), purpose, *ids)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def generator(seed: int, purpose: str, *ids: int | str) -> torch.Generator:
    """A new generator on the CPU, so that all devices get the same numbers."""
    return torch.Generator().manual_seed(address(seed, purpose, *ids))


@contextmanager
def scoped(draw: torch.Generator) -> Iterator[None]:
    """Seeds torch's global generator from `draw` for code that uses no other, then restores it."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(int(torch.randint(2**62, (), generator=draw)))
    try:
        yield
    finally:
        torch.set_rng_state(before)


@dataclass(frozen=True)
class Stream:
    """All draws of one part of the work: epoch 3, or client 42 in round 7."""

    seed: int
    ids: tuple[int | str, ...]

    def draw(self, purpose: str, *more: int | str) -> torch.Generator:
        return generator(self.seed, purpose, *self.ids, *more)
