"""A term that clients add to each gradient, computed from what the server remembers.

The local step is w ← w − η·(s·(g + μ(w − w_global)) + c), where the server sends c in every round,
and s and μ are the same in all rounds. SCAFFOLD, GHBM, FedCM and FedDyn differ only in c, s and μ,
in what the server and clients remember for c, and in what becomes of the aggregated change. All of
them travel as `ClientTask.correction`; s and μ are part of `client.LocalTraining`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from fedlens.federated.server.memory import Memory
from fedlens.federated.tasks import ClientTask
from fedlens.params import Params
from fedlens.registry import correction


@dataclass(frozen=True)
class Corrected:
    """What a round leaves behind."""

    change: Params  # of the global model
    memory: Memory
    clients: Mapping[int, Params] = field(default_factory=dict)  # new states of its clients


class CorrectionRound(Protocol):
    """One round: takes in updates, and then gives what is remembered of them."""

    def add(self, task: ClientTask, start: Params, end: Params, scale: float | None) -> None:
        """One client's update, from where its training began to where it ended.

        `scale` is a·η, as in `Correction.term`.
        """
        ...

    def result(self, change: Params, population: int) -> Corrected:
        """After all updates; `change` is the aggregated one, `population` counts all clients."""
        ...


class Correction(Protocol):
    """What a row of `correction` makes."""

    @property
    def needs_effective_steps(self) -> bool:
        """Whether it divides by how far a gradient moves a client, which only SGD defines."""
        ...

    @property
    def client_states(self) -> bool:
        """Whether clients remember something between the rounds they take part in."""
        ...

    @property
    def along_chains(self) -> bool:
        """Whether it also corrects clients that start where another stopped."""
        ...

    @property
    def returned(self) -> bool:
        """Whether clients send as much back, beside their updates."""
        ...

    @property
    def gradient_scale(self) -> float:
        """s: clients multiply their gradients by it before they add the term."""
        ...

    @property
    def proximal(self) -> float:
        """μ: clients add μ(w − w_global) to their gradients, as in FedProx."""
        ...

    def init(self, trained: Params) -> Memory:
        """What the server remembers before the first round."""
        ...

    def term(
        self, memory: Memory, trained: Params, own: Params | None, scale: float | None
    ) -> Params:
        """c, for a client with the state `own` (None: it has not taken part yet).

        `trained` are the global parameters. `scale` is a·η, where a are the client's effective
        steps (J without momentum): a constant gradient g moves it by a·η·g. None where the
        optimizer does not define it.
        """
        ...

    def begin(self, memory: Memory, trained: Params) -> CorrectionRound:
        """A round from the global parameters `trained`."""
        ...


@correction(label="no correction", order=1, name="none")
def no_correction() -> None:
    """Clients follow their own gradients."""
