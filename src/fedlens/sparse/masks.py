"""Masks by rule: of N weights exactly round(density·N) are trained, whichever rule ranks them.

A rule gives the values that weights are ranked by; the mask of a density trains the first of the
ranking. Equal values keep the order of a random permutation, and `random` keeps it for all weights.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedlens.errors import FedlensError, suggest
from fedlens.params import Params
from fedlens.registry import Row, mask_rule
from fedlens.rng import Stream

Masks = dict[str, Tensor]  # True where trained; on the CPU
Rule = str | Row | Callable[..., Tensor | None]  # a name, a row, or a function
Pool = tuple[str, ...]  # names of the tensors whose weights are ranked together

# A rule maps a tensor of weights and its sensitivities (None if its row has sensitivity=False) to
# the values they are ranked by; None leaves them in random order. With largest=True the largest
# values are trained. Sensitivities are known up to a positive factor that all weights share.


@mask_rule(
    label="least sensitive",
    paper="Iurada et al., 2025, https://arxiv.org/abs/2504.02620",
    order=1,
    sensitivity=True,
    largest=False,
)
def least_sensitive(weight: Tensor, sensitivity: Tensor | None) -> Tensor | None:
    """The weights that the outputs depend on least, as in TaLoS.

    The authors' code keeps every weight whose score is at most the ⌊density·N⌋-th smallest, ties
    included; here round(density·N) weights are kept, and ties are broken at random.
    """
    del weight
    return sensitivity


@mask_rule(label="most sensitive", order=2, sensitivity=True, largest=True)
def most_sensitive(weight: Tensor, sensitivity: Tensor | None) -> Tensor | None:
    """The weights that the outputs depend on most."""
    del weight
    return sensitivity


@mask_rule(label="lowest magnitude", order=3, sensitivity=False, largest=False)
def lowest_magnitude(weight: Tensor, sensitivity: Tensor | None) -> Tensor | None:
    """The weights nearest to zero."""
    del sensitivity
    return weight.abs()


@mask_rule(label="highest magnitude", order=4, sensitivity=False, largest=True)
def highest_magnitude(weight: Tensor, sensitivity: Tensor | None) -> Tensor | None:
    """The weights farthest from zero."""
    del sensitivity
    return weight.abs()


@mask_rule(label="random", order=5, sensitivity=False, largest=False)
def random(weight: Tensor, sensitivity: Tensor | None) -> Tensor | None:
    """Weights drawn at random, all with the same probability."""
    del weight, sensitivity
    return None


def rule_row(rule: Rule) -> Row:
    """The row of that name, the row itself, or the row of a plain function."""
    return mask_rule.row(rule)


def needs_scores(rule: Rule) -> bool:
    """Whether the rule reads sensitivities; True for a row that does not declare it."""
    return bool(rule_row(rule).traits.get("sensitivity", True))


# Names are sorted, so that no mask depends on the order in which a model lists its tensors.
SCOPES: dict[str, Callable[[Params], list[Pool]]] = {
    "global": lambda weights: [tuple(sorted(weights))],
    "tensor": lambda weights: [(name,) for name in sorted(weights)],
}


@dataclass(frozen=True)
class Ranking:
    """For each pool the positions of its weights, concatenated, in the order they are trained in.

    The masks of one ranking are nested: a weight trained at one density is trained at all higher.
    """

    shapes: Mapping[str, torch.Size]
    orders: Mapping[Pool, Tensor]  # int32, 4 bytes a weight

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
        flat_masks: Masks = {}
        for pool, order in self.orders.items():
            flat = torch.zeros(len(order), dtype=torch.bool)
            flat[order[: quotas[pool]]] = True
            parts = torch.split(flat, [self.shapes[name].numel() for name in pool])
            flat_masks |= dict(zip(pool, parts, strict=True))
        return {name: flat_masks[name].clone().view(shape) for name, shape in self.shapes.items()}

    def refined(self, values: Params, *, largest: bool, density: float = 1.0) -> "Ranking":
        """Ranks the weights trained at `density` again, by `values`; the others keep their order.

        `values` has a tensor for every weight tensor, of the same shape.
        """
        quotas = self.quotas(density)
        orders = {
            pool: reordered(order, self._flat(pool, values), quotas[pool], largest=largest)
            for pool, order in self.orders.items()
        }
        return replace(self, orders=orders)

    def _flat(self, pool: Pool, values: Params) -> Tensor:
        for name in pool:
            if values[name].shape != self.shapes[name]:
                raise ValueError(
                    f"{name} has {tuple(values[name].shape)} values for {tuple(self.shapes[name])}."
                )
            if not values[name].isfinite().all():
                raise FedlensError(
                    f"The values that rank the weights of {name} are not finite: check that its "
                    "weights are finite, and compute scores in float32."
                )
        return torch.cat([values[name].detach().reshape(-1).cpu() for name in pool])


def select(
    weights: Params,
    rule: Rule,
    density: float,
    *,
    stream: Stream,
    scores: Params | None = None,
    scope: str = "global",
    **parameters: Any,
) -> Masks:
    """Masks of one ranking; `scores` are needed by rules of sensitivity only."""
    ranking = rank_weights(weights, rule, scores=scores, scope=scope, stream=stream, **parameters)
    return ranking.masks(density)


def rank_weights(
    weights: Params,
    rule: Rule,
    *,
    stream: Stream,
    scores: Params | None = None,
    scope: str = "global",
    **parameters: Any,
) -> Ranking:
    row = rule_row(rule)
    order = tie_order(weights, row, scope=scope, stream=stream)
    return ranked(order, weights, row, scores, **parameters)


def ranked(
    order: Ranking,
    weights: Params,
    rule: Rule,
    scores: Params | None = None,
    density: float = 1.0,
    **parameters: Any,
) -> Ranking:
    """Ranks the weights trained at `density` of `order` by the rule; `parameters` are the rule's.

    Weights with equal values keep their order.
    """
    row = rule_row(rule)
    if not needs_scores(row):
        scores = None
    elif scores is None:
        raise ValueError(f"the mask rule '{row.name}' needs scores")
    values = {}
    for name, weight in weights.items():
        score = None if scores is None else scores[name]
        value = row.make(weight.detach(), score, **parameters)
        if value is None:
            return order
        values[name] = value
    return order.refined(values, largest=bool(row.traits.get("largest", False)), density=density)


def tie_order(weights: Params, rule: Rule, *, scope: str, stream: Stream) -> Ranking:
    """A random order of every pool, which breaks ties; each rule has draws of its own."""
    row = rule_row(rule)
    if scope not in SCOPES:
        raise FedlensError(f"There is no mask scope '{scope}': {suggest(scope, SCOPES)}")
    shapes = {name: value.shape for name, value in weights.items()}
    orders = {}
    for pool in SCOPES[scope](weights):
        size = sum(shapes[name].numel() for name in pool)
        draw = stream.draw("mask ties", row.name, *pool)
        orders[pool] = torch.randperm(size, generator=draw, dtype=torch.int32)
    return Ranking(shapes, orders)


def reordered(order: Tensor, values: Tensor, kept: int, *, largest: bool) -> Tensor:
    """Sorts the first `kept` positions by their values; equal values keep their order."""
    head = order[:kept]
    by_value = values[head].argsort(descending=largest, stable=True)
    return torch.cat([head[by_value], order[kept:]])


def apportion(sizes: Sequence[int], count: int) -> list[int]:
    """Splits `count` over pools in proportion to their sizes: |quota − t·size| ≤ ½ for one t.

    This is Webster's method: a smaller count never gives a pool more, so that a weight dropped in
    one round of calibration never has to return. Largest remainders do not have this property.
    """
    total = max(1, sum(sizes))
    quotas = [(2 * count * size + total) // (2 * total) for size in sizes]
    pools = [pool for pool, size in enumerate(sizes) if size]
    while sum(quotas) < count:
        quotas[min(pools, key=lambda p: ((quotas[p] + 0.5) / sizes[p], p))] += 1
    while sum(quotas) > count:
        quotas[max(pools, key=lambda p: ((quotas[p] - 0.5) / sizes[p], p))] -= 1
    return quotas
