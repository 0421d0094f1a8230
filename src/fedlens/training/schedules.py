"""Learning rates as pure functions of the step, so that a resumed run needs no scheduler state.

lr(t) = lr · (t + 1)/W during W warm-up steps, then lr · shape(p) with p = (t − W)/(T − W).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from fedlens.registry import Range


@dataclass
class Schedule:
    name: str = "cosine"
    warmup: Annotated[float, Range("[0, 1)")] = 0.0  # fraction of all steps
    floor: Annotated[float, Range("[0, 1]")] = 0.0  # where cosine and linear end, in units of lr
    gamma: Annotated[float, Range("(0, 1]")] = 0.1  # the factor of one drop (step), or at the end
    # (exponential)
    stages: Annotated[int, Range("[1, inf)")] = 3  # number of plateaus (step)

    def factor(self, step: int, total: int) -> float:
        """The factor that multiplies lr at `step` of `total`."""
        warmup = round(self.warmup * total)
        if step < warmup:
            return (step + 1) / warmup
        return SHAPES[self.name](self, (step - warmup) / max(1, total - warmup))


SHAPES: dict[str, Callable[[Schedule, float], float]] = {
    "constant": lambda s, p: 1.0,
    "cosine": lambda s, p: s.floor + (1 - s.floor) * (1 + math.cos(math.pi * p)) / 2,
    "step": lambda s, p: s.gamma ** int(p * s.stages),
    "linear": lambda s, p: 1 - (1 - s.floor) * p,
    "exponential": lambda s, p: s.gamma**p,
}
