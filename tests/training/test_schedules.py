import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler as torch_schedulers

from fedlens.training.schedules import SHAPES, Schedule

TOTAL = 30
TORCH: dict[str, tuple[Schedule, Callable]] = {
    "constant": (Schedule("constant"), lambda o: torch_schedulers.ConstantLR(o, factor=1.0)),
    "cosine": (
        Schedule("cosine", floor=0.1),
        lambda o: torch_schedulers.CosineAnnealingLR(o, TOTAL, eta_min=0.1),
    ),
    "step": (Schedule("step", gamma=0.5, stages=3), lambda o: torch_schedulers.StepLR(o, 10, 0.5)),
    "linear": (
        Schedule("linear", floor=0.2),
        lambda o: torch_schedulers.LinearLR(o, 1.0, 0.2, total_iters=TOTAL),
    ),
    "exponential": (
        Schedule("exponential", gamma=0.1),
        lambda o: torch_schedulers.ExponentialLR(o, 0.1 ** (1 / TOTAL)),
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_those_of_torch(name: str) -> None:
    ours, make = TORCH[name]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = make(optimizer)
    for step in range(TOTAL):
        assert ours.factor(step, TOTAL) == pytest.approx(theirs.get_last_lr()[0], abs=1e-6)
        optimizer.step()
        theirs.step()


def test_warm_up_by_hand() -> None:
    schedule = Schedule("cosine", warmup=0.2)
    assert [schedule.factor(step, 10) for step in (0, 1, 2)] == [0.5, 1.0, 1.0]
    assert schedule.factor(6, 10) == pytest.approx(0.5)
    assert schedule.factor(9, 10) == pytest.approx((1 + math.cos(math.pi * 7 / 8)) / 2)


@given(
    st.sampled_from(sorted(SHAPES)), st.floats(0, 0.9), st.floats(0, 1), st.floats(0.01, 1),
    st.integers(1, 5), st.integers(1, 200), st.data(),
)  # fmt: skip
def test_factors_lie_between_0_and_1(
    name: str,
    warmup: float,
    floor: float,
    gamma: float,
    stages: int,
    total: int,
    data: st.DataObject,
) -> None:
    step = data.draw(st.integers(0, total - 1))
    factor = Schedule(name, warmup, floor, gamma, stages).factor(step, total)
    assert 0 <= factor <= 1
