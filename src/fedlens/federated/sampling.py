"""Who takes part in a round, how much they do, and who fails to answer: addressed draws.

Each depends on (seed, round, client) alone, so any round can be played again by itself.
"""

import torch

from fedlens import rng


def cohort(seed: int, round_: int, *, clients: int, size: int) -> list[int]:
    """`size` different clients, in ascending order, at a cost that does not depend on `clients`.

    Floyd's algorithm: the last of 1, 2, … candidates joins if the one drawn among them has already.
    """
    draws = torch.rand(size, generator=rng.generator(seed, "cohort", round_), dtype=torch.float64)
    chosen: set[int] = set()
    for last, draw in zip(range(clients - size, clients), draws.tolist(), strict=True):
        drawn = int(draw * (last + 1))
        chosen.add(last if drawn in chosen else drawn)
    return sorted(chosen)


def turns(seed: int, round_: int, *, clients: int, size: int) -> list[int]:
    """As `cohort`, but who took part waits until all others have: a shuffled order, dealt out.

    `size` divides `clients`.
    """
    order, place = divmod(round_ - 1, clients // size)
    draw = rng.generator(seed, "turns", order)
    shuffled = torch.randperm(clients, generator=draw)
    return sorted(shuffled[place * size : (place + 1) * size].tolist())


COHORTS = {"chance": cohort, "turns": turns}


def local_steps(seed: int, round_: int, client: int, *, fewest: int, most: int) -> int:
    """How many steps a client manages in this round: a straggler does fewer than it was asked."""
    if fewest == most:
        return most
    draw = rng.generator(seed, "local steps", round_, client)
    return int(torch.randint(fewest, most + 1, (), generator=draw))


def answers(seed: int, round_: int, client: int, *, dropout: float) -> bool:
    """Whether the update of a sampled client arrives."""
    if not dropout:
        return True
    draw = rng.generator(seed, "dropout of clients", round_, client)
    return bool(torch.rand((), generator=draw, dtype=torch.float64) >= dropout)
