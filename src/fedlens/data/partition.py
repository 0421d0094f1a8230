"""Who holds which training example: N samples dealt to K clients, each sample to exactly one.

Rows of a table: no skew, Nc classes for each client, Dirichlet label skew, log-normal size skew.
All bounds are met by construction, so nothing is drawn again until it fits.
"""

import math
from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import maximum_flow

from fedlens import rng
from fedlens.errors import FedlensError, suggest

Integers = npt.NDArray[np.int64]


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
    counts: Integers = torch.bincount(labels).numpy()
    slots = clients * classes_per_client
    if not len(counts) <= slots <= np.minimum(counts, clients).sum():
        raise FedlensError(_unplaceable(counts, clients, classes_per_client))
    draw = rng.generator(seed, "partition", "owners")
    chance = torch.randperm(len(counts), generator=draw).numpy()
    owners = _owners(counts, slots, np.minimum(counts, clients), chance)

    # Samples can be levelled only along shared classes, so a class goes half to the lightest and
    # half to the heaviest clients, the classes with most samples per owner first. This weight is in
    # quarters of its mean: smaller differences are levelled anyway and are left to chance.
    weight = np.rint(4 * counts / owners * (slots / counts.sum())).astype(np.int64)
    owned = np.empty((clients, classes_per_client), dtype=np.int64)
    amounts = np.empty_like(owned)
    taken, load = np.zeros(clients, dtype=np.int64), np.zeros(clients, dtype=np.int64)
    for label in np.lexsort((chance, -weight)):
        tie = torch.randperm(clients, generator=draw).numpy()
        ranked = np.lexsort((tie, load, taken))
        # Most free slots first: by Gale and Ryser, the classes still to come then fit as well.
        # Only among clients with equally many does the load count.
        last = taken[ranked[owners[label] - 1]]
        first, end = np.searchsorted(taken[ranked], [last, last + 1])
        heaviest = (owners[label] - first) // 2
        chosen = np.append(ranked[: owners[label] - heaviest], ranked[end - heaviest : end])
        share, extra = divmod(counts[label], owners[label])
        owned[chosen, taken[chosen]] = label
        amounts[chosen, taken[chosen]] = share + (np.arange(len(chosen)) < extra)
        taken[chosen] += 1
        load[chosen] += weight[label]
    _level(owned, amounts)

    by_class = owned.ravel().argsort(kind="stable")
    who = np.repeat(by_class // classes_per_client, amounts.ravel()[by_class])
    holder = torch.empty_like(labels)
    holder[_by_class(labels, seed)] = torch.from_numpy(who)
    return holder


def _unplaceable(counts: Integers, clients: int, wanted: int) -> str:
    """The refusal of K clients with Nc classes: C ≤ K·Nc ≤ Σ_c min(K, n_c) does not hold."""
    classes, slots = len(counts), clients * wanted
    request = f"partition.classes_per_client={wanted} with federated.clients={clients}"
    room = int(np.minimum(counts, clients).sum())
    if wanted > classes:
        reason = f"asks for more classes than the {classes} present"
    elif slots < classes:
        reason = f"has {slots} places for {classes} classes, and each needs an owner"
    else:
        reason = f"has {slots} places and too few samples: the classes can fill {room}"
    options = []
    if (low := -(-classes // clients)) <= (high := room // clients):
        options.append(f"partition.classes_per_client={min(max(wanted, low), high)}")
    others = np.arange(1, counts.sum() + 1)
    rooms = (np.bincount(counts)[::-1].cumsum()[::-1][1:]).cumsum()  # Σ_c min(k, n_c), k = 1, 2, …
    rooms = np.pad(rooms, (0, len(others) - len(rooms)), mode="edge")
    possible = others[(others * wanted >= classes) & (others * wanted <= rooms)]
    if len(possible):
        options.append(f"federated.clients={possible[np.abs(possible - clients).argmin()]}")
    return f"{request} {reason}: choose {' or '.join(options or ['another partition.name'])}."


def _owners(counts: Integers, slots: int, most: Integers, chance: Integers) -> Integers:
    """Owners of each class: clamp(λ·n_c, 1, most_c), rounded by largest remainder to Σ = slots."""
    owners = np.zeros_like(counts)
    free = np.ones(len(counts), dtype=bool)
    while free.any():
        left, total = slots - owners.sum(), counts[free].sum()
        share = left * counts  # in units of 1/total, so that all is exact
        low, high = free & (share < total), free & (share > most * total)
        if not (low | high).any():
            owners[free] = share[free] // total
            remainder = np.where(free, share % total, -1)
            owners[np.lexsort((chance, -remainder))[: slots - owners.sum()]] += 1
            break
        # Settling the side that is off by more moves λ so that it stays off.
        if (total - share[low]).sum() >= (share - most * total)[high].sum():
            owners[low], free = 1, free & ~low
        else:
            owners[high], free = most[high], free & ~high
    return owners


def _level(owned: Integers, amounts: Integers) -> None:
    """Moves samples between the owners of a class, in place, until sizes are as equal as can be.

    A group ends with sizes ⌊mean⌋ and ⌊mean⌋ + 1, or falls in two between which nothing can move.
    """
    pending = [np.arange(len(owned))]
    while pending:
        group = pending.pop()
        mean = int(amounts[group].sum()) // len(group)
        for bound in (mean, mean + 1):
            amounts[group] = _flow(owned[group], amounts[group], bound)
            stuck = _stuck(owned[group], amounts[group], bound)
            if 0 < stuck.sum() < len(group):
                pending += [group[stuck], group[~stuck]]
                break


def _flow(owned: Integers, amounts: Integers, bound: int) -> Integers:
    """The amounts after a maximum flow from clients above the bound to clients below it.

    Client → class carries what it can give (all but one sample), class → owner carries anything.
    """
    (clients, slots), classes = owned.shape, int(owned.max()) + 1
    above = amounts.sum(1) - bound
    if not (above > 0).any() or not (above < 0).any():
        return amounts
    client = np.arange(clients) + classes
    source, sink = np.full((2, clients), [[classes + clients], [classes + clients + 1]])
    giver, label = np.repeat(client, slots), owned.ravel()
    anything = np.full(owned.size, above[above > 0].sum())
    tails = np.concatenate([giver, label, source, client])
    heads = np.concatenate([label, giver, client, sink])
    limits = [amounts.ravel() - 1, anything, above.clip(min=0), (-above).clip(min=0)]
    shape = (classes + clients + 2, classes + clients + 2)
    graph = coo_array((np.concatenate(limits).astype(np.int32), (tails, heads)), shape=shape)
    flow = maximum_flow(graph.tocsr(), int(source[0]), int(sink[0])).flow
    given = flow[classes : classes + clients, :classes].toarray().astype(np.int64)
    return amounts - np.take_along_axis(given, owned, axis=1)


def _stuck(owned: Integers, amounts: Integers, bound: int) -> npt.NDArray[np.bool_]:
    """The clients above the bound, and all that they could still give samples to."""
    stuck: npt.NDArray[np.bool_] = amounts.sum(1) > bound
    while True:
        within = np.zeros(int(owned.max()) + 1, dtype=bool)
        within[owned[stuck][amounts[stuck] > 1]] = True
        wider = stuck | within[owned].any(1)
        if np.array_equal(wider, stuck):
            return stuck
        stuck = wider


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
