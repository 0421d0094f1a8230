"""A stratified validation split, and a test split that stays sealed until the choice is made.

Choosing anything on test data makes its accuracy optimistic, so code that chooses cannot read it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Concatenate, Literal, ParamSpec

import torch

from fedlens import rng
from fedlens.data.images import Images
from fedlens.errors import FedlensError

P = ParamSpec("P")


def stratified(
    labels: torch.Tensor, fraction: float, seed: int, *, purpose: str = "split"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(train, validation) indices, sorted, disjoint and covering.

    Class c gives ⌊fraction·n_c⌋ or one more, by largest remainder, so that the validation split
    has exactly round(fraction·N) samples. `purpose` is the address of the random draws.
    """
    if not 0 <= fraction < 1:
        raise FedlensError(f"The validation fraction must be in [0, 1), not {fraction}.")
    counts = torch.bincount(labels)
    quota = _largest_remainder(counts, fraction)
    if (emptied := (quota == counts) & (counts > 0)).any():
        raise FedlensError(
            f"A validation fraction of {fraction} leaves class {int(emptied.nonzero()[0])} "
            "without training samples: choose a smaller fraction."
        )
    shuffled = torch.randperm(len(labels), generator=rng.generator(seed, purpose))
    grouped = shuffled[labels[shuffled].argsort(stable=True)]  # by class, shuffled within it
    first = counts.cumsum(0) - counts
    rank = torch.arange(len(labels)) - first[labels[grouped]]
    validation = rank < quota[labels[grouped]]
    return grouped[~validation].sort().values, grouped[validation].sort().values


def _largest_remainder(counts: torch.Tensor, fraction: float) -> torch.Tensor:
    shares = counts.double() * fraction
    quota = shares.floor().long()
    left = round(int(counts.sum()) * fraction) - int(quota.sum())
    quota[(shares - quota).argsort(descending=True, stable=True)[:left]] += 1
    return quota


@dataclass(frozen=True)
class Choice:
    """What was chosen, and on which data, before the test split is opened."""

    parameters: str  # the digest of the chosen parameters
    chosen_on: Literal["validation", "last"]
    unit: int  # the epoch or round they come from


class TestLeak(FedlensError):
    """Something would be chosen after the test split has been seen."""


class SealedTest:
    """The test split, readable once the choice is made and for that choice only.

    It prevents mistakes (a best epoch or an α picked on test accuracy), not malice: Python hides
    nothing. A resumed run passes the choice it had already made as `opened`.
    """

    def __init__(
        self, load: Callable[[], Images], *, opened: Choice | None = None, curves: bool = False
    ) -> None:
        self.__load = load
        self.__curves = curves
        self.__images: Images | None = None
        self.__opened = opened

    @property
    def opened(self) -> Choice | None:
        """For the records: the choice this split was opened for, None while it is sealed."""
        return self.__opened

    def open(self, choice: Choice) -> Images:
        if self.__opened not in (None, choice):
            raise TestLeak(
                f"The test split was opened for {self.__opened}, so it cannot be opened for "
                f"{choice}, which could depend on test results: start a new run."
            )
        self.__opened = choice
        return self.__read()

    def curve(
        self,
        measure: Callable[Concatenate[Images, P], Mapping[str, float]],
        sink: Callable[[Mapping[str, float]], None],
    ) -> Callable[P, None]:
        """A function that measures on test data, passes the result to `sink` and returns None.

        Selection, early stopping and schedules thus have nothing to read.
        """
        if not self.__curves:
            raise TestLeak("Test curves are off: pass curves=True (evaluate.test_curve=true).")

        def record(*args: P.args, **kwargs: P.kwargs) -> None:
            sink(measure(self.__read(), *args, **kwargs))

        return record

    def __read(self) -> Images:
        if self.__images is None:
            self.__images = self.__load()
        return self.__images
