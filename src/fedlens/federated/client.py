"""A client's work in one round: J steps of SGDM on its own shard, from the global parameters.

A pure function of (parameters, correction, shard, seed, round, client): whoever calls it, in
whatever process or machine, gets the same update.
FedProx adds μ(w − w_global) to each gradient (Li et al., 2020, https://arxiv.org/abs/1812.06127),
SCAFFOLD c − c_i (Karimireddy et al., 2020, https://arxiv.org/abs/1910.06378).
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass

import torch

from fedlens.data.images import Examples
from fedlens.models.classifier import Classifier
from fedlens.params import Params
from fedlens.rng import Stream
from fedlens.sparse.packing import Packing
from fedlens.sparse.sparse_sgd import sgdm
from fedlens.training.step import Diverged, Model, StepRules, Tally, local_step, set_lr


@dataclass(frozen=True)
class LocalRules:
    """How every client trains, whatever the round."""

    step: StepRules
    batch_size: int
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    proximal: float = 0.0  # FedProx's μ


@dataclass(frozen=True)
class Task:
    """What the server asks of one client in one round."""

    round: int
    client: int
    shard: torch.Tensor  # positions in the training set
    steps: int
    lr: float
    correction: Params | None = None  # c − c_i, added to each gradient


@dataclass(frozen=True)
class Update:
    """What a client answers; its tensors are lent, until the next update is asked for."""

    task: Task
    parameters: Params  # of a masked parameter, the trained entries
    tally: Tally
    fault: str | None = None  # why the client gave up


class Trainer:
    """One model instance, lent to one client after another.

    Parameters come and go packed: of one with a mask, only the trained entries.
    """

    def __init__(
        self,
        model: Classifier,
        examples: Examples,
        rules: LocalRules,
        seed: int,
        *,
        masks: Mapping[str, torch.Tensor] | None = None,
        compiled: bool = False,
    ) -> None:
        self.model = laid_out(model)
        self.examples = examples
        self.rules = rules
        self.seed = seed
        self.masks = {name: mask.to(self.device) for name, mask in (masks or {}).items()}
        self.compiled = compiled
        self.forward: Model = torch.compile(self.model) if compiled else self.model
        self.trained = trained(self.model)
        self.packing = Packing(self.trained, self.masks)
        self.optimizer = self._optimizer() if self.trained else None

    @property
    def device(self) -> torch.device:
        return self.model.head.weight.device

    def on(self, device: torch.device) -> "Trainer":
        """The same with a model instance of its own, there; examples are shared if they can be."""
        model, examples = deepcopy(self.model).to(device), self.examples.to(device)
        return Trainer(
            model, examples, self.rules, self.seed, masks=self.masks, compiled=self.compiled
        )

    def packed(self) -> dict[str, torch.Tensor]:
        """What the model has learned, as it travels."""
        return self.packing.pack(self.trained)

    def train(self, task: Task, parameters: Params) -> Update:
        rules, optimizer = self.rules, self.optimizer
        assert optimizer is not None
        self.packing.unpack(parameters, self.trained)
        optimizer.state.clear()  # every client begins with momentum 0
        set_lr(optimizer, task.lr)
        stream = client_stream(self.seed, task)
        order = local_order(len(task.shard), rules.batch_size, task.steps, stream)
        tally, fault = Tally(), None
        adjust = None
        if rules.proximal or task.correction or (self.masks and rules.step.clip_norm is not None):
            adjust = lambda: self._adjust(parameters, task.correction)  # noqa: E731
        try:
            for step, index in enumerate(torch.split(*order)):
                local_step(
                    self.forward, optimizer, self.examples, task.shard[index], rules.step, tally,
                    stream=stream, step=step, width=self.model.head.in_features, adjust=adjust,
                )  # fmt: skip
        except Diverged as reason:
            fault = str(reason)
        return Update(task, self.packed(), tally, fault)

    def _optimizer(self) -> torch.optim.Optimizer:
        rules = self.rules
        return sgdm(
            self.trained.items(),
            self.masks,
            lr=0.0,  # each task has its own
            momentum=rules.momentum,
            weight_decay=rules.weight_decay,
            nesterov=rules.nesterov,
        )

    @torch.no_grad()
    def _adjust(self, start: Params, correction: Params | None) -> None:
        """FedProx's and SCAFFOLD's terms; frozen entries are left out, for clipping's sake too."""
        for name, parameter in self.trained.items():
            if parameter.grad is None:
                continue
            gradient = self.packing.taken(name, parameter.grad)
            if self.rules.proximal:
                moved = self.packing.taken(name, parameter) - start[name]
                gradient.add_(moved, alpha=self.rules.proximal)
            if correction:
                gradient.add_(correction[name])
            parameter.grad = self.packing.spread(name, gradient, parameter)


def laid_out(model: Classifier) -> Classifier:
    """In the layout clients train in: on a CPU convolutions are faster so (benchmarks/vs_pfl.py).

    Sums over a tensor go through it as it lies, so the server's last bits depend on this too.
    """
    return model.to(memory_format=torch.channels_last)


def trained(model: Classifier) -> dict[str, torch.nn.Parameter]:
    """What clients train, and what travels."""
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def client_stream(seed: int, task: Task) -> Stream:
    return Stream(seed, ("client", task.round, task.client))


def local_order(
    size: int, batch_size: int, steps: int, stream: Stream
) -> tuple[torch.Tensor, list[int]]:
    """The places in a shard that `steps` batches take, one after another, and the batches' sizes.

    Passes without replacement, shuffled anew each time; the last batch of a pass may be smaller.
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


def effective_steps(steps: int, momentum: float, *, nesterov: bool = False) -> float:
    """‖a‖₁: if all J gradients of a client were g, it would move by lr·‖a‖₁·g.

    SGDM applies gradient t again at every later step: a_t = (1 − ρ^(J−t+1))/(1 − ρ); Nesterov's
    look-ahead gives 1 + ρ·a_t. Wang et al., 2020, https://arxiv.org/abs/2007.07481.
    """
    heavy_ball = (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
    return steps + momentum * heavy_ball if nesterov else heavy_ball
