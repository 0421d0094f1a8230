"""A client's work in one round: J optimizer steps on its own shard, from the global parameters.

A pure function of (parameters, correction, shard, seed, round, client): whoever calls it, in
whatever process or machine, gets the same update.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import nn

from fedlens import params
from fedlens.data.examples import Examples
from fedlens.errors import FedlensError
from fedlens.federated import chains
from fedlens.federated.algorithms.fedprox import add_proximal_term
from fedlens.federated.chains import MOMENTUM, ROUND, ProximalTo
from fedlens.federated.client_statistics import ClientStatistic
from fedlens.federated.server import carried
from fedlens.federated.server.correction import Correction
from fedlens.federated.tasks import ClientTask, ClientUpdate
from fedlens.models import classifier
from fedlens.models.architectures import batch_norm, class_token
from fedlens.models.architectures.batch_norm import Mode
from fedlens.models.architectures.pool_order import pool_first
from fedlens.params import Params
from fedlens.rng import Stream
from fedlens.sparse.packing import Packing
from fedlens.training import optimizers
from fedlens.training.optimizers import ClientOptimizer, CountsEffectiveSteps, Sgd
from fedlens.training.step import Diverged, Model, StepSettings, Tally, local_step, set_lr

Shard = Callable[[int], torch.Tensor]  # client → positions of its examples in the training set


@dataclass(frozen=True)
class LocalTraining:
    """How every client trains, whatever the round."""

    step: StepSettings
    batch_size: int
    optimizer: ClientOptimizer
    proximal: float = 0.0  # FedProx's μ
    gradient_scale: float = 1.0  # gradients are multiplied by it before a correction is added
    proximal_to: ProximalTo = "start"  # of a chain: each client's own start, or the round's
    carry_momentum: bool = False  # of a chain: momentum passes from client to client

    def __post_init__(self) -> None:
        if self.carry_momentum and not (
            isinstance(self.optimizer, Sgd) and self.optimizer.momentum
        ):
            raise FedlensError(
                "carry_momentum=True passes SGD's momentum from client to client: train the "
                "clients with SGD and momentum > 0, or leave it out."
            )
        if self.proximal_to == "round" and not self.proximal:
            raise FedlensError(
                "proximal_to='round' says where FedProx's term pulls to: set proximal, or leave "
                "it out."
            )

    def corrected(self, correction: Correction | None) -> "LocalTraining":
        """With the terms of a correction that are the same in all rounds."""
        if correction is None:
            return self
        return replace(
            self,
            proximal=self.proximal + correction.proximal,
            gradient_scale=correction.gradient_scale,
        )

    @property
    def chained(self) -> bool:
        """Whether clients need more than the global model, so that they must train in chains."""
        return self.carry_momentum or self.proximal_to == "round"

    def beside(self, trained: Params) -> dict[str, torch.Tensor]:
        """What the first client of a chain receives beside the global parameters."""
        return chains.beside(
            trained, carry_momentum=self.carry_momentum, proximal_to=self.proximal_to
        )

    def effective_steps(self, steps: int) -> float | None:
        """‖a‖₁: with a constant gradient g, `steps` steps move the weights by lr·‖a‖₁·g.

        None where the optimizer does not define it.
        """
        if not isinstance(self.optimizer, CountsEffectiveSteps):
            return None
        return self.optimizer.effective_steps(steps)

    def scale(self, steps: int, lr: float) -> float | None:
        """lr·‖a‖₁; None where the optimizer does not define effective steps."""
        effective = self.effective_steps(steps)
        return None if effective is None else effective * lr


class Trainer:
    """One model instance that trains one client after another.

    Parameters come and go packed: of one with a mask, only the trained entries.
    """

    def __init__(
        self,
        model: nn.Module,
        examples: Examples,
        shard: Shard,
        training: LocalTraining,
        seed: int,
        *,
        masks: Mapping[str, torch.Tensor] | None = None,
        compiled: bool = False,
        mode: Mode = "frozen",
        statistic: ClientStatistic | None = None,
        shortcuts: bool = False,
    ) -> None:
        """`mode` is that of BatchNorm layers.

        `statistic` is computed after every client's training, and sent with its update.
        `shortcuts` are faster ways to the same step, equal up to rounding, where they apply: the
        last block for the class token alone, pooling before ReLU (both change `model`), and the
        optimizer's fused kernel.
        """
        self.model = in_training_layout(model)
        self.shortcuts = shortcuts
        # A statistic reads the inputs of layers, which the shorter block does not call.
        shorter = shortcuts and statistic is None and class_token.specialise(self.model)
        self.shortened = (shortcuts and pool_first(self.model)) or shorter
        self.examples = examples
        self.shard = shard
        self.training = training
        self.seed = seed
        self.masks = {name: mask.to(self.device) for name, mask in (masks or {}).items()}
        self.compiled = compiled
        self.statistic = statistic
        self.forward: Model = torch.compile(self.model) if compiled else self.model
        self.width = _dropout_width(model) if training.step.dropout else None
        self.trained = trainable_parameters(self.model)
        self.packing = Packing(self.trained, self.masks)
        self.mode = mode
        self.carried = classifier.carried(self.model, mode)
        self.returned = carried.returned(self.model, mode)
        self.own_names = batch_norm.own_names(self.model) if mode == "local" else []
        self.beside = params.copy(training.beside(self.packed()))  # what was received last
        self.optimizer = None
        if self.trained:  # each task has its own learning rate
            self.optimizer = training.optimizer.make(self.trained.items(), self.masks, lr=0.0)
        self.fused = shortcuts and self.optimizer is not None and optimizers.fuse(self.optimizer)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def on(self, device: torch.device, *, shortcuts: bool | None = None) -> "Trainer":
        """The same with a model instance of its own, there; examples are shared if they can be.

        `shortcuts` may be taken in addition; None: if this one takes them.
        """
        return Trainer(
            deepcopy(self.model).to(device),
            self.examples.to(device),
            self.shard,
            self.training,
            self.seed,
            masks=self.masks,
            compiled=self.compiled,
            mode=self.mode,
            statistic=self.statistic,
            shortcuts=self.shortcuts if shortcuts is None else shortcuts,
        )

    def packed(self) -> dict[str, torch.Tensor]:
        """The model's trainable parameters, as they travel."""
        return self.packing.pack(self.trained)

    def received(self) -> dict[str, torch.Tensor]:
        """All that a client is sent: trainable parameters, and what travels beside them."""
        return {**self.packed(), **self.carried, **self.beside}

    def sent(self) -> dict[str, torch.Tensor]:
        """All that a client sends back."""
        beside = {name: value for name, value in self.carried.items() if name in self.returned}
        momentum = {name: one for name, one in self.beside.items() if name.startswith(MOMENTUM)}
        return {**self.packed(), **beside, **momentum}

    def statistics_layout(self) -> dict[str, torch.Tensor]:
        """What an update has beside its parameters, on the meta device."""
        return {} if self.statistic is None else self.statistic.layout(self.model, self.packing)

    def train(self, task: ClientTask, parameters: Params) -> ClientUpdate:
        training, optimizer = self.training, self.optimizer
        assert optimizer is not None
        received = {**parameters, **(task.own or {})}
        parameters = {name: value.to(self.device) for name, value in received.items()}
        self.load(parameters)
        optimizer.state.clear()  # every client begins with momentum 0, unless it is carried along
        if training.carry_momentum:
            self._load_momentum(optimizer)
        set_lr(optimizer, task.lr)
        shard, stream = self.shard(task.client), client_stream(self.seed, task)
        order = local_order(len(shard), training.batch_size, task.steps, stream)
        tally, fault = Tally(), None
        adjust = None
        clips_masked = self.masks and training.step.clip_norm is not None
        changed = training.proximal or training.gradient_scale != 1 or task.correction
        if changed or clips_masked:
            adjust = lambda: self._adjust(parameters, task.correction)  # noqa: E731
        try:
            with batch_norm.updating(self.model, self.mode):
                for step, index in enumerate(torch.split(*order)):
                    local_step(
                        self.forward, optimizer, self.examples, shard[index], training.step, tally,
                        stream=stream, step=step, width=self.width, adjust=adjust,
                    )  # fmt: skip
        except Diverged as reason:
            fault = str(reason)
        if training.carry_momentum:
            self._keep_momentum(optimizer)
        statistics = {} if fault else self._statistics(shard, stream)
        return ClientUpdate(task, self.sent(), tally, fault, statistics=statistics)

    @torch.no_grad()
    def load(self, received: Params) -> None:
        """Writes what a client was sent into the model."""
        beside = {**self.carried, **self.beside}
        if fault := params.mismatch({**self.packing.layout, **beside}, received):
            raise ValueError(fault)
        self.packing.unpack({name: received[name] for name in self.trained}, self.trained)
        for name, value in beside.items():
            value.copy_(received[name])

    def _load_momentum(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's momentum is what was received.

        A sparse optimizer holds that of the trained entries, or, like any other, of whole tensors.
        """
        for name, parameter in self.trained.items():
            value = self.beside[MOMENTUM + name]
            like = parameter if value.numel() == parameter.numel() else value
            momentum = torch.empty_like(like, requires_grad=False).copy_(value.view(like.shape))
            optimizer.state[parameter]["momentum_buffer"] = momentum

    def _keep_momentum(self, optimizer: torch.optim.Optimizer) -> None:
        for name, parameter in self.trained.items():
            value = self.beside[MOMENTUM + name]
            value.copy_(optimizer.state[parameter]["momentum_buffer"].reshape(value.shape))

    def _statistics(self, shard: torch.Tensor, stream: Stream) -> dict[str, torch.Tensor]:
        """At the parameters that the model has now."""
        if self.statistic is None:
            return {}
        return self.statistic.compute(self.model, self.packing, self.examples, shard, stream)

    @torch.no_grad()
    def _adjust(self, start: Params, correction: Params | None) -> None:
        """FedProx's term and a correction; frozen entries become 0, so clipping ignores them."""
        anchor = ROUND if self.training.proximal_to == "round" else ""
        for name, parameter in self.trained.items():
            if parameter.grad is None:
                continue
            gradient = self.packing.taken(name, parameter.grad)
            if self.training.proximal:
                weights = self.packing.taken(name, parameter)
                add_proximal_term(gradient, weights, start[anchor + name], self.training.proximal)
            if self.training.gradient_scale != 1:
                gradient.mul_(self.training.gradient_scale)
            if correction:
                gradient.add_(correction[name].to(self.device))
            parameter.grad = self.packing.spread(name, gradient, parameter)


def in_training_layout(model: nn.Module) -> nn.Module:
    """Moves convolutions to channels_last, in place: faster on a CPU (benchmarks/vs_pfl.py).

    Sums over a tensor follow its memory layout, so the server's last bits depend on this too.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dim() == 4:  # `Module.to` would refuse 5-dimensional ones
            tensor.data = tensor.data.to(memory_format=torch.channels_last)
    return model


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require gradients: what clients train and what travels."""
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def client_stream(seed: int, task: ClientTask) -> Stream:
    return Stream(seed, ("client", task.round, task.client))


def local_order(
    size: int, batch_size: int, steps: int, stream: Stream
) -> tuple[torch.Tensor, list[int]]:
    """Positions in a shard for `steps` batches, one after another, and the batches' sizes.

    Passes without replacement, each shuffled anew; the last batch of a pass may be smaller.
    """
    if not size:
        raise ValueError("an empty shard has no batches")
    whole, rest = divmod(size, batch_size)
    one_pass = [batch_size] * whole + [rest] * (rest > 0)
    passes = -(-steps // len(one_pass))
    sizes = (one_pass * passes)[:steps]
    draws = (stream.draw("order", number) for number in range(passes))
    order = torch.cat([torch.randperm(size, generator=draw) for draw in draws])
    return order[: sum(sizes)], sizes


def _dropout_width(model: nn.Module) -> int:
    """The width of the features before the head, where dropout acts."""
    head = getattr(model, "head", None)
    if not isinstance(head, nn.Linear):
        raise FedlensError(
            "Dropout before the head needs a model with a linear layer called `head`: set dropout "
            "to 0, or use a fedlens.models.classifier.Classifier."
        )
    return head.in_features
