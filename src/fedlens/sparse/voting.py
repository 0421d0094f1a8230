"""One mask from many clients' rankings: a weight is trained if at least q of m clients choose it.

Every client chooses its first t weights, with t such that the merged mask has the wanted density.
This ranks weights by the q-th smallest of their ranks: q clients choose a weight if that is < t.
"""

from collections.abc import Callable, Iterable

import torch

from fedlens.errors import FedlensError, suggest
from fedlens.rng import Stream
from fedlens.sparse.masks import Pool, Ranking, reordered

BLOCK = 1 << 20  # weights whose ranks are stacked at a time

VOTES: dict[str, Callable[[int], int]] = {  # clients → votes needed
    "union": lambda clients: 1,
    "majority": lambda clients: clients // 2 + 1,
    "intersection": lambda clients: clients,
}


def merge(rankings: Iterable[Ranking], vote: str, *, stream: Stream) -> Ranking:
    """The common ranking of all clients; their order does not matter, and ties are drawn.

    Takes 4·m·N bytes for the ranks of m clients; `rankings` may be a generator.
    """
    if vote not in VOTES:
        raise FedlensError(f"There is no vote '{vote}': {suggest(vote, VOTES)}")
    ranks: dict[Pool, list[torch.Tensor]] = {}
    first: Ranking | None = None
    for one in rankings:
        first = first or one
        if one.shapes != first.shapes or one.orders.keys() != first.orders.keys():
            raise FedlensError(
                "The clients ranked different weights: calibrate them all with the same model, "
                "the same maskable parameters and the same scope."
            )
        for pool, order in one.orders.items():
            ranks.setdefault(pool, []).append(_ranks(order))
    if first is None:
        raise FedlensError("A vote on masks needs at least one client.")
    orders = {}
    for pool, rows in ranks.items():
        reached = _nth_smallest(rows, VOTES[vote](len(rows)))
        draw = stream.draw("vote ties", vote, *pool)
        ties = torch.randperm(len(reached), generator=draw, dtype=torch.int32)
        orders[pool] = reordered(ties, reached, len(ties), largest=False)
    return Ranking(first.shapes, orders)


def _ranks(order: torch.Tensor) -> torch.Tensor:
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(len(order), dtype=order.dtype)
    return ranks


def _nth_smallest(rows: list[torch.Tensor], nth: int) -> torch.Tensor:
    """The n-th smallest value of each column, counted from 1."""
    blocks = zip(*(torch.split(row, BLOCK) for row in rows), strict=True)
    return torch.cat([torch.stack(block).kthvalue(nth, dim=0).values for block in blocks])
