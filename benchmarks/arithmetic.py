"""What a machine can compute at most: operations of a step, and the rate of matrix products."""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedlens.models.architectures import onednn

Clock = Callable[[], float]

SIZE = 1536  # of a square product, large enough for the best rate
REPEATS = 5


def flop_of_step(model: nn.Module, inputs: Tensor) -> int:
    """Of all matrix products and convolutions, forward and backward; a multiply-add is two."""
    labels = torch.zeros(len(inputs), dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(inputs), labels).backward()
    return counter.get_total_flops()


def gemm_rate(clock: Clock = time.perf_counter) -> float:
    """FLOP per second of a large product in float32, with torch's threads.

    By MKL or by oneDNN, whichever is faster on this machine.
    """
    a, b = torch.randn(2, SIZE, SIZE)
    ways = [lambda: torch.mm(a, b)]
    if onednn.available():
        ways.append(lambda: onednn.product(a, b))
    return 2 * SIZE**3 / min(best_seconds(way, clock=clock) for way in ways)


def best_seconds(
    work: Callable[[], object], *, clock: Clock = time.perf_counter, repeats: int = REPEATS
) -> float:
    """The shortest of some times, after one call to warm up."""
    work()
    seconds = []
    for _ in range(repeats):
        start = clock()
        work()
        seconds.append(clock() - start)
    return min(seconds)
