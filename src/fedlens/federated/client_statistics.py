"""What some aggregators need of a client beside its update, computed where its data are.

RegMean reads the second moments of layers' inputs, Fisher-weighted averaging the diagonal Fisher
information, both at the parameters that the client ends with. They travel in float32.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from fedlens.arithmetic.input_moments import moment_shapes, moments_at
from fedlens.data.examples import Examples
from fedlens.errors import FedlensError, suggest
from fedlens.models.architectures.mode import evaluating
from fedlens.rng import Stream
from fedlens.sparse.packing import Packing
from fedlens.sparse.sensitivity.fisher import sensitivity
from fedlens.sparse.sensitivity.per_example_gradients import SquaredGradients

EXAMPLES = 256  # of a client's, unless another number is asked for
BATCH = 64


class ClientStatistic(Protocol):
    """A statistic of the model on a client's examples; `packing` names the trained parameters."""

    def layout(self, model: nn.Module, packing: Packing) -> dict[str, torch.Tensor]:
        """Tensors on the meta device with the names, types and shapes of what is sent."""
        ...

    def compute(
        self,
        model: nn.Module,
        packing: Packing,
        examples: Examples,
        shard: torch.Tensor,
        stream: Stream,
    ) -> dict[str, torch.Tensor]:
        """Of the model as it is, on the examples at `shard`; in the layout's order."""
        ...


@dataclass(frozen=True)
class InputMoments:
    """E[x xᵀ] of the inputs of every linear map that is trained; 0 for layers never called."""

    examples: int | None = EXAMPLES  # of each client; None: all

    def layout(self, model: nn.Module, packing: Packing) -> dict[str, torch.Tensor]:
        shapes = moment_shapes(model, packing.layout)
        return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}

    def compute(
        self,
        model: nn.Module,
        packing: Packing,
        examples: Examples,
        shard: torch.Tensor,
        stream: Stream,
    ) -> dict[str, torch.Tensor]:
        index = _drawn(shard, self.examples, stream)
        with evaluating(model):
            found = moments_at(model, examples, index, BATCH, parameters=packing.layout)
        return {
            name: found[name].float() if name in found else torch.zeros(like.shape)
            for name, like in self.layout(model, packing).items()
        }


@dataclass
class FisherInformation:
    """E[(∂ log p(y|x)/∂w)²] with y drawn from the model, of every trained entry."""

    examples: int | None = EXAMPLES  # of each client; None: all
    # Of the model that was asked for last: planning the gradients takes a few backward passes.
    _squares: SquaredGradients | None = field(default=None, init=False, repr=False)

    def layout(self, model: nn.Module, packing: Packing) -> dict[str, torch.Tensor]:
        del model
        return {name: torch.empty(v.shape, device="meta") for name, v in packing.layout.items()}

    def compute(
        self,
        model: nn.Module,
        packing: Packing,
        examples: Examples,
        shard: torch.Tensor,
        stream: Stream,
    ) -> dict[str, torch.Tensor]:
        index = _drawn(shard, self.examples, stream)
        with evaluating(model):
            if self._squares is None or self._squares.model is not model:
                sample = examples.batch(index[:2])
                self._squares = SquaredGradients(model, list(packing.layout), sample)
            scores = sensitivity(
                self._squares,
                examples,
                index=index,
                target="log_prob",
                stream=stream,
                micro_batch=BATCH,
            ).mean()
        device = next(model.parameters()).device
        return {
            name: packing.taken(name, scores[name].to(device, torch.float32))
            for name in packing.layout
        }


STATISTICS: Mapping[str, Callable[[int | None], ClientStatistic]] = {
    "fisher": FisherInformation,
    "input_moments": InputMoments,
}


def client_statistic(needs: str | None, examples: int | None = EXAMPLES) -> ClientStatistic | None:
    """The statistic that a row's trait `needs` names; None for rows that need none."""
    if needs is None:
        return None
    if needs not in STATISTICS:
        raise FedlensError(f"There is no client statistic '{needs}': {suggest(needs, STATISTICS)}")
    return STATISTICS[needs](examples)


def _drawn(shard: torch.Tensor, count: int | None, stream: Stream) -> torch.Tensor:
    """All positions, or so many of them, drawn without replacement."""
    if count is None or len(shard) <= count:
        return shard
    return shard[torch.randperm(len(shard), generator=stream.draw("statistics"))[:count]]
