"""The number of threads torch computes with; it affects the last bits of a result."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def available() -> int:
    """Cores that this process may use and torch uses; a scheduler may allow fewer than exist."""
    # Not every system reports the affinity.
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(allowed or 1, torch.get_num_threads())


@contextmanager
def limited_threads(threads: int) -> Iterator[None]:
    """Use this many threads while the context lasts, then as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
