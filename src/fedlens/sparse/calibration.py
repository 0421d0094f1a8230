"""From scores to a ranking of weights in R rounds; round r keeps the fraction density^((r+1)/R).

TaLoS ranks the kept weights again in every round, by scores computed while the dropped weights are
shrunk; a dropped weight never returns. Iurada et al., 2025, https://arxiv.org/abs/2504.02620.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from fedlens import params
from fedlens.errors import FedlensError, suggest
from fedlens.params import Params
from fedlens.rng import Stream
from fedlens.sparse.masks import Masks, Ranking, Rule, needs_scores, ranked, rule_row, tie_order

Score = Callable[[int], Params]  # round → sensitivity of every weight of the current model
Rank = Callable[..., Ranking]  # `ranked` with the rule and its parameters


def calibrate(
    parameters: Params,
    score: Score,
    *,
    rule: Rule,
    density: float,
    stream: Stream,
    rounds: int = 4,
    method: str = "talos",
    shrink_factor: float = 0.1,
    scope: str = "global",
    **rule_parameters: Any,
) -> Ranking:
    """Ranks the weights; `.masks(density)` of the result are the masks.

    `parameters` are the maskable ones of the model that `score` measures. They may be shrunk
    in between and are bit-identical afterwards, also after an error. `score` is not called for
    rules that do not rank by sensitivity.
    """
    if method not in METHODS:
        raise FedlensError(f"There is no calibration method '{method}': {suggest(method, METHODS)}")
    if rounds < 1:
        raise FedlensError(f"rounds={rounds} must be 1 or more.")
    row = rule_row(rule)
    order = tie_order(parameters, row, scope=scope, stream=stream)
    order.quotas(density)  # refuses an invalid density before hours of scoring
    if not needs_scores(row):
        return ranked(order, parameters, row, **rule_parameters)
    rank = partial(ranked, rule=row, **rule_parameters)
    return METHODS[method](order, parameters, score, rank, density, rounds, shrink_factor)


def kept(density: float, rounds: int, done: int) -> float:
    """The fraction of weights kept after `done` of `rounds` rounds."""
    return float(density ** (done / rounds))


def _talos(
    order: Ranking,
    parameters: Params,
    score: Score,
    rank: Rank,
    density: float,
    rounds: int,
    shrink_factor: float,
) -> Ranking:
    weights = params.copy(parameters)
    try:
        for index in range(rounds):
            fraction = kept(density, rounds, index)
            _shrink(parameters, weights, order.masks(fraction), shrink_factor)
            order = rank(order, weights, scores=score(index), density=fraction)
    finally:
        params.assign(parameters, weights)
    return order


def _mean(
    order: Ranking,
    parameters: Params,
    score: Score,
    rank: Rank,
    density: float,
    rounds: int,
    shrink_factor: float,
) -> Ranking:
    """Ranks once, by the sum of all rounds' scores, which ranks as their mean does."""
    del density, shrink_factor
    total = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in parameters.items()}
    for index in range(rounds):
        scores = score(index)
        for name, running in total.items():
            running.add_(scores[name].cpu())
    return rank(order, parameters, scores=total)


METHODS: Mapping[str, Callable[..., Ranking]] = {"talos": _talos, "mean": _mean}


@torch.no_grad()
def _shrink(parameters: Params, weights: Params, masks: Masks, factor: float) -> None:
    """Sets parameters to their weights, times `factor` where the mask is False."""
    for name, value in parameters.items():
        mask = masks[name].to(value.device)
        value.copy_(torch.where(mask, weights[name], weights[name] * factor))
