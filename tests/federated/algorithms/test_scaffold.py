import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlens import params
from fedlens.federated.algorithms.scaffold import ControlChange, InMemory, correction


def value(number: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor([number], dtype=torch.float64)}


class Controls:
    """c and all c_i, round by round."""

    def __init__(self, clients: int) -> None:
        self.clients = clients
        self.mean = value(0.0)
        self.memory = InMemory()
        self.change = ControlChange(self.mean)

    def correction(self, client: int) -> dict[str, torch.Tensor]:
        return correction(self.mean, self.memory.get(client))

    def own(self, client: int) -> float:
        return self.memory.states[client]["w"].item()

    def learn(self, client: int, start: float, end: float, scale: float) -> None:
        self.change.add(client, self.correction(client), value(start), value(end), scale)

    def close_round(self) -> None:
        self.mean = self.change.result(self.clients)
        self.memory = self.memory.updated(self.change.clients)
        self.change = ControlChange(self.mean)


def test_option_two_by_hand() -> None:
    """Two clients, a·η = 0.2, both from w = 1."""
    held = Controls(2)
    held.learn(0, 1.0, 0.6, 0.2)  # c₀ = 0 − 0 + 0.4/0.2 = 2
    held.learn(1, 1.0, 1.2, 0.2)  # c₁ = −1
    held.close_round()
    assert held.own(0) == pytest.approx(2.0)
    assert held.own(1) == pytest.approx(-1.0)
    assert held.mean["w"].item() == pytest.approx(0.5)
    assert held.correction(0)["w"].item() == pytest.approx(-1.5)
    assert held.correction(1)["w"].item() == pytest.approx(1.5)
    held.learn(0, 1.0, 0.8, 0.2)  # alone: c₀ = 2 − 0.5 + 0.2/0.2 = 2.5, and c = 0.5 + 0.5/2
    held.close_round()
    assert held.own(0) == pytest.approx(2.5)
    assert held.own(1) == pytest.approx(-1.0)
    assert held.mean["w"].item() == pytest.approx(0.75)


def test_controls_take_effect_when_the_round_closes() -> None:
    held = Controls(2)
    held.learn(0, 1.0, 0.0, 0.5)
    assert held.correction(0)["w"].item() == held.correction(1)["w"].item() == 0.0
    assert not held.memory.states
    held.close_round()
    assert held.correction(0)["w"].item() == pytest.approx(1.0 - 2.0)
    assert held.correction(1)["w"].item() == pytest.approx(1.0)  # it never took part: c − 0
    held.close_round()  # nothing was learned since
    assert held.mean["w"].item() == pytest.approx(1.0)


def test_a_correction_is_the_caller_s_own() -> None:
    held = Controls(1)
    held.correction(0)["w"].add_(5.0)
    assert held.mean["w"].item() == 0.0


rounds = st.lists(
    st.dictionaries(st.integers(0, 4), st.floats(-3, 3), min_size=1), min_size=1, max_size=6
)


@given(rounds)
def test_the_mean_control_is_the_mean_of_the_clients_controls(
    played: list[dict[int, float]],
) -> None:
    """Whoever takes part: all start from 0, and c moves with every c_i."""
    held = Controls(5)
    for ends in played:
        for client, end in ends.items():
            held.learn(client, 1.0, end, 0.5)
        held.close_round()
        mean = sum(held.own(client) for client in held.memory.states) / 5
        assert held.mean["w"].item() == pytest.approx(mean, abs=1e-9)


def quadratics(scaffold: bool) -> float:
    """Clients with a(w − b)²/2, ten steps each round; where the federation ends up."""
    curvature, centre, lr, steps = (1.0, 4.0, 0.5), (3.0, -1.0, 2.0), 0.1, 10
    held = Controls(3)
    w = 0.0
    for _ in range(300):
        ends = []
        for client, (a, b) in enumerate(zip(curvature, centre, strict=True)):
            correction = held.correction(client)["w"].item() if scaffold else 0.0
            y = w
            for _ in range(steps):
                y -= lr * (a * (y - b) + correction)
            if scaffold:
                held.learn(client, w, y, steps * lr)
            ends.append(y)
        held.close_round()
        w = sum(ends) / 3
    return w


def test_controls_lead_to_the_common_optimum_where_averaging_does_not() -> None:
    """Σ a·b / Σ a = (3 − 4 + 1)/5.5 = 0."""
    assert quadratics(scaffold=True) == pytest.approx(0.0, abs=1e-6)
    assert abs(quadratics(scaffold=False)) > 0.1


def test_a_round_leaves_earlier_controls_and_memories_alone() -> None:
    held = Controls(2)
    held.learn(0, 1.0, 0.6, 0.2)
    held.close_round()
    mean, memory, before = held.mean, held.memory, params.digest(held.mean)
    held.learn(0, 1.0, 0.1, 0.2)
    held.close_round()
    assert params.digest(mean) == before
    assert memory.states[0]["w"].item() == pytest.approx(2.0)
