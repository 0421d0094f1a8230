"""SCAFFOLD's control variates: estimates of each client's gradient, and of the mean gradient.

Clients add c − c_i to every gradient. Afterwards c_i ← c_i − c + (w − y_i)/(a·η), where y_i is the
client's model and a its effective steps (J without momentum), and c ← c + Σ Δc_i / K.
Karimireddy et al., 2020, https://arxiv.org/abs/1910.06378, option II.
"""

from typing import Protocol

import torch

from fedlens import params
from fedlens.params import Params


class Memory(Protocol):
    """What clients remember between the rounds they take part in."""

    def get(self, client: int) -> Params | None: ...

    def put(self, client: int, state: Params) -> None: ...


class Controls:
    def __init__(self, like: Params, clients: int, memory: Memory) -> None:
        self.mean = params.zeros_like(like)  # c
        self.clients = clients
        self.memory = memory
        self.updated: dict[int, dict[str, torch.Tensor]] = {}  # in force from the next round on
        self.learned = params.zeros_like(like, torch.float64)  # Σ Δc_i of the round under way

    def correction(self, client: int) -> dict[str, torch.Tensor]:
        """c − c_i; a client that never took part has c_i = 0."""
        own = self.memory.get(client)
        return {
            name: value - own[name] if own else value.clone() for name, value in self.mean.items()
        }

    def learn(
        self, client: int, correction: Params, start: Params, end: Params, scale: float
    ) -> None:
        """A client's new control, from where its training began and ended; `scale` is a·η."""
        updated = {}
        for name, mean in self.mean.items():
            own = mean - correction[name]
            updated[name] = (start[name] - end[name]) / scale - correction[name]
            self.learned[name].add_(updated[name] - own)
        self.updated[client] = updated

    def close_round(self) -> None:
        for client, own in self.updated.items():
            self.memory.put(client, own)
        self.updated.clear()
        for name, mean in self.mean.items():
            mean.add_(self.learned[name] / self.clients)
            self.learned[name].zero_()
