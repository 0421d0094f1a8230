"""A closed-form head that is solved again while the backbone below it is trained.

The features have moved since the head was solved. Every few rounds all clients send the sums of
their features under the present backbone, as they did for the first head, and the head that these
sums give takes its place. Dong et al., 2022, https://arxiv.org/abs/2207.09413.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fedlens import rng
from fedlens.data.activations import ActivationExamples
from fedlens.data.examples import Examples, FeatureExamples, ImageExamples
from fedlens.experiments.build import Experiment
from fedlens.experiments.preparation.head import HeadSettings
from fedlens.models.heads import Statistics
from fedlens.runtime.progress import progress_bar
from fedlens.runtime.stop import StopRequest

SPAN = 4096  # examples whose features are in memory at a time

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeadRefit:
    """How often the head is solved again, and from what."""

    every: int | None  # rounds; None: after the last one only
    settings: HeadSettings
    examples: int | None  # of each client, in between; None: all, as after the last round
    batch_size: int
    seed: int
    experiment: Experiment
    stop: StopRequest

    def due(self, round_: int, total: int) -> bool:
        """After every few rounds, and after the last where the head reads more from then on."""
        ends = self.settings.train_layers is not None and round_ == total
        return ends or (self.every is not None and round_ % self.every == 0)

    @torch.no_grad()
    def solve(self, clients: int, *, last: bool) -> tuple[nn.Linear, dict[str, Any]]:
        """The head for the experiment's model as it is, and what its solution chose and cost.

        After the last round it reads all its features, before that those that it is trained under.
        """
        model = self.experiment.model
        model.eval()
        train, validation = self._splits()
        chosen_examples = self._chosen(len(train), last=last)
        with progress_bar("solving the head again", self.stop) as progress:
            done, total = 0, len(chosen_examples) + len(validation)

            def report(count: int) -> None:
                nonlocal done
                done += count
                progress(done, total)

            known = self._features(validation, report)
            reads = known.features.shape[1] if last else self.settings.reads(model.backbone)
            sums = self._sums(train, chosen_examples, reads, report)
        head, chosen, size = self.settings.solve(sums, (known.features, known.labels), reads)
        facts = {**chosen, "bytes_up": clients * size}
        log.info("%s solved again: %s", self.settings.row.label, facts)
        return head.to(self.experiment.device).requires_grad_(False), facts

    def _splits(self) -> tuple[Examples, Examples]:
        """Training and validation examples as evaluation sees them, without augmentation."""
        experiment = self.experiment
        features, pipeline = experiment.features, experiment.extractor.pipeline
        train = ImageExamples(features.images, features.train_index, pipeline)
        validation = ImageExamples(features.images, features.validation_index, pipeline)
        cached = experiment.train
        if not isinstance(cached, ActivationExamples):
            return train, validation
        known = experiment.validation
        exact = known.exact if isinstance(known, ActivationExamples) else cached.exact
        return cached.like(train, exact), cached.like(validation, exact)

    def _chosen(self, count: int, *, last: bool) -> torch.Tensor:
        """The training examples whose features are summed: the same ones every time."""
        partition = self.experiment.partition
        if last or self.examples is None or partition is None:
            return torch.arange(count)
        draw = rng.generator(self.seed, "refit")
        shards = [partition.shard(client) for client in range(len(partition))]
        drawn = [
            shard[torch.randperm(len(shard), generator=draw)[: self.examples]] for shard in shards
        ]
        return torch.cat(drawn)

    def _sums(
        self,
        examples: Examples,
        chosen: torch.Tensor,
        reads: int,
        report: Callable[[int], None],
    ) -> Statistics:
        """Of the first so many features of all clients together: their sums add up to it."""
        total = None
        for index in torch.split(chosen, SPAN):
            features = self._of(examples, index, report)[:, :reads]
            one = Statistics.of(features, examples.labels[index], self.experiment.classes)
            total = one if total is None else total + one
        assert total is not None
        return total

    def _features(self, examples: Examples, report: Callable[[int], None]) -> FeatureExamples:
        everything = torch.arange(len(examples))
        return FeatureExamples(self._of(examples, everything, report), examples.labels)

    def _of(
        self, examples: Examples, index: torch.Tensor, report: Callable[[int], None]
    ) -> torch.Tensor:
        parts = []
        for some in torch.split(index, self.batch_size):
            with self.experiment.precision.autocast():
                parts.append(self.experiment.model.read(examples.batch(some)).float())
            report(len(some))
        return torch.cat(parts)
