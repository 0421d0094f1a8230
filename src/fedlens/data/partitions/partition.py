"""Who holds which training example: N samples split over K clients, each sample to exactly one.

Rows: no skew, Nc classes for each client, Dirichlet label skew, log-normal size skew. All bounds
are met by construction, so no partition is rejected and drawn again. `assignments` has the rows
that are given by the data or by a file.
"""

from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch

from fedlens import rng
from fedlens.data.partitions.assignments import Samples, numbered
from fedlens.data.partitions.class_assignment import assign_classes
from fedlens.errors import FedlensError
from fedlens.registry import Range, partitioner


@dataclass(frozen=True)
class Partition:
    """Who holds which training example; all shards are slices of one order, so K may be large.

    Examples:
        >>> import torch
        >>> import fedlens as fl
        >>> clients = fl.Partition(torch.tensor([0, 3, 1, 2]), offsets=torch.tensor([0, 2, 4]))
        >>> len(clients), clients.sizes.tolist(), clients.shard(1).tolist()
        (2, [2, 2], [1, 2])
    """

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
        """How many examples each client holds."""
        return self.offsets.diff()


def partition(
    labels: torch.Tensor | npt.NDArray[np.integer] | list[int],
    *,
    clients: int | None = None,
    by: str | Callable[..., torch.Tensor] = "iid",
    seed: int = 0,
    keys: Sequence[Any] | None = None,
    **parameters: object,
) -> Partition:
    """Splits the samples with these labels over clients.

    Args:
        labels: The class of each sample. Only classes that occur count, so numbers may have gaps.
        clients: How many clients share the samples; may be left out where `by` decides it.
        by: `"iid"`, `"classes"`, `"dirichlet"`, `"quantity"`, `"key"`, `"file"` or a partition of
            your own: its name, or a function `(labels, clients, seed, **parameters)` that returns
            the client of each sample, where `labels` are numbered from 0 without gaps.
        seed: Of all random draws; the same seed gives the same partition.
        keys: Of `by="key"`: who each sample is from, such as the names of writers.
        **parameters: Those of the chosen partition, such as `classes_per_client` or `alpha`.

    Returns:
        A `Partition`; `shard(client)` has the positions of one client's samples.

    Examples:
        >>> import fedlens as fl
        >>> clients = fl.partition([0, 1, 2, 3] * 10, clients=4, by="classes", classes_per_client=2)
        >>> clients.sizes.tolist()
        [10, 10, 10, 10]
        >>> len(clients.shard(0))
        10
        >>> fl.partition([0, 1, 0], by="key", keys=["ann", "bob", "ann"]).sizes.tolist()
        [2, 1]
    """
    labels = torch.as_tensor(labels).cpu()
    if labels.ndim != 1:
        raise FedlensError(
            f"labels has shape {tuple(labels.shape)}: give one class number for each sample."
        )
    if len(labels) == 0:
        raise FedlensError("There are no samples to partition: choose other data.")
    row = partitioner[by] if isinstance(by, str) else None
    if keys is not None and (row is None or row.name != "key"):
        raise FedlensError('keys go with by="key": leave them out, or choose it.')
    if row is not None and row.traits.get("assigned"):
        samples = Samples(len(labels), clients=keys)
        return grouped(assigned(row.name, samples, row.checked(parameters), clients))
    if clients is None:
        raise FedlensError("clients is missing: say how many clients share the samples.")
    if clients < 1:
        raise FedlensError(f"clients={clients} must be 1 or more.")
    if clients > len(labels):
        raise FedlensError(
            f"clients={clients} is more than the {len(labels)} samples: "
            f"choose clients={len(labels)} or fewer."
        )
    if row is not None:
        split, parameters = row.make, row.checked(parameters)
    else:
        assert not isinstance(by, str)
        split = by
        partitioner.check_signature(split, {}, parameters)
    _, dense = torch.unique(labels, return_inverse=True)
    return grouped(_checked(split(dense, clients, seed, **parameters), len(labels), clients))


def assigned(
    name: str, samples: Samples, parameters: Mapping[str, Any], clients: int | None
) -> torch.Tensor:
    """The client of each sample by a row that says it; `clients` is how many there should be."""
    holder, ids = numbered(partitioner[name].make(samples, **parameters))
    if len(holder) != samples.count:
        raise FedlensError(
            f"The partition '{name}' names a client for {len(holder)} samples, and there are "
            f"{samples.count}: name one for each."
        )
    if clients not in (None, len(ids)):
        raise FedlensError(
            f"The partition '{name}' has {len(ids)} clients, not {clients}: set "
            f"federated.clients={len(ids)} (clients={len(ids)} in Python)."
        )
    return holder


def grouped(holder: torch.Tensor) -> Partition:
    """The partition in which client `holder[i]` holds sample i; clients are numbered from 0."""
    sizes = torch.bincount(holder)
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    return Partition(order=holder.argsort(stable=True), offsets=offsets)


def _checked(holder: torch.Tensor, samples: int, clients: int) -> torch.Tensor:
    """What a partition returned, refused unless it names a client for each sample."""
    holder = torch.as_tensor(holder)
    if holder.shape != (samples,) or holder.is_floating_point():
        raise FedlensError(
            f"The partition returned a tensor of shape {tuple(holder.shape)} and {holder.dtype}: "
            f"return {samples} integers, the client of each sample."
        )
    holder = holder.cpu().long()
    if int(holder.min()) < 0 or int(holder.max()) >= clients:
        raise FedlensError(
            f"The partition returned clients from {int(holder.min())} to {int(holder.max())}: "
            f"number them from 0 to {clients - 1}."
        )
    if len(empty := (torch.bincount(holder, minlength=clients) == 0).nonzero()):
        raise FedlensError(
            f"The partition leaves client {int(empty[0])} without samples: give each client at "
            "least one."
        )
    return holder


@partitioner(label="IID", paper="McMahan et al., 2017, https://arxiv.org/abs/1602.05629", order=1)
def iid(labels: torch.Tensor, clients: int, seed: int) -> torch.Tensor:
    """The same number of samples of every class for every client, within one."""
    seats = torch.randperm(clients, generator=rng.generator(seed, "partition", "seats"))
    holder = torch.empty_like(labels)
    holder[_by_class(labels, seed)] = seats[torch.arange(len(labels)) % clients]
    return holder


@partitioner(
    label="Nc={classes_per_client}",
    paper="Li et al., 2021, https://arxiv.org/abs/2102.02079",
    order=2,
)
def classes(
    labels: torch.Tensor,
    clients: int,
    seed: int,
    *,
    classes_per_client: Annotated[int, Range("[1, inf)"), "classes that each client holds"] = 10,
) -> torch.Tensor:
    """Samples of exactly Nc classes for every client, sizes as equal as possible.

    The number of clients that own a class is in proportion to its samples.
    """
    counts = torch.bincount(labels).numpy()
    draw = rng.generator(seed, "partition", "owners")
    owned, amounts = assign_classes(counts, clients, classes_per_client, draw)
    by_class = owned.ravel().argsort(kind="stable")
    who = np.repeat(by_class // classes_per_client, amounts.ravel()[by_class])
    holder = torch.empty_like(labels)
    holder[_by_class(labels, seed)] = torch.from_numpy(who)
    return holder


@partitioner(
    label="Dirichlet α={alpha}",
    paper="Yurochkin et al., 2019, https://arxiv.org/abs/1905.12022",
    order=3,
)
def dirichlet(
    labels: torch.Tensor,
    clients: int,
    seed: int,
    *,
    alpha: Annotated[
        float, Range("(0, inf)"), "the smaller, the fewer classes make up most of a client's data"
    ] = 0.3,
    min_size: Annotated[int, Range("[1, inf)"), "samples that each client holds at least"] = 10,
) -> torch.Tensor:
    """Each class split by proportions p ~ Dir(α, …, α), drawn for every class.

    Clients below min_size are filled up with samples drawn from the largest clients.
    """
    _check_min_size(len(labels), clients, min_size)
    parts = []
    for label, count in enumerate(torch.bincount(labels).tolist()):
        draw = rng.generator(seed, "partition", "law", label)
        parts.append(_repeated(_apportioned(count, _dirichlet_proportions(clients, alpha, draw))))
    holder = torch.empty_like(labels)
    holder[_by_class(labels, seed)] = torch.cat(parts)

    sizes = torch.bincount(holder, minlength=clients)
    change = _with_minimum(sizes, min_size) - sizes
    shuffle = rng.generator(seed, "partition", "lifted")
    shuffled = torch.randperm(len(labels), generator=shuffle)
    grouped = shuffled[holder[shuffled].argsort(stable=True)]
    rank = torch.arange(len(labels)) - (sizes.cumsum(0) - sizes)[holder[grouped]]
    moved = grouped[rank < -change[holder[grouped]]]
    holder[moved] = _repeated(change.clamp(min=0))
    return holder


@partitioner(
    label="log-normal sizes σ={sigma}",
    paper="Acar et al., 2021, https://arxiv.org/abs/2111.04263",
    order=4,
)
def quantity(
    labels: torch.Tensor,
    clients: int,
    seed: int,
    *,
    sigma: Annotated[float, Range("[0, inf)"), "spread of the sizes; 0: equal sizes"] = 1.0,
    min_size: Annotated[int, Range("[1, inf)"), "samples that each client holds at least"] = 10,
) -> torch.Tensor:
    """Sizes in proportion to exp(σz), z ~ N(0, 1); samples are drawn regardless of their label.

    Clients below min_size are filled up at the expense of the largest clients.
    """
    _check_min_size(len(labels), clients, min_size)
    draw = rng.generator(seed, "partition", "sizes")
    logits = sigma * torch.randn(clients, dtype=torch.float64, generator=draw)
    sizes = _apportioned(len(labels), torch.softmax(logits, 0))
    sizes = _with_minimum(sizes, min_size)
    shuffle = rng.generator(seed, "partition", "samples")
    holder = torch.empty_like(labels)
    holder[torch.randperm(len(labels), generator=shuffle)] = _repeated(sizes)
    return holder


def _check_min_size(samples: int, clients: int, min_size: int) -> None:
    if clients * min_size > samples:
        fewer = f"clients={samples // min_size} or " if samples >= min_size else ""
        raise FedlensError(
            f"clients={clients} with min_size={min_size} takes {clients * min_size} samples and "
            f"there are {samples}: choose {fewer}min_size={samples // clients}."
        )


def _dirichlet_proportions(clients: int, alpha: float, draw: torch.Generator) -> torch.Tensor:
    """p ∝ g, g ~ Gamma(α), as Gamma(α + 1)·U^(1/α): in logarithms no α is too small."""
    shape = torch.full((clients,), alpha + 1, dtype=torch.float64)
    gamma = torch._standard_gamma(shape, generator=draw)
    uniform = 1 - torch.rand(clients, dtype=torch.float64, generator=draw)
    scaled = alpha * (gamma / shape).log() + uniform.log()  # α·log g, up to a constant
    return torch.softmax((scaled - scaled.max()) / alpha, 0)


def _by_class(labels: torch.Tensor, seed: int) -> torch.Tensor:
    """All positions by class, shuffled within it."""
    shuffle = rng.generator(seed, "partition", "samples")
    shuffled = torch.randperm(len(labels), generator=shuffle)
    return shuffled[labels[shuffled].argsort(stable=True)]


def _repeated(sizes: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(sizes)).repeat_interleave(sizes)


def _apportioned(total: int, proportions: torch.Tensor) -> torch.Tensor:
    """Integers that sum to `total`, in these proportions, by largest remainder."""
    shares = total * proportions
    whole = shares.floor().long()
    left = total - int(whole.sum())
    whole[(shares - whole).argsort(descending=True, stable=True)[:left]] += 1
    return whole


def _with_minimum(sizes: torch.Tensor, least: int) -> torch.Tensor:
    """The sizes with none below `least`; the largest are cut to make up for it."""
    raised = sizes.clamp(min=least)
    added = int((raised - sizes).sum())
    levels = range(int(sizes.max()) + 1)
    level = bisect(levels, -added, key=lambda h: -int((sizes - h).clamp(min=0).sum())) - 1
    cut = raised.clamp(max=level)
    cut[(raised > level).nonzero()[: int(sizes.sum() - cut.sum()), 0]] += 1
    return cut
