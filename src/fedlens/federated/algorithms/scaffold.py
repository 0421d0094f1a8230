"""SCAFFOLD's control variates: estimates of each client's gradient c_i, and of their mean c.

Clients add c − c_i to every gradient. Afterwards c_i ← c_i − c + (w − y_i)/(a·η), where y_i is the
client's model and a its effective steps (J without momentum), and c ← c + Σ Δc_i / K.
Karimireddy et al., 2020, https://arxiv.org/abs/1910.06378, option II.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from fedlens import params
from fedlens.federated.server.correction import Corrected
from fedlens.federated.server.memory import Memory
from fedlens.federated.tasks import ClientTask
from fedlens.params import Params

CONTROL = "control"


class ClientMemory(Protocol):
    """What clients remember between the rounds they take part in."""

    def get(self, client: int) -> Params | None:
        """None: the client has not taken part yet."""
        ...

    def updated(self, states: Mapping[int, Params]) -> "ClientMemory":
        """A memory with these states instead; this one stays as it is."""
        ...


@dataclass(frozen=True)
class InMemory:
    """Clients' states in a dictionary."""

    states: Mapping[int, Params] = field(default_factory=dict)

    def get(self, client: int) -> Params | None:
        return self.states.get(client)

    def updated(self, states: Mapping[int, Params]) -> "InMemory":
        return InMemory({**self.states, **states})


def correction(control: Params, own: Params | None) -> dict[str, torch.Tensor]:
    """c − c_i; a client that never took part has c_i = 0."""
    return {name: value - own[name] if own else value.clone() for name, value in control.items()}


def new_control(
    correction: Params, start: Params, end: Params, scale: float
) -> dict[str, torch.Tensor]:
    """A client's new c_i, from where its training began and ended; `scale` is a·η."""
    return {name: (start[name] - end[name]) / scale - value for name, value in correction.items()}


class ControlChange:
    """Σ Δc_i of the clients of one round, and their new controls."""

    def __init__(self, control: Params) -> None:
        self.control = control
        self.sums = params.zeros_like(control, torch.float64)
        self.clients: dict[int, dict[str, torch.Tensor]] = {}

    def add(
        self, client: int, correction: Params, start: Params, end: Params, scale: float
    ) -> None:
        own = new_control(correction, start, end, scale)
        for name, value in self.control.items():
            self.sums[name].add_(own[name] - (value - correction[name]))
        self.clients[client] = own

    def result(self, population: int) -> dict[str, torch.Tensor]:
        """c + Σ Δc_i / K, where K counts all clients."""
        return {
            name: value.clone().add_(self.sums[name] / population)
            for name, value in self.control.items()
        }


@dataclass(frozen=True)
class SCAFFOLD:
    """c_server − c_i as a correction, chosen by `algorithm.scaffold`."""

    needs_effective_steps = True
    client_states = True
    along_chains = True
    returned = True  # clients send Δc_i
    gradient_scale = 1.0
    proximal = 0.0

    def init(self, trained: Params) -> Memory:
        return {CONTROL: params.zeros_like(trained)}

    def term(
        self, memory: Memory, trained: Params, own: Params | None, scale: float | None
    ) -> Params:
        del trained, scale
        return correction(memory[CONTROL], own)

    def begin(self, memory: Memory, trained: Params) -> "_Controls":
        del trained
        return _Controls(ControlChange(memory[CONTROL]))


@dataclass(frozen=True)
class _Controls:
    """The controls of one round's clients, wherever each of them starts."""

    controls: ControlChange

    def add(self, task: ClientTask, start: Params, end: Params, scale: float | None) -> None:
        assert task.correction is not None
        assert scale is not None
        self.controls.add(task.client, task.correction, start, end, scale)

    def result(self, change: Params, population: int) -> Corrected:
        control = self.controls.result(population)
        return Corrected(change, {CONTROL: control}, self.controls.clients)
