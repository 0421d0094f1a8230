"""Client algebra after training: coefficients that drop, re-weight or negate clients' task vectors.

Forgetting by negation, and the accuracy it may cost elsewhere: Ilharco et al., 2023,
https://arxiv.org/abs/2212.04089.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from fedlens.errors import FedlensError


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
