"""A cohort that trains linear heads on features, as one batched product: Z = X Wᵀ + b.

The gradient of the cross-entropy is written out, (softmax(Z) − target)/n, so a step is two `bmm`s
for all clients together. Draws are those of `client.Trainer`, and so are the updates, but for
rounding.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

import torch

from fedlens.data.batches import FeatureExamples
from fedlens.federated.client import LocalRules, Task, Update, client_stream, local_batches
from fedlens.federated.engines import limited_threads
from fedlens.params import Params
from fedlens.rng import Stream
from fedlens.training.local import Diverged, Tally, dropout_mask

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
        self.positions = [
            _positions(task, rules.batch_size, stream)
            for task, stream in zip(self.ranked, self.streams, strict=True)
        ]
        self.losses: list[torch.Tensor] = []  # of each step, summed over its batch
        self.hits: list[torch.Tensor] = []

    @torch.no_grad()
    def train(self, parameters: Params) -> list[Update]:
        start = [parameters[name] for name in NAMES]
        count = len(self.ranked)
        heads = [value.expand(count, *value.shape).clone() for value in start]
        momenta = [torch.zeros_like(value) for value in heads]
        corrections = self._corrections()
        lr = self.ranked[0].lr
        for step in range(self.ranked[0].steps):
            active = sum(task.steps > step for task in self.ranked)
            weight, bias = (value[:active] for value in heads)
            gradients = self._gradients(weight, bias, step)
            self._adjust(gradients, heads, start, corrections)
            for value, gradient, momentum in zip((weight, bias), gradients, momenta, strict=True):
                if self.rules.weight_decay:
                    gradient.add_(value, alpha=self.rules.weight_decay)
                moved = momentum[:active].mul_(self.rules.momentum).add_(gradient)
                if self.rules.nesterov:
                    moved = gradient.add_(moved, alpha=self.rules.momentum)
                value.sub_(moved, alpha=lr)
        return self._answers(heads)

    def _gradients(
        self, weight: torch.Tensor, bias: torch.Tensor, step: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the mean loss of each client's batch; adds to the losses and hits."""
        active, (classes, width) = len(weight), weight.shape[1:]
        batches = [self.positions[k][step] for k in range(active)]
        counts = torch.tensor([len(batch) for batch in batches], device=weight.device)
        index = torch.nn.utils.rnn.pad_sequence(batches, batch_first=True, padding_value=-1)
        index = torch.where(index < 0, index[:, :1], index)  # padding is the client's own example
        x = self.examples.features[index.view(-1)].view(*index.shape, width)
        y = self.examples.labels[index]
        if rate := self.rules.step.dropout:
            for k, batch in enumerate(batches):
                draw = self.streams[k].draw("dropout", step)
                x[k, : len(batch)] *= dropout_mask(len(batch), width, rate, draw).to(x.device)
        logits = torch.baddbmm(bias[:, None], x, weight.transpose(1, 2))
        log_p = logits.log_softmax(2)
        real = (torch.arange(index.shape[1], device=weight.device) < counts[:, None]).float()
        smoothing = self.rules.step.label_smoothing
        loss = -(1 - smoothing) * log_p.gather(2, y[..., None])[..., 0]
        if smoothing:
            loss -= smoothing * log_p.mean(2)
        self.losses.append((loss * real).sum(1))
        self.hits.append(((logits.argmax(2) == y) * real).sum(1))
        slope = log_p.exp_().sub_(smoothing / classes)
        truth = slope.new_full((), smoothing - 1).expand_as(y[..., None])
        slope.scatter_add_(2, y[..., None], truth)
        slope *= (real / counts[:, None])[..., None]
        return torch.bmm(slope.transpose(1, 2), x), slope.sum(1)

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

    def _answers(self, heads: Sequence[torch.Tensor]) -> list[Update]:
        losses = [step.tolist() for step in self.losses]
        hits = [step.tolist() for step in self.hits]
        answers: dict[int, Update] = {}
        for k, task in enumerate(self.ranked):
            mine = [losses[step][k] for step in range(task.steps)]
            tally = Tally(
                loss=sum(mine),
                correct=int(sum(hits[step][k] for step in range(task.steps))),
                seen=sum(len(batch) for batch in self.positions[k]),
            )
            lost = next((s for s, loss in enumerate(mine) if not loss < float("inf")), None)
            fault = None if lost is None else str(Diverged(mine[lost], lost))
            head = {name: value[k] for name, value in zip(NAMES, heads, strict=True)}
            answers[task.client] = Update(task, head, tally, fault)
        return [answers[task.client] for task in self.tasks]


def _positions(task: Task, batch_size: int, stream: Stream) -> tuple[torch.Tensor, ...]:
    """Of each step's batch, in the training set."""
    batches = list(islice(local_batches(len(task.shard), batch_size, stream), task.steps))
    return torch.split(task.shard[torch.cat(batches)], [len(batch) for batch in batches])
