"""How many threads torch computes with: their number decides the last bits of a result."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def limited_threads(threads: int) -> Iterator[None]:
    """So many while the context lasts, then as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
