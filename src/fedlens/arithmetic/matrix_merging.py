"""Merging that reads weights as linear maps: TSV-Merge and Iso-C by singular values, RegMean by
least squares on the layers' inputs.

A tensor of two dimensions is a matrix, and one of four or five (a convolution's kernel) is one of
shape (outputs, rest). All others, vectors and the trained entries of a masked tensor among them,
are averaged. Everything is computed in float64 on the CPU.
"""

import math
from collections.abc import Callable, Sequence
from typing import Annotated

import torch
from torch import Tensor

from fedlens.arithmetic.merging import Values, Vector, weighted_mean, weighted_sum
from fedlens.errors import FedlensError
from fedlens.params import Params
from fedlens.registry import Range, merge_method

MATRIX_DIMENSIONS = (2, 4, 5)  # three are an embedding of positions more often than a kernel
MergeMatrices = Callable[[Values, Sequence[float]], Tensor]


@merge_method(
    label="TSV-Merge",
    paper="Gargiulo et al., 2025, https://arxiv.org/abs/2412.00081",
    order=8,
    matrices=True,
)
def tsv_merge(
    vectors: Sequence[Params],
    weights: Sequence[float],
    *,
    mean: Annotated[bool, "divide matrices by the number of vectors; the paper sums them"] = False,
) -> Vector:
    """The leading singular triplets of every task's matrix, made orthogonal to the other tasks'.

    Of each of n matrices of rank r, ⌊r/n⌋ triplets are kept, at least one. With all left vectors
    beside each other in U, all right ones in V and the singular values in Σ, the result is
    U_⊥ Σ V_⊥ᵀ, where X_⊥ = PQᵀ is the matrix with orthonormal columns that is nearest to
    X = P D Qᵀ (Procrustes). One matrix alone comes back. Other tensors are averaged.

    Conventions where others differ: weights multiply singular values; directions with a singular
    value of 0 are left out of X_⊥, which is not unique there, so that two equal tasks give their
    common matrix; kernels of convolutions are matrices too, which the authors' code averages. As in
    the authors' code, matrices are summed while other tensors are averaged; `mean=True` averages
    both, which suits client updates.
    """
    share = 1 / len(vectors) if mean else 1.0

    def merged(matrices: Values, weights: Sequence[float]) -> Tensor:
        return share * _orthogonal_sum(matrices, weights)

    return _by_matrix(vectors, weights, merged)


@merge_method(
    label="Iso-C",
    paper="Marczak et al., 2025, https://arxiv.org/abs/2502.04959",
    order=9,
    matrices=True,
)
def iso_c(
    vectors: Sequence[Params],
    weights: Sequence[float],
    *,
    mean: Annotated[bool, "divide matrices by the number of vectors; the paper sums them"] = False,
) -> Vector:
    """The sum of the tasks' matrices, with every singular value replaced by their mean.

    Σ_k p_k τ_k = U S Vᵀ becomes σ̄ U Vᵀ, with σ̄ = tr(S)/r: all directions count alike, so even one
    matrix alone is changed. Other tensors are averaged.

    Conventions where others differ: directions with a singular value of 0 stay 0, since no vector
    belongs to them, but they count in the mean; kernels of convolutions are matrices too, which the
    authors' code averages. As in the authors' code, matrices are summed while other tensors are
    averaged; `mean=True` averages both, which suits client updates.
    """
    share = 1 / len(vectors) if mean else 1.0

    def merged(matrices: Values, weights: Sequence[float]) -> Tensor:
        return share * _isotropic(weighted_sum(matrices, weights))

    return _by_matrix(vectors, weights, merged)


@merge_method(
    label="RegMean",
    paper="Jin et al., 2023, https://arxiv.org/abs/2212.09849",
    order=10,
    needs="input_moments",
    matrices=True,
)
def regmean(
    vectors: Sequence[Params],
    weights: Sequence[float],
    moments: Sequence[Params],
    *,
    alpha: Annotated[
        float, Range("[0, 1]"), "factor of the moments' entries off the diagonal"
    ] = 0.9,
    ridge: Annotated[
        float, Range("(0, inf)"), "pull to the average, in units of the mean squared input"
    ] = 1e-6,
) -> Vector:
    """Each linear map as the least-squares fit to all models' outputs on their own inputs.

    With G_k = E[x xᵀ] of the inputs x of model k's layer, and its entries off the diagonal times α,
    W = (Σ p_k W_k G_k)(Σ p_k G_k)⁻¹ minimises Σ p_k E‖W x − W_k x‖² (for α = 1). With
    W_k = W_0 + τ_k, the part of W_0 is W_0 (Σ p_k G_k)(Σ p_k G_k)⁻¹ = W_0, so task vectors obey the
    same formula. Second moments add: if the weights are numbers of examples, the fit is that to
    the examples of all clients together. Layers without moments and biases are averaged.

    Computed as τ̄ + Σ p_k (τ_k − τ̄) G_k (Σ p_k G_k + ε I)⁻¹, so that directions that no input has
    get the average τ̄. The paper has no ε, and inverts what may have no inverse.
    """
    merged = {}
    for name in vectors[0]:
        values = [vector[name].detach().double() for vector in vectors]
        if name in moments[0]:
            of_layer = [one[name] for one in moments]
            merged[name] = _regressed(name, values, weights, of_layer, alpha, ridge)
        else:
            merged[name] = weighted_mean(values, weights)
    return merged


def _by_matrix(vectors: Sequence[Params], weights: Sequence[float], merge: MergeMatrices) -> Vector:
    """Matrices by `merge`, without those of weight 0; all other tensors averaged."""
    merged = {}
    counted = [place for place, weight in enumerate(weights) if weight]
    for name, first in vectors[0].items():
        values = [vector[name].detach().double() for vector in vectors]
        if first.ndim not in MATRIX_DIMENSIONS or not first.numel():
            merged[name] = weighted_mean(values, weights)
            continue
        matrices = [values[place].flatten(1).cpu() for place in counted]
        matrix = merge(matrices, [weights[place] for place in counted])
        merged[name] = matrix.view(first.shape).to(first.device)
    return merged


def _orthogonal_sum(matrices: Values, weights: Sequence[float]) -> Tensor:
    kept = max(1, min(matrices[0].shape) // len(matrices))
    lefts, values, rights = [], [], []
    for matrix, weight in zip(matrices, weights, strict=True):
        left, singular, right = _svd(matrix)
        nonzero = _nonzero(singular, matrix)[:kept]
        lefts.append(left[:, :kept][:, nonzero])
        values.append(weight * singular[:kept][nonzero])
        rights.append(right[:kept][nonzero].T)
    left, right = (
        _nearest_orthogonal(torch.cat(lefts, 1)),
        _nearest_orthogonal(torch.cat(rights, 1)),
    )
    return left @ (torch.cat(values)[:, None] * right.T)


def _nearest_orthogonal(matrix: Tensor) -> Tensor:
    """P Qᵀ of the matrix P D Qᵀ, without directions where D is 0."""
    if not matrix.numel():
        return matrix
    left, singular, right = _svd(matrix)
    nonzero = _nonzero(singular, matrix)
    return left[:, nonzero] @ right[nonzero]


def _isotropic(matrix: Tensor) -> Tensor:
    left, singular, right = _svd(matrix)
    nonzero = _nonzero(singular, matrix)
    return singular.mean() * (left[:, nonzero] @ right[nonzero])


def _svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    left, singular, right = torch.linalg.svd(matrix, full_matrices=False)
    return left, singular, right


def _nonzero(singular: Tensor, matrix: Tensor) -> Tensor:
    """Marks singular values that are not 0 up to rounding, as `matrix_rank` counts them."""
    return singular > singular.max() * max(matrix.shape) * torch.finfo(singular.dtype).eps


def _regressed(
    name: str,
    values: Values,
    weights: Sequence[float],
    moments: Values,
    alpha: float,
    ridge: float,
) -> Tensor:
    mean = weighted_mean(values, weights)
    shape = tuple(moments[0].shape)
    *grouped, width = shape[:-1] or (0,)  # a grouped convolution has a moment for each group
    groups = math.prod(grouped)
    fits = mean.ndim >= 2 and shape == (*grouped, width, width) and len(grouped) <= 1
    if not fits or len(mean) % groups or mean[0].numel() != width:
        raise FedlensError(
            f"The input moments of {name} have shape {shape}, which does not fit a weight of shape "
            f"{tuple(mean.shape)}: compute them with input_moments."
        )
    total = torch.zeros(groups, width, width, dtype=torch.float64)
    pulled = torch.zeros(groups, len(mean) // groups, width, dtype=torch.float64)
    for value, weight, moment in zip(values, weights, moments, strict=True):
        full = moment.detach().to("cpu", torch.float64).view(groups, width, width)
        diagonal = torch.diag_embed(full.diagonal(dim1=1, dim2=2))
        scaled = weight * (alpha * full + (1 - alpha) * diagonal)
        total += scaled
        pulled += (value - mean).cpu().reshape(groups, -1, width) @ scaled
    level = total.diagonal(dim1=1, dim2=2).mean(1)[:, None]
    total.diagonal(dim1=1, dim2=2).add_(ridge * torch.where(level > 0, level, 1.0))
    change: Tensor = torch.linalg.solve(total, pulled.mT).mT  # `total` is symmetric
    return mean + change.reshape(mean.shape).to(mean.device)
