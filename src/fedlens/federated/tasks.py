"""Clients outside this process: what the server may ask of them, and what whoever hosts them does.

Between the two travel a setup (once: the config, a prepared head, masks) and tensors; training data
and labels stay where they are.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from safetensors.torch import load, save

from fedlens.federated.client import Update
from fedlens.federated.engines.serial import Engine
from fedlens.models.heads import Statistics
from fedlens.params import Params
from fedlens.sparse.fisher import Sensitivity
from fedlens.sparse.masks import Preference

CONFIG = "config"  # among a setup's tensors, the config's text


@dataclass(frozen=True, eq=False)
class Setup:
    """All that a host must know, besides its own data, to do its clients' work."""

    config: str
    tensors: Params

    @cached_property
    def content(self) -> bytes:
        text = torch.tensor(list(self.config.encode()), dtype=torch.uint8)
        tensors = {name: value.detach().cpu().contiguous() for name, value in self.tensors.items()}
        return save({**tensors, CONFIG: text})

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Setup) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @classmethod
    def of(cls, content: bytes) -> "Setup":
        tensors = load(content)
        found = cls(bytes(tensors.pop(CONFIG).tolist()).decode(), tensors)
        found.__dict__["content"] = content  # what came is what it is called by
        return found


class Crowd(Protocol):
    """The clients, as the server sees them; answers come in the order of the clients asked."""

    def prepare(self, setup: Setup) -> None:
        """What every later question is meant under."""
        ...

    def statistics(self, width: int, classes: int) -> Iterator[Statistics]:
        """Of every client's features, `width` of each example, for heads in closed form."""
        ...

    def sensitivities(
        self, clients: Sequence[int], number: int, parameters: Params
    ) -> Iterator[Sensitivity]:
        """Of the model with these parameters, in calibration round `number`."""
        ...

    def ballots(self, clients: Sequence[int], like: Preference) -> Iterator[Preference]:
        """Whole preferences, each calibrated by one client alone."""
        ...

    def engine(self, stage: str) -> Engine:
        """Carries out tasks of a stage: of the "rounds", or of a "head" trained before them."""
        ...


@dataclass(frozen=True)
class Work:
    """A task as it travels: the shard is the host's own."""

    stage: str
    round: int
    client: int
    steps: int
    lr: float


class Host(Protocol):
    """Whoever holds clients' data; an answer is a function of data, setup and question alone."""

    def introduction(self) -> dict[str, Any]:
        """Which clients it hosts, of which world."""
        ...

    def layout(self, setup: Setup, stage: str) -> Params:
        """Names, types and shapes of what travels in a stage."""
        ...

    def train(
        self, setup: Setup, work: Work, parameters: Params, correction: Params | None
    ) -> Update: ...

    def statistics(self, setup: Setup, client: int) -> Statistics: ...

    def sensitivity(
        self, setup: Setup, client: int, number: int, parameters: Params
    ) -> Sensitivity: ...

    def ballot(self, setup: Setup, client: int) -> Preference: ...
