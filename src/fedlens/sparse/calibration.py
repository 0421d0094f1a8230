"""From scores to an order of preference, in R rounds: after round r, density^((r+1)/R) is kept.

TaLoS: only what is kept is ranked again, by scores taken while dropped weights are softened; a
weight dropped once stays dropped. Iurada et al., 2025, https://arxiv.org/abs/2504.02620.
"""

from collections.abc import Callable, Mapping

import torch

from fedlens import params
from fedlens.errors import FedlensError, suggest
from fedlens.params import Params
from fedlens.rng import Stream
from fedlens.sparse.masks import RULES, Masks, Preference, decided, undecided

Score = Callable[[int], Params]  # round → sensitivity of every weight of the model as it stands


def calibrate(
    parameters: Params,
    score: Score,
    *,
    rule: str,
    density: float,
    stream: Stream,
    rounds: int = 4,
    method: str = "talos",
    soft: float = 0.1,
    scope: str = "global",
) -> Preference:
    """The weights in order of preference; `.masks(density)` of it are the masks.

    `parameters` are the maskable ones, live in the model that `score` measures. They may be
    softened meanwhile, and are bit-identical afterwards, whatever happens. Rules that do not go
    by sensitivity never call `score`.
    """
    if method not in METHODS:
        raise FedlensError(f"There is no calibration '{method}': {suggest(method, METHODS)}")
    if rounds < 1:
        raise FedlensError(f"Calibration takes at least one round, not {rounds}.")
    order = undecided(parameters, rule, scope=scope, stream=stream)
    order.quotas(density)  # a density that cannot be is refused before hours of scoring
    if RULES[rule].by != "sensitivity":
        return decided(order, parameters, rule)
    return METHODS[method](order, parameters, score, rule, density, rounds, soft)


def kept(density: float, rounds: int, done: int) -> float:
    """The fraction kept after so many rounds: all after none, `density` after the last."""
    return float(density ** (done / rounds))


def _talos(
    order: Preference,
    parameters: Params,
    score: Score,
    rule: str,
    density: float,
    rounds: int,
    soft: float,
) -> Preference:
    whole = params.copy(parameters)
    try:
        for index in range(rounds):
            fraction = kept(density, rounds, index)
            _soften(parameters, whole, order.masks(fraction), soft)
            order = order.refined(score(index), rule, fraction)
    finally:
        params.assign(parameters, whole)
    return order


def _mean(
    order: Preference,
    parameters: Params,
    score: Score,
    rule: str,
    density: float,
    rounds: int,
    soft: float,
) -> Preference:
    """Ranks once, by the sum of all rounds' scores, which is the order of their mean."""
    del density, soft
    total = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in parameters.items()}
    for index in range(rounds):
        found = score(index)
        for name, running in total.items():
            running.add_(found[name].cpu())
    return order.refined(total, rule)


METHODS: Mapping[str, Callable[..., Preference]] = {"talos": _talos, "mean": _mean}


@torch.no_grad()
def _soften(parameters: Params, whole: Params, masks: Masks, soft: float) -> None:
    for name, value in parameters.items():
        mask = masks[name].to(value.device)
        value.copy_(torch.where(mask, whole[name], whole[name] * soft))
