"""Which clients take part in a round, how many steps they do, and which fail to answer.

Every draw depends on (seed, round, client) alone, so any round can be repeated by itself.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Literal

import torch

from fedlens import rng
from fedlens.errors import FedlensError
from fedlens.federated.tasks import ClientTask, Cohort
from fedlens.registry import Range, sampling

# (seed, round, clients, size, **parameters) → client numbers, or chains of them
Sample = Callable[..., Sequence[int] | Sequence[Sequence[int]]]


@sampling(label="uniform client sampling", order=1)
def uniform(seed: int, round_: int, clients: int, size: int) -> list[int]:
    """`size` different clients, all sets equally likely, in ascending order.

    Floyd's algorithm, at a cost that does not depend on `clients`: the last of 1, 2, … candidates
    joins if the one drawn among them has already.
    """
    draws = torch.rand(size, generator=rng.generator(seed, "cohort", round_), dtype=torch.float64)
    chosen: set[int] = set()
    for last, draw in zip(range(clients - size, clients), draws.tolist(), strict=True):
        drawn = int(draw * (last + 1))
        chosen.add(last if drawn in chosen else drawn)
    return sorted(chosen)


@sampling(label="cyclic client sampling", order=2)
def cyclic(seed: int, round_: int, clients: int, size: int) -> list[int]:
    """No client takes part again before all others have: cohorts split a shuffled order.

    The order is shuffled anew after each cycle of `clients / size` rounds.
    """
    return sorted(_turn(seed, round_, clients, size))


@sampling(
    label="chains of clients",
    paper="Zaccone et al., 2022, https://arxiv.org/abs/2201.10899",
    order=3,
    sequential=True,
)
def chain(
    seed: int,
    round_: int,
    clients: int,
    size: int,
    *,
    chains: Annotated[int, Range("[1, inf)"), "how many chains a cohort is cut into"] = 1,
    order: Annotated[
        Literal["shuffled", "opposite"],
        "opposite: each chain is run twice, forwards and backwards through its clients",
    ] = "shuffled",
) -> list[list[int]]:
    """Clients train one after another, each from where the last stopped; ends are averaged.

    Cohorts are those of `cyclic`, in shuffled order. One chain over all clients is cyclic weight
    transfer (Chang et al., 2018, https://doi.org/10.1093/jamia/ocy017).

    Examples:
        >>> one, two = chain(0, 1, 8, 4, chains=2)
        >>> len(one), len(two), sorted(one + two) == cyclic(0, 1, 8, 4)
        (2, 2, True)
        >>> there, back = chain(0, 1, 8, 4, order="opposite")
        >>> back == there[::-1]
        True
    """
    if size % chains:
        raise FedlensError(
            f"Chains must be of equal length, but {chains} does not divide {size} clients: choose "
            "another number of chains, or another participation."
        )
    shuffled, length = _turn(seed, round_, clients, size), size // chains
    cut = [shuffled[start : start + length] for start in range(0, size, length)]
    return [*cut, *(one[::-1] for one in cut)] if order == "opposite" else cut


def _turn(seed: int, round_: int, clients: int, size: int) -> list[int]:
    """The clients of a round in the shuffled order of its cycle."""
    if clients % size:
        raise FedlensError(
            f"Cyclic sampling needs cohorts of equal size, but {size} does not divide {clients} "
            "clients: choose another participation."
        )
    cycle, place = divmod(round_ - 1, clients // size)
    draw = rng.generator(seed, "turns", cycle)
    shuffled = torch.randperm(clients, generator=draw)
    turn: list[int] = shuffled[place * size : (place + 1) * size].tolist()
    return turn


def drawn_steps(seed: int, round_: int, client: int, *, fewest: int, most: int) -> int:
    """How many steps a client does in this round: a straggler does fewer than it was asked for."""
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


def cohort_size(clients: int, participation: float) -> int:
    """⌈C·K⌉, at least one; a product like 0.07 · 100 is not rounded up by its last bit."""
    if not 0 < participation <= 1:
        raise FedlensError(f"participation={participation} must be in (0, 1].")
    return max(1, math.ceil(round(participation * clients, 9)))


def draw_cohort(
    seed: int,
    round_: int,
    sizes: Sequence[int],
    *,
    size: int,
    lr: float,
    local_steps: int,
    min_local_steps: int | None = None,
    dropout: float = 0.0,
    sample: Sample = uniform,
) -> Cohort:
    """Draws `size` clients and gives each that will answer a task; `sizes` are all clients'.

    Steps are drawn from `min_local_steps` to `local_steps`; None: every client does all of them.
    A client's draws in a round are the same wherever it comes in a chain.

    Examples:
        >>> cohort = draw_cohort(0, 1, [10, 20, 30], size=2, lr=0.1, local_steps=4)
        >>> cohort.drawn, [task.examples for task in cohort.tasks]
        ((0, 2), [10, 30])
    """
    drawn = list(_links(sample(seed, round_, len(sizes), size)))
    tasks = tuple(
        ClientTask(
            round_,
            client,
            drawn_steps(
                seed, round_, client, fewest=min_local_steps or local_steps, most=local_steps
            ),
            lr=lr,
            examples=int(sizes[client]),
            chain=number,
        )
        for number, client in drawn
        if answers(seed, round_, client, dropout=dropout)
    )
    return Cohort(
        round_,
        tuple(client for _, client in drawn),
        tasks,
        lr=lr,
        dropout=dropout > 0,
        stragglers=bool(min_local_steps),
    )


def _links(sampled: Sequence[int | Sequence[int]]) -> Iterator[tuple[int | None, int]]:
    """Every client with the number of its chain; None where clients are not in chains."""
    if len({isinstance(one, Sequence) for one in sampled}) > 1:
        raise FedlensError(
            f"The sampled clients {list(sampled)} mix single clients and chains: return either "
            "numbers of clients or lists of them."
        )
    for number, one in enumerate(sampled):
        if isinstance(one, Sequence):
            yield from ((number, client) for client in one)
        else:
            yield None, one
