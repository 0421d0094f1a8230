"""Masks by rule: of N weights exactly round(density·N) are trained, whichever rule ranks them.

A rule puts weights in an order of preference; a density takes the first of them. Ties stand in the
order of an addressed permutation, so `random` is the rule under which everything is tied.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from fedlens.errors import FedlensError, suggest
from fedlens.params import Params
from fedlens.rng import Stream

Masks = dict[str, torch.Tensor]  # True where trained; on the CPU
Pool = tuple[str, ...]  # names of tensors whose weights compete with each other


@dataclass(frozen=True)
class Rule:
    by: Literal["sensitivity", "magnitude"] | None
    largest: bool
    doc: str


RULES = {
    "least_sensitive": Rule("sensitivity", False, "What the outputs depend on least, as in TaLoS."),
    "most_sensitive": Rule("sensitivity", True, "What the outputs depend on most."),
    "lowest_magnitude": Rule("magnitude", False, "The weights nearest to zero."),
    "highest_magnitude": Rule("magnitude", True, "The weights farthest from zero."),
    "random": Rule(None, False, "Any weight alike."),
}

# Names are sorted, so that no mask depends on the order in which a model lists its tensors.
SCOPES: dict[str, Callable[[Params], list[Pool]]] = {
    "global": lambda weights: [tuple(sorted(weights))],
    "tensor": lambda weights: [(name,) for name in sorted(weights)],
}


@dataclass(frozen=True)
class Preference:
    """For each pool the positions of its weights, concatenated, from first to last to be trained.

    The masks of one preference are nested: what is trained at a density is trained at all above.
    """

    shapes: Mapping[str, torch.Size]
    orders: Mapping[Pool, torch.Tensor]  # int32, 4 bytes a weight

    def quotas(self, density: float) -> dict[Pool, int]:
        """How many weights of each pool are trained, round(density·N) in all."""
        if not 0 <= density <= 1:
            raise FedlensError(
                f"The density is the fraction of weights trained, from 0 to 1, not {density}."
            )
        sizes = [len(order) for order in self.orders.values()]
        shares = apportion(sizes, round(density * sum(sizes)))
        return dict(zip(self.orders, shares, strict=True))

    def masks(self, density: float) -> Masks:
        quotas = self.quotas(density)
        found: Masks = {}
        for pool, order in self.orders.items():
            flat = torch.zeros(len(order), dtype=torch.bool)
            flat[order[: quotas[pool]]] = True
            parts = torch.split(flat, [self.shapes[name].numel() for name in pool])
            found |= dict(zip(pool, parts, strict=True))
        return {name: found[name].clone().view(shape) for name, shape in self.shapes.items()}

    def refined(self, values: Params, rule: str, density: float = 1.0) -> "Preference":
        """What is trained at `density` ranked anew by `values`; the rest stays where it is."""
        quotas = self.quotas(density)
        orders = {
            pool: reordered(
                order, self._flat(pool, values, rule), quotas[pool], largest=RULES[rule].largest
            )
            for pool, order in self.orders.items()
        }
        return replace(self, orders=orders)

    def _flat(self, pool: Pool, values: Params, rule: str) -> torch.Tensor:
        for name in pool:
            if values[name].shape != self.shapes[name]:
                raise ValueError(
                    f"{name} has {tuple(values[name].shape)} values for {tuple(self.shapes[name])}."
                )
            if not values[name].isfinite().all():
                raise FedlensError(
                    f"{name} has weights whose {RULES[rule].by} is not finite, which no rule can "
                    "rank: check that the weights are finite, and calibrate in float32."
                )
        return torch.cat([values[name].detach().reshape(-1).cpu() for name in pool])


def select(
    weights: Params,
    rule: str,
    density: float,
    *,
    stream: Stream,
    scores: Params | None = None,
    scope: str = "global",
) -> Masks:
    """Masks in one shot; `scores` are read by the rules of sensitivity alone."""
    return prefer(weights, rule, scores=scores, scope=scope, stream=stream).masks(density)


def prefer(
    weights: Params, rule: str, *, stream: Stream, scores: Params | None = None, scope: str
) -> Preference:
    return decided(undecided(weights, rule, scope=scope, stream=stream), weights, rule, scores)


def decided(
    order: Preference, weights: Params, rule: str, scores: Params | None = None
) -> Preference:
    by = RULES[rule].by
    if by is None:
        return order
    if by == "magnitude":
        return order.refined({name: value.detach().abs() for name, value in weights.items()}, rule)
    if scores is None:
        raise ValueError(f"'{rule}' needs scores.")
    return order.refined(scores, rule)


def undecided(weights: Params, rule: str, *, scope: str, stream: Stream) -> Preference:
    """Every pool in the order in which `rule` settles ties; each rule has draws of its own."""
    if rule not in RULES:
        raise FedlensError(f"There is no mask rule '{rule}': {suggest(rule, RULES)}")
    if scope not in SCOPES:
        raise FedlensError(f"There is no mask scope '{scope}': {suggest(scope, SCOPES)}")
    shapes = {name: value.shape for name, value in weights.items()}
    orders = {}
    for pool in SCOPES[scope](weights):
        size = sum(shapes[name].numel() for name in pool)
        draw = stream.draw("mask ties", rule, *pool)
        orders[pool] = torch.randperm(size, generator=draw, dtype=torch.int32)
    return Preference(shapes, orders)


def reordered(
    order: torch.Tensor, values: torch.Tensor, kept: int, *, largest: bool
) -> torch.Tensor:
    """The first `kept` positions sorted by their values, equal ones as they stood."""
    head = order[:kept]
    ranked = values[head].argsort(descending=largest, stable=True)
    return torch.cat([head[ranked], order[kept:]])


def apportion(sizes: Sequence[int], count: int) -> list[int]:
    """`count` over pools so that one density t fits each to half a weight: |quota − t·size| ≤ ½.

    Webster's method: the quotas of a smaller count are never larger, which those by largest
    remainders can be; a weight dropped while calibrating would then have to come back.
    """
    total = max(1, sum(sizes))
    quotas = [(2 * count * size + total) // (2 * total) for size in sizes]
    pools = [pool for pool, size in enumerate(sizes) if size]
    while sum(quotas) < count:
        quotas[min(pools, key=lambda p: ((quotas[p] + 0.5) / sizes[p], p))] += 1
    while sum(quotas) > count:
        quotas[max(pools, key=lambda p: ((quotas[p] - 0.5) / sizes[p], p))] -= 1
    return quotas
