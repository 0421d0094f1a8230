"""GHBM: generalised heavy-ball momentum, from global models τ rounds apart.

m = (w^t − w^(t−τ))/τ, and clients step by w ← w − η·g + β·m/J, so that a round adds β·m to the
model. With τ = 1/C, the number of rounds in which cyclic sampling visits every client once, m has
the gradients of all clients in equal parts; τ = 1 is the classical heavy ball.
Zaccone et al., 2023, https://arxiv.org/abs/2311.18578.
"""

from dataclasses import dataclass
from typing import Annotated

from fedlens.federated.server.correction import Corrected
from fedlens.federated.server.memory import Memory, last_models
from fedlens.federated.tasks import ClientTask
from fedlens.params import Params
from fedlens.registry import Range, correction


@correction(
    label="GHBM",
    paper="Zaccone et al., 2023, https://arxiv.org/abs/2311.18578",
    order=2,
    needs_effective_steps=True,
)
@dataclass(frozen=True, kw_only=True)
class GHBM:
    """c = −β·m/(a·η) with m = (w^t − w^(t−τ))/τ, where a = J for SGD without momentum.

    With momentum, a are the effective steps, so that a round still adds β·m. Before round τ, w^0
    stands for the models before it: m grows from 0, where the authors' code has m = 0. The server
    keeps τ models, also in checkpoints.
    """

    beta: Annotated[float, Range("[0, 1)"), "β, the share of the momentum that is added"] = 0.9
    tau: Annotated[
        int | None, Range("[1, inf)"), "τ, in rounds; null: as many as visit all clients, 1/C"
    ] = None

    needs_effective_steps = True
    client_states = False
    along_chains = False
    returned = False
    gradient_scale = 1.0
    proximal = 0.0

    def init(self, trained: Params) -> Memory:
        del trained
        return {}

    def term(
        self, memory: Memory, trained: Params, own: Params | None, scale: float | None
    ) -> Params:
        del own
        assert scale is not None
        assert self.tau is not None
        oldest = next(iter(memory.values()), trained)
        share = self.beta / (self.tau * scale)
        return {
            name: ((oldest[name].double() - value.double()) * share).to(value.dtype)
            for name, value in trained.items()
        }

    def begin(self, memory: Memory, trained: Params) -> "_Models":
        assert self.tau is not None
        return _Models(last_models(memory, trained, self.tau))


@dataclass(frozen=True)
class _Models:
    """The models that the next round looks back on; updates do not matter to it."""

    models: Memory

    def add(self, task: ClientTask, start: Params, end: Params, scale: float | None) -> None:
        del task, start, end, scale

    def result(self, change: Params, population: int) -> Corrected:
        del population
        return Corrected(change, self.models)
