"""Who holds which training example: N samples dealt to K clients, each sample to exactly one.

Rows of a table: no skew, Nc classes for each client, Dirichlet label skew, log-normal size skew.
All bounds are met by construction, so nothing is drawn again until it fits.
"""

import math
from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from fedlens import rng
from fedlens.data import class_assignment
from fedlens.errors import FedlensError, suggest


@dataclass(frozen=True)
class Partition:
    """Who holds which training example; all shards are slices of one order, so K may be large."""

    order: torch.Tensor  # int64 [N], positions in the training set, by client, sorted within it
    offsets: torch.Tensor  # int64 [K + 1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def shard(self, client: int) -> torch.Tensor:
        """The positions this client holds, as a view."""
        if not 0 <= client < len(self):
            raise IndexError(f"client {client} of {len(self)}")
        return self.order[int(self.offsets[client]) : int(self.offsets[client + 1])]

    @property
    def sizes(self) -> torch.Tensor:
        return self.offsets.diff()


@dataclass(frozen=True)
class Row:
    """A way to partition: `deal(labels, clients, seed, **keys)` names the holder of each sample."""

    deal: Callable[..., torch.Tensor]
    keys: tuple[str, ...]  # of `partition`, those this row reads
    what: str
    paper: str


def partition(
    labels: torch.Tensor,
    clients: int,
    *,
    name: str,
    seed: int,
    classes_per_client: int,
    alpha: float,
    sigma: float,
    min_size: int,
) -> Partition:
    """Deals the samples by the row called `name`; only the keys it reads are looked at.

    Classes are those present in `labels`: gaps in their numbers do not count.
    """
    if name not in TABLE:
        raise FedlensError(f"There is no partition.name='{name}': {suggest(name, TABLE)}")
    row = TABLE[name]
    given: dict[str, float] = {
        "classes_per_client": classes_per_client,
        "alpha": alpha,
        "sigma": sigma,
        "min_size": min_size,
    }
    keys = {key: given[key] for key in row.keys}
    _check(len(labels), clients, keys)
    _, dense = torch.unique(labels, return_inverse=True)
    holder = row.deal(dense, clients, seed, **keys)
    sizes = torch.bincount(holder, minlength=clients)
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    return Partition(order=holder.argsort(stable=True), offsets=offsets)


def _check(samples: int, clients: int, keys: dict[str, float]) -> None:
    if samples == 0:
        raise FedlensError("There is no training sample to partition: choose other data.")
    if clients < 1:
        raise FedlensError(f"federated.clients is at least 1, not {clients}.")
    for key in ("classes_per_client", "min_size"):
        if keys.get(key, 1) < 1:
            raise FedlensError(f"partition.{key} is at least 1, not {keys[key]}.")
    if not 0 < keys.get("alpha", 1) < math.inf:
        raise FedlensError(f"partition.alpha is a number above 0, not {keys['alpha']}.")
    if not 0 <= keys.get("sigma", 0) < math.inf:
        raise FedlensError(f"partition.sigma is a number not below 0, not {keys['sigma']}.")
    if clients > samples:
        raise FedlensError(
            f"federated.clients={clients} is more than the {samples} training samples: "
            f"choose {samples} or fewer."
        )
    least = int(keys.get("min_size", 1))
    if clients * least > samples:
        fewer = f"federated.clients={samples // least} or " if samples >= least else ""
        raise FedlensError(
            f"federated.clients={clients} with partition.min_size={least} takes {clients * least} "
            f"training samples and there are {samples}: "
            f"choose {fewer}partition.min_size={samples // clients}."
        )


def _iid(labels: torch.Tensor, clients: int, seed: int) -> torch.Tensor:
    """Class by class, round robin: sizes and counts of every class are equal within one."""
    seats = torch.randperm(clients, generator=rng.generator(seed, "partition", "seats"))
    holder = torch.empty_like(labels)
    holder[_by_class(labels, seed)] = seats[torch.arange(len(labels)) % clients]
    return holder


def _quantity(
    labels: torch.Tensor, clients: int, seed: int, *, sigma: float, min_size: int
) -> torch.Tensor:
    """Sizes in proportion to exp(σz), z ~ N(0, 1), filled with samples drawn whatever their label.

    Who would get less than min_size is lifted to it by the largest.
    """
    draw = rng.generator(seed, "partition", "sizes")
    law = torch.softmax(sigma * torch.randn(clients, dtype=torch.float64, generator=draw), 0)
    sizes = _lifted(_apportioned(len(labels), law), min_size)
    shuffle = rng.generator(seed, "partition", "samples")
    holder = torch.empty_like(labels)
    holder[torch.randperm(len(labels), generator=shuffle)] = _repeated(sizes)
    return holder


def _dirichlet(
    labels: torch.Tensor, clients: int, seed: int, *, alpha: float, min_size: int
) -> torch.Tensor:
    """Class c is split over the clients by a law p_c ~ Dir(α, …, α) of its own.

    Who gets less than min_size is lifted to it with samples drawn from the largest.
    """
    splits = []
    for label, count in enumerate(torch.bincount(labels).tolist()):
        draw = rng.generator(seed, "partition", "law", label)
        splits.append(_repeated(_apportioned(count, _dirichlet_law(clients, alpha, draw))))
    holder = torch.empty_like(labels)
    holder[_by_class(labels, seed)] = torch.cat(splits)

    sizes = torch.bincount(holder, minlength=clients)
    change = _lifted(sizes, min_size) - sizes
    shuffle = rng.generator(seed, "partition", "lifted")
    shuffled = torch.randperm(len(labels), generator=shuffle)
    grouped = shuffled[holder[shuffled].argsort(stable=True)]
    rank = torch.arange(len(labels)) - (sizes.cumsum(0) - sizes)[holder[grouped]]
    given = grouped[rank < -change[holder[grouped]]]
    holder[given] = _repeated(change.clamp(min=0))
    return holder


def _dirichlet_law(clients: int, alpha: float, draw: torch.Generator) -> torch.Tensor:
    """p ∝ g, g ~ Gamma(α), as Gamma(α + 1)·U^(1/α): in logarithms no α is too small."""
    shape = torch.full((clients,), alpha + 1, dtype=torch.float64)
    gamma = torch._standard_gamma(shape, generator=draw)
    uniform = 1 - torch.rand(clients, dtype=torch.float64, generator=draw)
    scaled = alpha * (gamma / shape).log() + uniform.log()  # α·log g, up to a constant
    return torch.softmax((scaled - scaled.max()) / alpha, 0)


def _classes(
    labels: torch.Tensor, clients: int, seed: int, *, classes_per_client: int
) -> torch.Tensor:
    """Every client holds exactly Nc classes, every class is owned in proportion to its size.

    Given who owns what, no split of the classes has sizes that are more equal.
    """
    counts = torch.bincount(labels).numpy()
    draw = rng.generator(seed, "partition", "owners")
    owned, amounts = class_assignment.deal(counts, clients, classes_per_client, draw)
    by_class = owned.ravel().argsort(kind="stable")
    who = np.repeat(by_class // classes_per_client, amounts.ravel()[by_class])
    holder = torch.empty_like(labels)
    holder[_by_class(labels, seed)] = torch.from_numpy(who)
    return holder


def _by_class(labels: torch.Tensor, seed: int) -> torch.Tensor:
    """All positions by class, shuffled within it."""
    shuffle = rng.generator(seed, "partition", "samples")
    shuffled = torch.randperm(len(labels), generator=shuffle)
    return shuffled[labels[shuffled].argsort(stable=True)]


def _repeated(sizes: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(sizes)).repeat_interleave(sizes)


def _apportioned(total: int, law: torch.Tensor) -> torch.Tensor:
    """Whole numbers that sum to `total`, in proportion to the law, by largest remainder."""
    shares = total * law
    whole = shares.floor().long()
    left = total - int(whole.sum())
    whole[(shares - whole).argsort(descending=True, stable=True)[:left]] += 1
    return whole


def _lifted(sizes: torch.Tensor, least: int) -> torch.Tensor:
    """The sizes with none below `least`; the largest pay, cut to the highest height that does."""
    lifted = sizes.clamp(min=least)
    owed = int((lifted - sizes).sum())
    heights = range(int(sizes.max()) + 1)
    height = bisect(heights, -owed, key=lambda h: -int((sizes - h).clamp(min=0).sum())) - 1
    cut = lifted.clamp(max=height)
    cut[(lifted > height).nonzero()[: int(sizes.sum() - cut.sum()), 0]] += 1
    return cut


TABLE = {
    "iid": Row(
        deal=_iid,
        keys=(),
        what="the same number of samples of every class for every client, within one",
        paper="McMahan et al., 2017, https://arxiv.org/abs/1602.05629",
    ),
    "classes": Row(
        deal=_classes,
        keys=("classes_per_client",),
        what="samples of exactly classes_per_client classes for every client, sizes level",
        paper="Li et al., 2021, https://arxiv.org/abs/2102.02079",
    ),
    "dirichlet": Row(
        deal=_dirichlet,
        keys=("alpha", "min_size"),
        what="each class split by a Dirichlet(alpha) law: the smaller alpha, the fewer its holders",
        paper="Yurochkin et al., 2019, https://arxiv.org/abs/1905.12022",
    ),
    "quantity": Row(
        deal=_quantity,
        keys=("sigma", "min_size"),
        what="log-normal(sigma) sizes, labels drawn alike for all",
        paper="Acar et al., 2021, https://arxiv.org/abs/2111.04263",
    ),
}
