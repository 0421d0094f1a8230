import math

import pytest
import torch

from fedlens import params
from fedlens.federated.server.optimizers import ServerOptimizer, make_server_optimizer, server_step
from fedlens.params import Params
from fedlens.registry import server_optimizer

CHANGES = [0.5, -0.2, 0.3, 0.0, -1.5, 1e-5, 0.7]


NAMES = ("sgd", "momentum", "adam", "yogi")


class Steps:
    """Parameters and moments, step by step."""

    def __init__(self, start: Params, optimizer: ServerOptimizer, lr: float = 1.0) -> None:
        self.parameters, self.optimizer, self.lr = start, optimizer, lr
        self.moments = optimizer.init(start)

    def step(self, change: Params) -> None:
        self.parameters, self.moments = server_step(
            self.parameters, self.moments, change, self.optimizer, self.lr
        )


def played(name: str, **settings: float) -> list[float]:
    """A single parameter, from 1, after each of the changes."""
    steps = Steps({"w": torch.ones(1, dtype=torch.float64)}, *make_server_optimizer(name, settings))
    values = []
    for change in CHANGES:
        steps.step({"w": torch.tensor([change], dtype=torch.float64)})
        values.append(steps.parameters["w"].item())
    return values


def test_the_rows() -> None:
    assert tuple(server_optimizer.names) == NAMES


@pytest.mark.parametrize("lr", [1.0, 0.3])
def test_averaging_adds_the_change(lr: float) -> None:
    w, expected = 1.0, []
    for change in CHANGES:
        w += lr * change
        expected.append(w)
    assert played("sgd", lr=lr) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("lr", [1.0, 0.3])
def test_momentum_remembers_earlier_changes(lr: float) -> None:
    w, v, expected = 1.0, 0.0, []
    for change in CHANGES:
        v = 0.8 * v + change
        w += lr * v
        expected.append(w)
    assert played("momentum", lr=lr, momentum=0.8) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["adam", "yogi"])
@pytest.mark.parametrize("lr", [1.0, 0.01])
@pytest.mark.parametrize("tau", [1e-3, 0.1])
def test_adaptive_rows_follow_reddi_et_al(name: str, lr: float, tau: float) -> None:
    """m ← β₁m + (1 − β₁)Δ; w ← w + η m/(√v + τ), from v₀ = τ², no bias correction."""
    beta1, beta2 = 0.9, 0.95
    w, m, v, expected = 1.0, 0.0, tau**2, []
    for change in CHANGES:
        m = beta1 * m + (1 - beta1) * change
        if name == "adam":
            v = beta2 * v + (1 - beta2) * change**2
        else:
            sign = (v > change**2) - (v < change**2)
            v = v - (1 - beta2) * change**2 * sign
        w += lr * m / (math.sqrt(v) + tau)
        expected.append(w)
    settings = {"lr": lr, "momentum": beta1, "beta2": beta2, "tau": tau}
    assert played(name, **settings) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_a_server_leaves_its_start_and_the_change_alone(name: str) -> None:
    start = {"w": torch.randn(3), "b": torch.randn(2)}
    change = {key: torch.randn_like(value, dtype=torch.float64) for key, value in start.items()}
    before = params.digest(start), params.digest(change)
    steps = Steps(start, *make_server_optimizer(name))
    for _ in range(3):
        moments = {kind: params.digest(values) for kind, values in steps.moments.items()}
        earlier = steps.moments
        steps.step(change)
        assert {kind: params.digest(values) for kind, values in earlier.items()} == moments
    assert (params.digest(start), params.digest(change)) == before
    assert steps.parameters["w"].dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
def test_parameters_and_moments_are_all_a_server_goes_on_from(name: str) -> None:
    draw = torch.Generator().manual_seed(0)
    start = {"w": torch.randn(4, generator=draw)}
    changes = [{"w": torch.randn(4, generator=draw, dtype=torch.float64)} for _ in range(6)]
    whole = Steps(start, *make_server_optimizer(name))
    for change in changes[:3]:
        whole.step(change)
    resumed = Steps(whole.parameters, *make_server_optimizer(name))
    assert set(resumed.moments) == set(whole.moments)
    resumed.moments = whole.moments
    for change in changes[3:]:
        whole.step(change)
        resumed.step(change)
    assert params.digest(resumed.parameters) == params.digest(whole.parameters)


def test_a_step_keeps_the_memory_layout() -> None:
    """Sums over a tensor go through its memory, so later norms depend on it."""
    start = {"w": torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last)}
    steps = Steps(start, *make_server_optimizer("adam", {"lr": 0.1}))
    steps.step({"w": torch.randn(4, 3, 3, 3, dtype=torch.float64)})
    assert steps.parameters["w"].stride() == start["w"].stride()
