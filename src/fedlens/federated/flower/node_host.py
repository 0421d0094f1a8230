"""What a node does for its clients; a reply depends on the data, the setup and the request only."""

from typing import Any, Literal, Protocol

from fedlens.federated.flower.setup import Setup
from fedlens.federated.tasks import ClientTask, ClientUpdate, Stage
from fedlens.models.heads import Statistics
from fedlens.params import Params
from fedlens.sparse.masks import Ranking
from fedlens.sparse.sensitivity.fisher import Sensitivity


class NodeHost(Protocol):
    """Holds the data of some clients and runs their tasks."""

    def introduction(self) -> dict[str, Any]:
        """`clients`: which clients it hosts; `identity`: of which dataset and partition."""
        ...

    def layout(self, setup: Setup, stage: Stage | Literal["calibration", "correction"]) -> Params:
        """Tensors with the names, types and shapes of what a node is sent in a stage."""
        ...

    def train(
        self, setup: Setup, stage: Stage, task: ClientTask, parameters: Params
    ) -> ClientUpdate:
        """Runs `task`; the update's task has the client's number of examples filled in."""
        ...

    def statistics(self, setup: Setup, client: int) -> Statistics: ...

    def sensitivity(
        self, setup: Setup, client: int, round_: int, parameters: Params
    ) -> Sensitivity: ...

    def ranking(self, setup: Setup, client: int) -> Ranking: ...
