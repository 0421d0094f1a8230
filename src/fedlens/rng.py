"""Random streams by address: generator(seed, purpose, *ids), never a global state.

A draw depends on *what it is for* (order of epoch 3, crop of step 17, client 42), not on what was
drawn before it, so a resumed run needs no snapshot of any generator.
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
    """A fresh CPU generator: draws are small and made on the CPU, so all devices see the same."""
    return torch.Generator().manual_seed(address(seed, purpose, *ids))


@contextmanager
def scoped(draw: torch.Generator) -> Iterator[None]:
    """Lends `draw` to library code that can only use torch's global generator, then restores it."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(int(torch.randint(2**62, (), generator=draw)))
    try:
        yield
    finally:
        torch.set_rng_state(before)


@dataclass(frozen=True)
class Stream:
    """The draws of one actor in one stretch of work: epoch 3, or client 42 in round 7."""

    seed: int
    ids: tuple[int | str, ...]

    def draw(self, purpose: str, *more: int | str) -> torch.Generator:
        return generator(self.seed, purpose, *self.ids, *more)
