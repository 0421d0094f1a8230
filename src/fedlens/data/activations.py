"""Activations of a model's frozen first blocks in a mapped file: computed once, read by training.

As `features` for a whole frozen backbone, but with some kilobytes for each example, so they stay
in a file of the cache and a batch is gathered from it.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fedlens import files
from fedlens.data.examples import Examples, ImageExamples
from fedlens.data.mapped_file import MakeRows, MappedFile
from fedlens.runtime.progress import progress_bar
from fedlens.runtime.stop import StopRequest

PART = 8  # batches whose activations are written together

Compute = Callable[[torch.Tensor], torch.Tensor]  # inputs → activations, of a few examples


@dataclass(frozen=True)
class Activations:
    """Of the examples of one split, in their order.

    Rows are stored as they lie in memory, and read in the same layout: another one (channels_last,
    say) would choose other kernels, with other last bits.
    """

    file: MappedFile
    order: tuple[int, ...]  # the dimensions of a batch as they are stored, slowest first
    batch: int  # examples whose activations are computed together
    identity: Mapping[str, object]

    @cached_property
    def stored(self) -> torch.Tensor:
        with torch.inference_mode(False):  # training and evaluation both read it
            return self.file.open()

    def __getstate__(self) -> dict[str, Any]:
        """Another process maps the file itself."""
        return {name: value for name, value in vars(self).items() if name != "stored"}

    def __getitem__(self, index: torch.Tensor) -> torch.Tensor:
        return as_computed(self.stored.index_select(0, index.cpu()), self.order)

    def make(
        self,
        examples: Examples,
        compute: Compute,
        *,
        title: str,
        stop: StopRequest,
    ) -> None:
        """Computes what is missing or damaged in the file; processes wait for each other."""

        @contextmanager
        def computing() -> Iterator[MakeRows]:
            with progress_bar(title, stop) as update, torch.no_grad():

                def rows(part: range) -> torch.Tensor:
                    parts = []
                    for index in torch.split(torch.tensor(part), self.batch):
                        end = int(index[-1]) + 1
                        whole = torch.arange(max(0, end - self.batch), end)  # never a smaller one
                        computed = as_stored(compute(examples.batch(whole)), self.order)
                        parts.append(computed[-len(index) :].cpu())
                        update(end, len(examples))
                    return torch.cat(parts)

                yield rows

        self.file.make_once(
            computing, self.identity, remedy="train.prefix_cache_gb=0", check=stop.check
        )


def activations(
    count: int,
    sample: torch.Tensor,
    key: Mapping[str, object],
    *,
    batch: int,
    root: Path | None = None,
) -> Activations:
    """Those of `count` examples under `key`, computed in batches of one size.

    `sample` is a batch of activations, of any examples.
    """
    order = memory_order(sample)
    shape = tuple(as_stored(sample, order).shape[1:])
    identity = {
        **key,
        "examples": count,
        "shape": shape,
        "order": order,
        "dtype": str(sample.dtype),
        "batch": batch,
        "part": PART,
    }
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
    path = (root or files.cache_dir()) / "activations" / name / "activations.bin"
    file = MappedFile(path, count, shape, sample.dtype, PART * batch, "activations")
    return Activations(file, order, batch, identity)


def memory_order(batch: torch.Tensor) -> tuple[int, ...]:
    """Its dimensions from the slowest to the fastest in memory, after the one of examples."""
    strides = batch.stride()
    return (0, *sorted(range(1, batch.ndim), key=lambda one: strides[one], reverse=True))


def as_stored(batch: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    return batch.permute(order)


def as_computed(rows: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    return rows.permute([order.index(one) for one in range(len(order))])


@dataclass(frozen=True)
class ComputedActivations:
    """Examples by their activations, computed for every batch anew."""

    examples: Examples
    compute: Compute

    @property
    def labels(self) -> torch.Tensor:
        return self.examples.labels

    def __len__(self) -> int:
        return len(self.examples)

    def to(self, device: torch.device) -> "ComputedActivations":
        return replace(self, examples=self.examples.to(device))

    @torch.no_grad()
    def batch(self, index: torch.Tensor, draw: torch.Generator | None = None) -> torch.Tensor:
        return self.compute(self.examples.batch(index, draw))


@dataclass(frozen=True)
class ActivationExamples:
    """Examples by their stored activations; batches of sizes that are not exact are computed."""

    activations: Activations
    computed: ComputedActivations
    index: torch.Tensor | None = None  # of the examples in the file; None: all of them
    exact: Collection[int] | None = None  # the sizes for which stored bits are right; None: all
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def labels(self) -> torch.Tensor:
        return self.computed.labels

    def __len__(self) -> int:
        return len(self.computed)

    def to(self, device: torch.device) -> "ActivationExamples":
        return replace(self, computed=self.computed.to(device), device=device)

    def like(self, images: ImageExamples, exact: Collection[int] | None) -> "ActivationExamples":
        """Other examples of the same file: those of `images`, whose index says which."""
        computed = replace(self.computed, examples=images)
        return replace(self, computed=computed, index=images.index, exact=exact)

    def batch(self, index: torch.Tensor, draw: torch.Generator | None = None) -> torch.Tensor:
        if self.exact is not None and len(index) not in self.exact:
            return self.computed.batch(index, draw)
        within = index if self.index is None else self.index[index.to(self.index.device)]
        return self.activations[within].to(self.device)
