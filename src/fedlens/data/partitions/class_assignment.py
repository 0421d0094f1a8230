"""Which Nc classes each of K clients owns, and how many samples of each, with equal sizes.

Classes get owners in proportion to their size: a greedy that always fits chooses them (Gale and
Ryser, 1957), random swaps mix them, and maximum flow along shared classes makes sizes equal.
"""

import numpy as np
import numpy.typing as npt
import torch

from fedlens.errors import FedlensError

TRADES = 20  # of each client; how often two classes meet no longer changes after about 5

Integers = npt.NDArray[np.int64]


def assign_classes(
    counts: Integers, clients: int, classes_per_client: int, draw: torch.Generator
) -> tuple[Integers, Integers]:
    """(classes, amounts), each [K, Nc]: the classes of every client, and its samples of each.

    `counts` are the samples of each class. Every class has an owner, and every sample too.
    """
    slots = clients * classes_per_client
    if not len(counts) <= slots <= np.minimum(counts, clients).sum():
        raise FedlensError(_unplaceable(counts, clients, classes_per_client))
    tie_order = torch.randperm(len(counts), generator=draw).numpy()
    owners = _owners(counts, slots, np.minimum(counts, clients), tie_order)

    # Samples can move only along shared classes, so a class goes half to the clients with the
    # smallest load and half to those with the largest, classes with most samples per owner first.
    # This weight is in quarters of its mean: smaller differences are ordered at random, because
    # moving samples removes them anyway.
    weight = np.rint(4 * counts / owners * (slots / counts.sum())).astype(np.int64)
    owned = np.empty((clients, classes_per_client), dtype=np.int64)
    amounts = np.empty_like(owned)
    taken, load = np.zeros(clients, dtype=np.int64), np.zeros(clients, dtype=np.int64)
    for label in np.lexsort((tie_order, -weight)):
        tie = torch.randperm(clients, generator=draw).numpy()
        ranked = np.lexsort((tie, load, taken))
        # Clients with most free slots first: by Gale and Ryser, the remaining classes then fit too.
        # The load decides only among clients with equally many free slots.
        last = taken[ranked[owners[label] - 1]]
        first, end = np.searchsorted(taken[ranked], [last, last + 1])
        heaviest = (owners[label] - first) // 2
        chosen = np.append(ranked[: owners[label] - heaviest], ranked[end - heaviest : end])
        share, extra = divmod(counts[label], owners[label])
        owned[chosen, taken[chosen]] = label
        amounts[chosen, taken[chosen]] = share + (np.arange(len(chosen)) < extra)
        taken[chosen] += 1
        load[chosen] += weight[label]
    mixed = _swapped(owned, amounts, weight, draw)
    _equalise(*mixed)
    if np.ptp(mixed[1].sum(1)) > 1:  # the greedy's owners may allow sizes that are more equal
        _equalise(owned, amounts)
        if (amounts.sum(1) ** 2).sum() < (mixed[1].sum(1) ** 2).sum():
            return owned, amounts
    return mixed


def _swapped(
    owned: Integers, amounts: Integers, weight: Integers, draw: torch.Generator
) -> tuple[Integers, Integers]:
    """Swaps classes, with their samples, between random pairs of clients.

    The greedy assigns classes in blocks: with Nc = C/2 each class goes to the clients that another
    class leaves free, and the two never meet. A trade shuffles the classes that only one client of
    a pair owns, among classes of equal weight, so each client keeps its number of classes and its
    load, and each class its number of owners. Strona et al., 2014,
    https://doi.org/10.1038/ncomms5114
    """
    clients, slots = owned.shape
    if slots == 1:  # no classes meet at a client
        return owned.copy(), amounts.copy()
    held = np.zeros((clients, len(weight)), dtype=np.int64)
    np.put_along_axis(held, owned, amounts, axis=1)
    groups = [np.flatnonzero(weight == one) for one in np.unique(weight)]
    for _ in range(TRADES):
        order = torch.randperm(clients, generator=draw).numpy()
        pairs = order[: clients // 2 * 2].reshape(2, -1)
        for group in groups:
            first, second = held[pairs[:, :, None], group]
            single = (first > 0) != (second > 0)
            keys = torch.rand(single.shape, generator=draw, dtype=torch.float64).numpy()
            ranked = np.where(single, keys, 1).argsort(axis=1, kind="stable")
            count = (single & (first > 0)).sum(1, keepdims=True)
            chosen = np.zeros_like(single)
            np.put_along_axis(chosen, ranked, np.arange(len(group)) < count, axis=1)
            total = first + second
            held[pairs[0][:, None], group] = np.where(single, total * chosen, first)
            held[pairs[1][:, None], group] = np.where(single, total * ~chosen, second)
    mixed = held.nonzero()[1].reshape(clients, slots)
    return mixed, np.take_along_axis(held, mixed, axis=1)


def _unplaceable(counts: Integers, clients: int, wanted: int) -> str:
    """Why K clients cannot own Nc classes each: C ≤ K·Nc ≤ Σ_c min(K, n_c) does not hold."""
    classes, slots = len(counts), clients * wanted
    request = f"classes_per_client={wanted} with clients={clients}"
    room = int(np.minimum(counts, clients).sum())
    if wanted > classes:
        reason = f"asks for more classes than the {classes} present"
    elif slots < classes:
        reason = f"has {slots} places for {classes} classes, and each needs an owner"
    else:
        reason = f"has {slots} places and too few samples: the classes can fill {room}"
    options = []
    if (low := -(-classes // clients)) <= (high := room // clients):
        options.append(f"classes_per_client={min(max(wanted, low), high)}")
    others = np.arange(1, counts.sum() + 1)
    rooms = (np.bincount(counts)[::-1].cumsum()[::-1][1:]).cumsum()  # Σ_c min(k, n_c), k = 1, 2, …
    rooms = np.pad(rooms, (0, len(others) - len(rooms)), mode="edge")
    possible = others[(others * wanted >= classes) & (others * wanted <= rooms)]
    if len(possible):
        options.append(f"clients={possible[np.abs(possible - clients).argmin()]}")
    return f"{request} {reason}: choose {' or '.join(options or ['another partition'])}."


def _owners(counts: Integers, slots: int, most: Integers, tie_order: Integers) -> Integers:
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
            owners[np.lexsort((tie_order, -remainder))[: slots - owners.sum()]] += 1
            break
        # Fixing the side with the larger total violation moves λ so that it stays violated.
        if (total - share[low]).sum() >= (share - most * total)[high].sum():
            owners[low], free = 1, free & ~low
        else:
            owners[high], free = most[high], free & ~high
    return owners


def _equalise(owned: Integers, amounts: Integers) -> None:
    """Moves samples between the owners of a class, in place, until sizes are as equal as possible.

    A group ends with sizes ⌊mean⌋ and ⌊mean⌋ + 1, or splits in two that cannot exchange samples.
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
    from scipy.sparse import coo_array  # here, as they would slow every run's start down
    from scipy.sparse.csgraph import maximum_flow

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
    moved = flow[classes : classes + clients, :classes].toarray().astype(np.int64)
    return amounts - np.take_along_axis(moved, owned, axis=1)


def _stuck(owned: Integers, amounts: Integers, bound: int) -> npt.NDArray[np.bool_]:
    """The clients above the bound, and all clients they could still give samples to."""
    stuck: npt.NDArray[np.bool_] = amounts.sum(1) > bound
    while True:
        within = np.zeros(int(owned.max()) + 1, dtype=bool)
        within[owned[stuck][amounts[stuck] > 1]] = True
        wider = stuck | within[owned].any(1)
        if np.array_equal(wider, stuck):
            return stuck
        stuck = wider
