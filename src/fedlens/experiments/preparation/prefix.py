"""Training that starts after the frozen blocks: their activations are computed once and cached.

Without augmentation, and with the first blocks frozen, first(x) in f(x) = rest(first(x)) never
changes, so training and evaluation read it from a file. The numbers are those of the whole model,
bit for bit: this is checked on batches as the run has them, and nothing is cached where it fails.
"""

import logging
import shutil
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn

from fedlens import params, rng
from fedlens.data.activations import (
    ActivationExamples,
    Activations,
    ComputedActivations,
    activations,
    as_computed,
    as_stored,
)
from fedlens.data.examples import Examples, ImageExamples
from fedlens.data.images import Images
from fedlens.errors import FedlensError
from fedlens.experiments.build import Experiment
from fedlens.federated.client import in_training_layout
from fedlens.models.classifier import Classifier, carried
from fedlens.models.prefix import Cut, cut, frozen_blocks
from fedlens.runtime.stop import StopRequest
from fedlens.runtime.threads import limited_threads
from fedlens.runtime.units import size_text
from fedlens.training.precision import Precision

MOST_SIZES = 12  # batch sizes that are checked; of more, the smallest, the largest, some between
RESERVE = 1 << 30  # bytes of the disk that a cache leaves free
BACKBONE = "backbone."

Read = Callable[[torch.Tensor], torch.Tensor]  # positions of examples → their activations

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrefixSettings:
    """What the cache may cost, and the batches that it must be exact for."""

    max_bytes: int  # of one split's activations; 0: nothing is cached
    images_seen: int  # in training and validation
    min_passes: float  # over all images, from which on a cache pays
    batch: int  # the usual size of the batches that the model is trained on
    train_sizes: Collection[int]  # all their sizes
    train_threads: Collection[int]  # that it may be trained with
    evaluate_batch: int
    splits_batches: bool = False  # into micro-batches: `train_sizes` are those of the parts
    train_per_class: int | None = None
    test_per_class: int | None = None
    refused: str | None = None  # why this run cannot use a cache, if it cannot


class NotCached(Exception):
    """Why activations are not cached, as the end of a sentence."""


def start_after_frozen_blocks(
    experiment: Experiment, settings: PrefixSettings, stop: StopRequest
) -> Experiment:
    """The experiment on cached activations, if its first blocks are frozen; else as it is."""
    model, train = experiment.model, experiment.train
    if not settings.max_bytes or not experiment.trains or not isinstance(train, ImageExamples):
        return experiment
    changed = _changed(model)
    try:
        blocks = frozen_blocks(model.backbone, changed)
    except FedlensError as error:  # it has no sequence of blocks
        if not all(value.requires_grad for value in model.backbone.parameters()):
            log.info("activations of the frozen part are not cached: %s", error)
        return experiment
    if blocks < 1:
        return experiment
    try:
        prefix = _Prefix(experiment, _cut(experiment, train, blocks, changed, settings), stop)
        everything = replace(train, index=None)
        found = prefix.cached(everything, "train", settings)
    except NotCached as reason:
        log.info("first %d blocks are frozen; their activations are not cached: %s", blocks, reason)
        return experiment
    log.info(
        "first %d of %d blocks are frozen: their activations are cached (%s)",
        blocks, prefix.cut.depth, size_text(found.activations.file.bytes),
    )  # fmt: skip

    def on_activations(examples: ImageExamples, exact: Collection[int] | None) -> Examples:
        computed = ComputedActivations(examples, prefix.compute)
        return ActivationExamples(
            found.activations, computed, examples.index, exact, experiment.device
        )

    def test_examples(images: Images) -> Examples:
        """Computed only now: the test split was sealed before."""
        computed = ComputedActivations(ImageExamples(images, None, train.pipeline), prefix.compute)
        try:
            test = prefix.cached(computed.examples, "test", settings)
        except NotCached as reason:
            log.info("activations of the test images are not cached: %s", reason)
            return computed
        return ActivationExamples(
            test.activations, computed, None, test.evaluated, experiment.device
        )

    model.cut = prefix.cut
    validation = experiment.validation
    if isinstance(validation, ImageExamples):
        validation = on_activations(validation, found.evaluated)
    return replace(
        experiment,
        train=on_activations(train, found.trained),
        validation=validation,
        test_examples=test_examples,
    )


def batch_sizes(counts: Iterable[int], batch: int, micro_batch: int | None = None) -> set[int]:
    """Sizes of the batches in passes over so many examples, split into micro-batches."""
    whole = {size for count in counts for size in _parts(count, batch)}
    return {size for one in whole for size in _parts(one, micro_batch or one)}


def _parts(count: int, size: int) -> set[int]:
    return {min(count, size), count % size} - {0}


def _changed(model: Classifier) -> set[str]:
    """The backbone's tensors that training changes, by gradients or otherwise."""
    names = {name for name, value in model.named_parameters() if value.requires_grad}
    names |= carried(model, model.batch_norm).keys()
    return {name.removeprefix(BACKBONE) for name in names if name.startswith(BACKBONE)}


def _cut(
    experiment: Experiment,
    train: ImageExamples,
    blocks: int,
    changed: Collection[str],
    settings: PrefixSettings,
) -> Cut:
    """The cut after the frozen blocks, if the run may use it and it suits the model."""
    model = experiment.model
    if settings.refused:
        raise NotCached(settings.refused)
    if train.pipeline.augmentation.active:
        raise NotCached("images are augmented, so they differ from step to step")
    if model.origin:
        raise NotCached("a linearised model has no blocks of its own")
    if experiment.partition is not None:
        in_training_layout(model)  # as its clients will have it: it decides the last bits
    sample = train.batch(torch.arange(min(2, len(train))))
    found = cut(model.backbone, blocks, sample)
    inside = tuple(f"{path}." for path in found.finished) if found else ()
    if found is None or any(name.startswith(inside) for name in changed):
        raise NotCached("this model cannot be cut there")
    with experiment.precision.autocast(), torch.no_grad():
        if not found.halves_give_the_whole(model.backbone, sample):
            raise NotCached("this model cannot be cut there")
    return found


@dataclass(frozen=True)
class FirstBlocks:
    """Inputs → activations at the cut."""

    backbone: nn.Module
    cut: Cut
    precision: Precision

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        with self.precision.autocast():
            return self.cut.first(self.backbone, inputs)


@dataclass(frozen=True)
class Cached:
    """Stored activations, and the sizes of batches for which they are exact; None: all sizes."""

    activations: Activations
    trained: Collection[int] | None
    evaluated: Collection[int] | None


@dataclass(frozen=True)
class _Prefix:
    """The frozen blocks of an experiment's backbone."""

    experiment: Experiment
    cut: Cut
    stop: StopRequest

    @property
    def compute(self) -> FirstBlocks:
        experiment = self.experiment
        return FirstBlocks(experiment.model.backbone, self.cut, experiment.precision)

    def cached(self, examples: Examples, split: str, settings: PrefixSettings) -> Cached:
        """The activations of all examples, computed now where they are not stored yet."""
        per_class = settings.train_per_class if split == "train" else settings.test_per_class
        with torch.no_grad():
            sample = self.compute(examples.batch(torch.arange(min(2, len(examples)))))
        key, batch = self._key(split, per_class), min(settings.batch, len(examples))
        found = activations(len(examples), sample, key, batch=batch)
        size = found.file.bytes
        if size > settings.max_bytes:
            raise NotCached(
                f"they take {size_text(size)}, more than train.prefix_cache_gb="
                f"{settings.max_bytes / 1e9:g} allows"
            )
        if found.file.complete:
            self._make(found, examples, split)
            return self._checked(found, examples, split, settings, found.__getitem__)
        if split == "train" and settings.images_seen < settings.min_passes * len(examples):
            raise NotCached(
                f"this run sees {settings.images_seen} images, fewer than {settings.min_passes:g} "
                f"times the {len(examples)} whose activations it would compute"
            )
        free = _free_space(found)
        if free < size + RESERVE:
            raise NotCached(f"they take {size_text(size)}, and the disk has {size_text(free)} left")
        checked = self._checked(
            found, examples, split, settings, lambda index: self._computed(found, examples, index)
        )
        self._make(found, examples, split)
        return checked

    def _key(self, split: str, per_class: int | None) -> dict[str, object]:
        state = self.experiment.model.backbone.state_dict(keep_vars=True)
        tensors = {name: state[name] for name in self.cut.tensors if name in state}
        return {
            **self.experiment.extractor.key(split, per_class),
            "cut": self.cut.last,
            "parameters": params.digest(tensors),
            "layout": params.digest(
                {name: torch.tensor(value.stride()) for name, value in tensors.items()}
            ),
        }

    def _make(self, found: Activations, examples: Examples, split: str) -> None:
        title = f"activations of the {split} images"
        try:
            found.make(examples, self.compute, title=title, stop=self.stop)
        except OSError as error:  # a disk that others have filled meanwhile, say
            raise NotCached(f"the file cannot be written ({error})") from error

    @torch.no_grad()
    def _computed(
        self, found: Activations, examples: Examples, index: torch.Tensor
    ) -> torch.Tensor:
        """As they would be read from the file."""
        whole = torch.cat([index, torch.arange(-len(index) % found.batch)])  # no smaller batch
        parts = [self.compute(examples.batch(one)) for one in torch.split(whole, found.batch)]
        stored = torch.cat([as_stored(one, found.order) for one in parts])
        return as_computed(stored[: len(index)], found.order)

    def _checked(
        self,
        found: Activations,
        examples: Examples,
        split: str,
        settings: PrefixSettings,
        read: Read,
    ) -> Cached:
        """Compares stored activations with those of the batches that this run will have.

        Matrix products may choose another kernel for another number of rows or threads.
        """
        trained: Collection[int] | None = None
        validation = self.experiment.validation
        evaluated = len(examples) if split == "test" else len(validation or ())
        if split == "train":
            sizes = settings.train_sizes
            trained = self._exact(examples, sizes, settings.train_threads, read)
            usual = max(settings.train_sizes)
            if trained is not None and (settings.splits_batches or usual not in trained):
                raise NotCached(
                    "on this machine, the last bits of a batch depend on its size or on the number "
                    "of threads"
                )
        own = [torch.get_num_threads()]
        with torch.inference_mode():
            sizes = batch_sizes([evaluated], settings.evaluate_batch)
            exact = self._exact(examples, sizes, own, read)
        return Cached(found, trained, exact)

    def _exact(
        self, examples: Examples, sizes: Collection[int], threads: Collection[int], read: Read
    ) -> set[int] | None:
        """The sizes of batches whose activations have the bits that `read` gives; None: all."""
        order = torch.randperm(len(examples), generator=rng.generator(0, "prefix check"))
        checked, exact = _spread(sizes), set()
        for size in checked:
            self.stop.check()
            index = order[:size]
            stored, equal = read(index), True
            for number in threads:
                with limited_threads(number):
                    computed = self.compute(examples.batch(index))
                equal &= _identical(stored.to(computed.device), computed)
            exact |= {size} if equal else set()
        return None if len(exact) == len(checked) else exact


def _spread(sizes: Collection[int]) -> list[int]:
    """The sizes from the smallest to the largest, at most `MOST_SIZES` of them."""
    ordered = sorted(sizes)
    if len(ordered) <= MOST_SIZES:
        return ordered
    places = torch.linspace(0, len(ordered) - 1, MOST_SIZES).round().long().tolist()
    return [ordered[place] for place in places]


def _identical(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)


def _free_space(found: Activations) -> int:
    """Of the disk that the file will be on, whose folders may not exist yet."""
    folder = next(one for one in found.file.path.parents if one.exists())
    return shutil.disk_usage(folder).free
