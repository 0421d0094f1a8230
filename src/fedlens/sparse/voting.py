"""One mask from many clients' preferences: a weight is in if at least q of m clients chose it.

Every client chooses its first t weights, with t such that the merged mask has the density asked
for. That is to rank weights by the q-th smallest of their ranks: q clients have a weight among
their first t if and only if that rank is below t.
"""

from collections.abc import Callable, Iterable

import torch

from fedlens.errors import FedlensError, suggest
from fedlens.rng import Stream
from fedlens.sparse.masks import Pool, Preference, reordered

BLOCK = 1 << 20  # weights whose ranks are laid side by side at a time

VOTES: dict[str, Callable[[int], int]] = {  # clients → votes needed
    "union": lambda clients: 1,
    "majority": lambda clients: clients // 2 + 1,
    "intersection": lambda clients: clients,
}


def merge(preferences: Iterable[Preference], vote: str, *, stream: Stream) -> Preference:
    """The clients' common preference; whose it is does not matter, ties are drawn.

    Takes 4·m·N bytes for the ranks of m clients, who may be handed over one at a time.
    """
    if vote not in VOTES:
        raise FedlensError(f"There is no vote '{vote}': {suggest(vote, VOTES)}")
    ranks: dict[Pool, list[torch.Tensor]] = {}
    first: Preference | None = None
    for one in preferences:
        first = first or one
        if one.shapes != first.shapes or one.orders.keys() != first.orders.keys():
            raise FedlensError(
                "Clients voted on different weights: calibrate them all with the same model, "
                "the same maskable parameters and the same scope."
            )
        for pool, order in one.orders.items():
            ranks.setdefault(pool, []).append(_ranks(order))
    if first is None:
        raise FedlensError("A vote on masks needs at least one client.")
    orders = {}
    for pool, found in ranks.items():
        reached = _nth_smallest(found, VOTES[vote](len(found)))
        draw = stream.draw("vote ties", vote, *pool)
        ties = torch.randperm(len(reached), generator=draw, dtype=torch.int32)
        orders[pool] = reordered(ties, reached, len(ties), largest=False)
    return Preference(first.shapes, orders)


def _ranks(order: torch.Tensor) -> torch.Tensor:
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(len(order), dtype=order.dtype)
    return ranks


def _nth_smallest(rows: list[torch.Tensor], nth: int) -> torch.Tensor:
    """Down each column, counted from 1."""
    blocks = zip(*(torch.split(row, BLOCK) for row in rows), strict=True)
    return torch.cat([torch.stack(block).kthvalue(nth, dim=0).values for block in blocks])
