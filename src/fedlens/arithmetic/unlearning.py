"""Client algebra after training: θ = θ_base + Σ c_k p_k δ_k with clients dropped, re-weighted or
negated by their coefficients c_k. Forgetting by negation, and the accuracy it may cost elsewhere:
Ilharco et al., 2023, https://arxiv.org/abs/2212.04089.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from fedlens import params
from fedlens.arithmetic.task_vectors import applied, composed
from fedlens.errors import FedlensError
from fedlens.params import Params


def coefficients(
    clients: Sequence[int],
    *,
    drop: Sequence[int] = (),
    negate: Sequence[int] = (),
    weights: Mapping[int, float] | None = None,
) -> dict[int, float]:
    """c_k: 0 for clients to drop, −1 to negate, the given weight to re-weight, 1 for the rest."""
    weights = weights or {}
    named = Counter([*drop, *negate, *weights])
    if unknown := sorted(named.keys() - set(clients)):
        raise FedlensError(f"Client {unknown[0]} took no part: name clients that did.")
    if repeated := sorted(client for client, times in named.items() if times > 1):
        raise FedlensError(
            f"Client {repeated[0]} is named twice: drop, negate or re-weight it, once."
        )
    changed = {**dict.fromkeys(drop, 0.0), **dict.fromkeys(negate, -1.0), **weights}
    return {client: float(changed.get(client, 1.0)) for client in clients}


def recombined(
    base: Params,
    contributions: Mapping[int, Params],
    coefficients: Mapping[int, float],
    shares: Mapping[int, float],
    *,
    renormalise: bool = False,
) -> dict[str, torch.Tensor]:
    """base + Σ c_k p_k δ_k in the types of `base`; δ_k = `contributions[k]`, p_k = `shares[k]`.

    With `renormalise`, all terms grow so that the positive ones have the shares of all clients
    again: a client dropped is then one that was never sampled. Contributions are read one at a
    time, in the order of the clients' numbers, and not at all where c_k p_k = 0. To undo a client
    over many rounds, give Σ_r p_k δ_k of the rounds r as its contribution, and shares of 1.
    """
    if not contributions.keys() == coefficients.keys() == shares.keys():
        raise ValueError("contributions, coefficients and shares must name the same clients")
    terms = {client: coefficients[client] * shares[client] for client in sorted(contributions)}
    growth = 1.0
    if renormalise:
        left = math.fsum(term for term in terms.values() if term > 0)
        if not left:
            raise FedlensError("No client is left to carry the shares: keep at least one.")
        growth = math.fsum(shares.values()) / left
    if not any(terms.values()):
        return params.copy(base)
    return applied(
        base,
        composed((growth * term, contributions[client]) for client, term in terms.items() if term),
    )


def forgetting_choice(
    alphas: Sequence[float],
    target: Sequence[float],
    control: Sequence[float],
    *,
    keep: float = 0.95,
) -> float:
    """The scale λ at which the target is forgotten most and the control is kept well enough.

    The lowest target accuracy among those with control accuracy at least `keep` of that at λ = 0;
    of equals the λ nearest to 0. The accuracies must be of validation data, never of test data.
    """
    rows = list(zip(alphas, target, control, strict=True))
    if 0 not in alphas:
        raise FedlensError("Forgetting is measured against the model as it is: add λ = 0.")
    least = keep * next(kept for alpha, _, kept in rows if alpha == 0)
    return min((forgotten, abs(alpha), alpha) for alpha, forgotten, kept in rows if kept >= least)[
        2
    ]
