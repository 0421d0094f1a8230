"""Client algebra after training: coefficients that drop, re-weight or negate clients' task vectors.

Forgetting by negation and its cost on other data: Ilharco et al., 2023, arXiv:2212.04089.
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
        raise FedlensError(
            f"Client {unknown[0]} did not take part in these rounds: name clients that did."
        )
    if repeated := sorted(client for client, times in named.items() if times > 1):
        raise FedlensError(
            f"Client {repeated[0]} is named twice: either drop, negate or re-weight it."
        )
    changed = {**dict.fromkeys(drop, 0.0), **dict.fromkeys(negate, -1.0), **weights}
    return {client: float(changed.get(client, 1.0)) for client in clients}


def choose_forgetting_scale(
    alphas: Sequence[float],
    target: Sequence[float],
    control: Sequence[float],
    *,
    keep: float = 0.95,
) -> float:
    """The scale λ that forgets the target most while control accuracy stays high enough.

    This is the λ of the lowest target accuracy, among those whose control accuracy is at least
    `keep` times that at λ = 0; ties go to the λ nearest to 0. Pass accuracies on validation data,
    never on test data.
    """
    rows = list(zip(alphas, target, control, strict=True))
    if 0 not in alphas:
        raise FedlensError("Forgetting is measured relative to the unchanged model: add λ = 0.")
    least = keep * next(kept for alpha, _, kept in rows if alpha == 0)
    return min((forgotten, abs(alpha), alpha) for alpha, forgotten, kept in rows if kept >= least)[
        2
    ]
