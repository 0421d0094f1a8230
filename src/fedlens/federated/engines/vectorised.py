"""Clients that train a linear head on features, many at once in batched products: Z = X Wᵀ + b.

The gradient of the cross-entropy is written out, (softmax(Z) − target)/n, so a step is two `bmm`s
for all clients. Draws and updates are those of `client.Trainer`, up to rounding.
"""

import math
from collections.abc import Iterator, Sequence

import torch

from fedlens.data.examples import FeatureExamples
from fedlens.errors import FedlensError
from fedlens.federated.algorithms.fedprox import add_proximal_term
from fedlens.federated.chains import MOMENTUM, ROUND, prefixed
from fedlens.federated.client import LocalTraining, Shard, client_stream, local_order
from fedlens.federated.tasks import ClientTask, ClientUpdate
from fedlens.params import Params
from fedlens.registry import RowSettings
from fedlens.runtime.threads import limited_threads
from fedlens.training.optimizers import Sgd
from fedlens.training.step import Diverged, Tally, dropout_mask

GROUP = 16  # clients at a time, so that memory does not grow with the cohort


class Vectorised:
    settings: RowSettings | None = None  # of the registry's row that made it

    def __init__(
        self,
        examples: FeatureExamples,
        shard: Shard,
        training: LocalTraining,
        seed: int,
        threads: int,
        *,
        names: tuple[str, str],
    ) -> None:
        """`names` are those of the head's weight and bias among the parameters."""
        optimizer(training)
        self.examples = examples
        self.shard = shard
        self.training = training
        self.seed = seed
        self.threads = threads
        self.names = names

    def updates(self, parameters: Params, tasks: Sequence[ClientTask]) -> Iterator[ClientUpdate]:
        for start in range(0, len(tasks), GROUP):
            with limited_threads(self.threads):
                group = Group(self, tasks[start : start + GROUP])
                updates = group.train(parameters)
            yield from updates

    def close(self) -> None:
        pass


def optimizer(training: LocalTraining) -> Sgd:
    """The clients' SGD; refuses any other optimizer."""
    if not isinstance(training.optimizer, Sgd):
        raise FedlensError(
            "Clients can train side by side with SGD only: choose SGD as their optimizer, or an "
            "engine that trains one client at a time."
        )
    return training.optimizer


class Group:
    """Some clients side by side: every tensor has them along its first axis.

    Those with most steps come first, so that the clients still training are a leading slice.
    """

    def __init__(self, engine: Vectorised, tasks: Sequence[ClientTask]) -> None:
        self.examples = engine.examples
        self.training = engine.training
        self.optimizer = optimizer(engine.training)
        self.names = engine.names
        self.tasks = tasks
        self.ranked = sorted(tasks, key=lambda task: -task.steps)
        self.shards = [engine.shard(task.client) for task in self.ranked]
        self.streams = [client_stream(engine.seed, task) for task in self.ranked]
        self.index, self.counts = self._batches()
        self.labels = self.examples.labels[self.index][..., None]
        places = torch.arange(self.index.shape[2], device=self.counts.device)
        self.real = places < self.counts[..., None]  # [J, M, B]; the rest is padding
        self.share = (self.real / self.counts.clamp(min=1)[..., None])[..., None]  # of the batch
        self.losses = torch.zeros(self.index.shape, device=self.index.device)
        self.hits = torch.zeros_like(self.index, dtype=torch.bool)

    @torch.no_grad()
    def train(self, parameters: Params) -> list[ClientUpdate]:
        device = self.examples.features.device
        start = [parameters[name].to(device) for name in self.names]
        sgd = self.optimizer
        count = len(self.ranked)
        heads = [value.expand(count, *value.shape).clone() for value in start]
        momenta = [torch.zeros_like(value) for value in heads]
        if self.training.carry_momentum:
            for name, value in zip(self.names, momenta, strict=True):
                value.copy_(parameters[MOMENTUM + name])
        anchor = start
        if self.training.proximal_to == "round":
            anchor = [parameters[ROUND + name].to(device) for name in self.names]
        corrections, plain = self._corrections(), self._plain
        lr = self.ranked[0].lr
        for step in range(self.ranked[0].steps):
            active = sum(task.steps > step for task in self.ranked)
            current = [value[:active] for value in heads]
            moving = [value[:active] for value in momenta]
            x, slope = self._slope(current, step)
            if plain:  # the gradient itself is not needed: it goes straight into the momentum
                moving[0].baddbmm_(slope.transpose(1, 2), x, beta=sgd.momentum)
                moving[1].mul_(sgd.momentum).add_(slope.sum(1))
                for value, momentum in zip(current, moving, strict=True):
                    momentum.add_(value, alpha=sgd.weight_decay)
                    value.sub_(momentum, alpha=lr)
                continue
            gradients = [torch.bmm(slope.transpose(1, 2), x), slope.sum(1)]
            self._adjust(gradients, current, anchor, corrections)
            for value, gradient, momentum in zip(current, gradients, moving, strict=True):
                gradient.add_(value, alpha=sgd.weight_decay)
                momentum.mul_(sgd.momentum).add_(gradient)
                ahead = gradient.add_(momentum, alpha=sgd.momentum)
                value.sub_(ahead if sgd.nesterov else momentum, alpha=lr)
        return self._updates(heads, momenta)

    @property
    def _plain(self) -> bool:
        training = self.training
        corrected = training.proximal or any(task.correction for task in self.ranked)
        corrected = corrected or training.gradient_scale != 1
        clipped = training.step.clip_norm is not None
        return not (corrected or self.optimizer.nesterov or clipped)

    def _slope(self, heads: Sequence[torch.Tensor], step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch X [M, B, D] of a step, and ∂(mean loss)/∂Z [M, B, C]; adds losses and hits."""
        weight, bias = heads
        active, (classes, width) = len(weight), weight.shape[1:]
        index, y = self.index[step, :active], self.labels[step, :active]
        smoothing = self.training.step.label_smoothing
        x = self.examples.features.index_select(0, index.reshape(-1)).view(*index.shape, width)
        if rate := self.training.step.dropout:
            for k, count in enumerate(self.counts[step, :active].tolist()):
                draw = self.streams[k].draw("dropout", step)
                x[k, :count] *= dropout_mask(count, width, rate, draw).to(x.device)
        logits = torch.baddbmm(bias[:, None], x, weight.transpose(1, 2))
        log_p = logits.log_softmax(2)
        self.hits[step, :active] = logits.argmax(2) == y[..., 0]
        self.losses[step, :active] = log_p.gather(2, y)[..., 0] * (smoothing - 1)
        if smoothing:
            self.losses[step, :active] -= smoothing * log_p.mean(2)
        slope = log_p.exp_()
        if smoothing:
            slope -= smoothing / classes
        slope.scatter_add_(2, y, slope.new_full((), smoothing - 1).expand_as(y))
        return x, slope.mul_(self.share[step, :active])

    def _adjust(
        self,
        gradients: Sequence[torch.Tensor],
        heads: Sequence[torch.Tensor],
        anchor: Sequence[torch.Tensor],
        corrections: Sequence[torch.Tensor] | None,
    ) -> None:
        """FedProx's term and a correction, then clipping: as `client.Trainer` does."""
        for k, gradient in enumerate(gradients):
            if self.training.proximal:
                weights = heads[k][: len(gradient)]
                add_proximal_term(gradient, weights, anchor[k], self.training.proximal)
            if self.training.gradient_scale != 1:
                gradient.mul_(self.training.gradient_scale)
            if corrections:
                gradient.add_(corrections[k][: len(gradient)])
        if (limit := self.training.step.clip_norm) is not None:
            squares = sum(gradient.square().flatten(1).sum(1) for gradient in gradients)
            factor = (limit / (torch.as_tensor(squares).sqrt() + 1e-6)).clamp(max=1)
            for gradient in gradients:
                gradient.mul_(factor.view(-1, *[1] * (gradient.ndim - 1)))

    def _corrections(self) -> list[torch.Tensor] | None:
        terms = [task.correction for task in self.ranked if task.correction]
        if not terms:
            return None
        device = self.examples.features.device
        return [torch.stack([one[name] for one in terms]).to(device) for name in self.names]

    def _batches(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions in the training set [J, M, B], and how many of them are real [J, M].

        Padding is an example of the client's own, so that no other client's data can interfere.
        """
        orders = [
            local_order(len(shard), self.training.batch_size, task.steps, stream)
            for task, shard, stream in zip(self.ranked, self.shards, self.streams, strict=True)
        ]
        longest = max(sizes[0] for _, sizes in orders)
        counts = torch.zeros(len(orders), self.ranked[0].steps, dtype=torch.int64)
        index = torch.zeros(*counts.shape, longest, dtype=torch.int64)
        for k, (task, (order, sizes)) in enumerate(zip(self.ranked, orders, strict=True)):
            counts[k, : task.steps] = torch.tensor(sizes)
            positions = self.shards[k][order]
            if len(positions) == task.steps * longest:
                index[k, : task.steps] = positions.view(task.steps, longest)
                continue
            index[k] = self.shards[k][0]
            for step, batch in enumerate(torch.split(positions, sizes)):
                index[k, step, : len(batch)] = batch
        device = self.examples.features.device
        by_step = index.transpose(0, 1).contiguous(), counts.T.contiguous()
        return by_step[0].to(device), by_step[1].to(device)

    def _updates(
        self, heads: Sequence[torch.Tensor], momenta: Sequence[torch.Tensor]
    ) -> list[ClientUpdate]:
        sent = dict(zip(self.names, heads, strict=True))
        if self.training.carry_momentum:
            sent |= prefixed(MOMENTUM, dict(zip(self.names, momenta, strict=True)))
        losses = self.losses.where(self.real, 0).sum(2).T.tolist()  # by client, then by step
        correct = (self.hits & self.real).sum((0, 2)).tolist()
        seen = self.counts.sum(0).tolist()
        updates: dict[int, ClientUpdate] = {}
        for k, task in enumerate(self.ranked):
            mine = losses[k][: task.steps]
            tally = Tally(sum(mine), correct[k], seen[k])
            lost = next((step for step, loss in enumerate(mine) if not loss < math.inf), None)
            fault = None if lost is None else str(Diverged(mine[lost], lost))
            own = {name: value[k] for name, value in sent.items()}
            updates[task.client] = ClientUpdate(task, own, tally, fault)
        return [updates[task.client] for task in self.tasks]
