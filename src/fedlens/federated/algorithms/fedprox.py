"""FedProx: clients add μ(w − w_global), the gradient of μ/2 ‖w − w_global‖², to each gradient.

Li et al., 2020, https://arxiv.org/abs/1812.06127.
"""

import torch


def add_proximal_term(
    gradient: torch.Tensor, weights: torch.Tensor, start: torch.Tensor, mu: float
) -> None:
    """Adds μ(w − w_global) to `gradient` in place; `start` is w_global.

    Examples:
        >>> gradient = torch.zeros(2)
        >>> add_proximal_term(gradient, torch.tensor([3.0, 1.0]), torch.ones(2), 0.5)
        >>> gradient.tolist()
        [1.0, 0.0]
    """
    gradient.add_(weights - start, alpha=mu)
