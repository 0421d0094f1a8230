"""A cohort that trains linear heads on features, as one batched product: Z = X Wᵀ + b.

The gradient of the cross-entropy is written out, (softmax(Z) − target)/n, so a step is two `bmm`s
for all clients together. Draws are those of `client.Trainer`, and so are the updates, but for
rounding.
"""

import math
from collections.abc import Iterator, Sequence

import torch

from fedlens.data.examples import FeatureExamples
from fedlens.federated.client import LocalRules, Task, Update, client_stream, local_order
from fedlens.params import Params
from fedlens.runtime.threads import limited_threads
from fedlens.training.step import Diverged, Tally, dropout_mask

GROUP = 16  # clients at a time, so that memory does not grow with the cohort
NAMES = ("head.weight", "head.bias")


class Vectorised:
    def __init__(
        self, examples: FeatureExamples, rules: LocalRules, seed: int, threads: int
    ) -> None:
        self.examples = examples
        self.rules = rules
        self.seed = seed
        self.threads = threads

    def updates(self, parameters: Params, tasks: Sequence[Task]) -> Iterator[Update]:
        for start in range(0, len(tasks), GROUP):
            with limited_threads(self.threads):
                group = Group(self.examples, self.rules, self.seed, tasks[start : start + GROUP])
                answers = group.train(parameters)
            yield from answers

    def close(self) -> None:
        pass


class Group:
    """Some clients side by side: every tensor has them along its first axis.

    Those with most steps come first, so that whoever is still at work is a leading slice.
    """

    def __init__(
        self, examples: FeatureExamples, rules: LocalRules, seed: int, tasks: Sequence[Task]
    ) -> None:
        self.examples = examples
        self.rules = rules
        self.tasks = tasks
        self.ranked = sorted(tasks, key=lambda task: -task.steps)
        self.streams = [client_stream(seed, task) for task in self.ranked]
        self.index, self.counts = self._batches()
        self.labels = examples.labels[self.index][..., None]
        places = torch.arange(self.index.shape[2], device=self.counts.device)
        self.real = places < self.counts[..., None]  # [J, M, B]; the rest is padding
        self.share = (self.real / self.counts.clamp(min=1)[..., None])[..., None]  # of the batch
        self.losses = torch.zeros(self.index.shape, device=self.index.device)
        self.hits = torch.zeros_like(self.index, dtype=torch.bool)

    @torch.no_grad()
    def train(self, parameters: Params) -> list[Update]:
        start = [parameters[name] for name in NAMES]
        count = len(self.ranked)
        heads = [value.expand(count, *value.shape).clone() for value in start]
        momenta = [torch.zeros_like(value) for value in heads]
        corrections, plain = self._corrections(), self._plain
        lr = self.ranked[0].lr
        for step in range(self.ranked[0].steps):
            active = sum(task.steps > step for task in self.ranked)
            current = [value[:active] for value in heads]
            moving = [value[:active] for value in momenta]
            x, slope = self._slope(current, step)
            if plain:  # nobody looks at the gradient itself: it goes straight into the momentum
                moving[0].baddbmm_(slope.transpose(1, 2), x, beta=self.rules.momentum)
                moving[1].mul_(self.rules.momentum).add_(slope.sum(1))
                for value, momentum in zip(current, moving, strict=True):
                    momentum.add_(value, alpha=self.rules.weight_decay)
                    value.sub_(momentum, alpha=lr)
                continue
            gradients = [torch.bmm(slope.transpose(1, 2), x), slope.sum(1)]
            self._adjust(gradients, current, start, corrections)
            for value, gradient, momentum in zip(current, gradients, moving, strict=True):
                gradient.add_(value, alpha=self.rules.weight_decay)
                momentum.mul_(self.rules.momentum).add_(gradient)
                ahead = gradient.add_(momentum, alpha=self.rules.momentum)
                value.sub_(ahead if self.rules.nesterov else momentum, alpha=lr)
        return self._answers(heads)

    @property
    def _plain(self) -> bool:
        rules = self.rules
        corrected = rules.proximal or any(task.correction for task in self.ranked)
        return not (corrected or rules.nesterov or rules.step.clip_norm is not None)

    def _slope(self, heads: Sequence[torch.Tensor], step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch X [M, B, D] of a step, and ∂(mean loss)/∂Z [M, B, C]; adds losses and hits."""
        weight, bias = heads
        active, (classes, width) = len(weight), weight.shape[1:]
        index, y = self.index[step, :active], self.labels[step, :active]
        smoothing = self.rules.step.label_smoothing
        x = self.examples.features.index_select(0, index.reshape(-1)).view(*index.shape, width)
        if rate := self.rules.step.dropout:
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
        start: Sequence[torch.Tensor],
        corrections: Sequence[torch.Tensor] | None,
    ) -> None:
        """FedProx's and SCAFFOLD's terms, then clipping: as `client.Trainer` does."""
        for k, gradient in enumerate(gradients):
            if self.rules.proximal:
                gradient.add_(heads[k][: len(gradient)] - start[k], alpha=self.rules.proximal)
            if corrections:
                gradient.add_(corrections[k][: len(gradient)])
        if (limit := self.rules.step.clip_norm) is not None:
            squares = sum(gradient.square().flatten(1).sum(1) for gradient in gradients)
            factor = (limit / (torch.as_tensor(squares).sqrt() + 1e-6)).clamp(max=1)
            for gradient in gradients:
                gradient.mul_(factor.view(-1, *[1] * (gradient.ndim - 1)))

    def _corrections(self) -> list[torch.Tensor] | None:
        given = [task.correction for task in self.ranked if task.correction]
        return [torch.stack([one[name] for one in given]) for name in NAMES] if given else None

    def _batches(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions in the training set [J, M, B], and how many of them are real [J, M].

        Padding is an example of the client's own, so that nobody else's data can do harm.
        """
        orders = [
            local_order(len(task.shard), self.rules.batch_size, task.steps, stream)
            for task, stream in zip(self.ranked, self.streams, strict=True)
        ]
        longest = max(sizes[0] for _, sizes in orders)
        counts = torch.zeros(len(orders), self.ranked[0].steps, dtype=torch.int64)
        index = torch.zeros(*counts.shape, longest, dtype=torch.int64)
        for k, (task, (order, sizes)) in enumerate(zip(self.ranked, orders, strict=True)):
            counts[k, : task.steps] = torch.tensor(sizes)
            positions = task.shard[order]
            if len(positions) == task.steps * longest:
                index[k, : task.steps] = positions.view(task.steps, longest)
                continue
            index[k] = task.shard[0]
            for step, batch in enumerate(torch.split(positions, sizes)):
                index[k, step, : len(batch)] = batch
        device = self.examples.features.device
        by_step = index.transpose(0, 1).contiguous(), counts.T.contiguous()
        return by_step[0].to(device), by_step[1].to(device)

    def _answers(self, heads: Sequence[torch.Tensor]) -> list[Update]:
        losses = self.losses.where(self.real, 0).sum(2).T.tolist()  # by client, then by step
        correct = (self.hits & self.real).sum((0, 2)).tolist()
        seen = self.counts.sum(0).tolist()
        answers: dict[int, Update] = {}
        for k, task in enumerate(self.ranked):
            mine = losses[k][: task.steps]
            tally = Tally(sum(mine), correct[k], seen[k])
            lost = next((step for step, loss in enumerate(mine) if not loss < math.inf), None)
            fault = None if lost is None else str(Diverged(mine[lost], lost))
            head = {name: value[k] for name, value in zip(NAMES, heads, strict=True)}
            answers[task.client] = Update(task, head, tally, fault)
        return [answers[task.client] for task in self.tasks]
