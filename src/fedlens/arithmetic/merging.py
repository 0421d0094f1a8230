"""Many task vectors into one: τ = λ · combine(thin(τ_1), …, thin(τ_n)), one method per row.

Weights enter as factors with mean 1: equal weights make every factor 1, and then each row is its
paper's formula. All rows here average in some way, except task arithmetic, which sums. Rows that
treat tensors as matrices are in `matrix_merging`.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from fedlens.arithmetic.task_vectors import same_space
from fedlens.errors import FedlensError
from fedlens.params import Params, double, mismatch
from fedlens.registry import Range, Row, merge_method
from fedlens.rng import Stream

# A method takes the vectors and their weights, in the order of the vectors' ids, and returns the
# merged vector; weights have mean 1. Its parameters are keyword arguments. A row with random=True
# also takes one source of random numbers per vector, as a third argument. A row with needs="fisher"
# or needs="input_moments" then takes one map of statistics per vector, as its last argument.
Method = Callable[..., Params]
Draw = Callable[[str], torch.Generator]  # tensor name → generator; one for every vector
Values = Sequence[Tensor]  # one tensor of every vector, in float64
Combine = Callable[[Values, Sequence[float]], Tensor]
Vector = dict[str, Tensor]


def merge(
    vectors: Sequence[Params],
    method: str | Row | Method = "average",
    *,
    weights: Sequence[float] | None = None,
    seed: int = 0,
    stream: Stream | None = None,
    ids: Sequence[int] | None = None,
    statistics: Sequence[Params] | None = None,
    **parameters: Any,
) -> Vector:
    """Merges task vectors into one, in float64 whatever the vectors' type.

    Args:
        vectors: Maps of the same names and shapes. Shapes are free: a vector may hold only the
            trained entries, and `density` is then a share of those.
        method: A method's name or row, or a function `(vectors, weights, **parameters) -> vector`,
            whose weights have mean 1, and which gets `statistics`, if given, as a third argument.
        weights: How much each vector counts, such as its number of examples; equal by default.
        seed: Seed of methods that draw random numbers.
        stream: Draws of those methods, if more than a seed is needed.
        ids: Numbers that identify the vectors, such as clients; 0, 1, 2, … by default. Vectors
            are merged in the order of their ids and draws belong to an id, so the result does not
            depend on the order of `vectors`, bit for bit.
        statistics: What some methods need beside the vectors, one map for each: for "regmean"
            `input_moments` of each tuned model, for "fisher_average" its `fisher` with
            `target="log_prob"`. Both are means over examples, so `weights` say how many examples
            each vector stands for. Tensors without an entry are averaged.
        **parameters: The method's own; and `scale`, the factor λ of the merged vector, which every
            method has.

    Needs all vectors at once, one byte per entry in methods that thin, and one tensor of each
    vector in float64 at a time.

    Examples:
        >>> import torch
        >>> import fedlens as fl
        >>> vectors = [{"w": torch.tensor([4.0, 0.5])}, {"w": torch.tensor([2.0, -6.0])}]
        >>> fl.merge(vectors)["w"].tolist()
        [3.0, -2.75]
        >>> fl.merge(vectors, method="ties", density=0.5)["w"].tolist()
        [4.0, -6.0]
        >>> fl.merge(vectors, method=lambda vectors, weights: vectors[0], scale=0.5)["w"].tolist()
        [2.0, 0.25]
        >>> fishers = [{"w": torch.tensor([1.0, 1.0])}, {"w": torch.tensor([3.0, 0.0])}]
        >>> merged = fl.merge(vectors, "fisher_average", statistics=fishers, floor=0)
        >>> merged["w"].tolist()
        [2.5, 0.5]
    """
    weights = [1.0] * len(vectors) if weights is None else weights
    ids = range(len(vectors)) if ids is None else ids
    if not 0 < len(vectors) == len(weights) == len(ids) == len(set(ids)):
        raise ValueError("merge needs at least one vector, and one weight and id for each")
    total = math.fsum(weights)
    if min(weights) < 0 or not 0 < total < math.inf:
        raise ValueError("weights must be finite, not negative and not all zero")
    same_space(*vectors)
    order = sorted(range(len(ids)), key=ids.__getitem__)
    factors = [len(ids) * weights[place] / total for place in order]
    ordered = [vectors[place] for place in order]
    arguments: list[Any] = [ordered, factors]
    if isinstance(method, str):
        method = merge_method[method]
    if isinstance(method, Row):
        parameters = method.checked(parameters)
        if method.traits.get("random", False):
            stream = Stream(seed, ()) if stream is None else stream
            arguments.append([partial(stream.draw, "merge", ids[place]) for place in order])
        check_statistics(method, vectors, statistics)
        method = method.make
    else:
        given = {name: value for name, value in parameters.items() if name != "scale"}
        merge_method.check_signature(method, {}, given)
    if statistics is not None:
        arguments.append([statistics[place] for place in order])
    scale = parameters.pop("scale", 1.0)
    merged = method(*arguments, **parameters)
    if fault := mismatch(vectors[0], merged):
        raise FedlensError(f"The merged vector does not fit the vectors: {fault}.")
    return {name: double(merged[name]) * scale for name in vectors[0]}


def check_statistics(
    method: Row, vectors: Sequence[Params], statistics: Sequence[Params] | None
) -> None:
    """Refuses statistics that the method does not read, and those that do not fit the vectors."""
    needs = method.traits.get("needs")
    if needs is None:
        if statistics is not None:
            raise FedlensError(f"'{method.name}' reads no statistics: leave them out.")
        return
    if statistics is None or len(statistics) != len(vectors):
        raise FedlensError(
            f"'{method.name}' needs statistics, one map for each of the {len(vectors)} vectors: "
            f"compute them with {needs} of every tuned model."
        )
    for other in statistics[1:]:
        if fault := mismatch(statistics[0], other):
            raise FedlensError(f"The vectors' statistics differ: {fault}.")
    if statistics[0] and not statistics[0].keys() & vectors[0].keys():
        raise FedlensError(
            "The statistics and the vectors have no tensor in common "
            f"({', '.join(list(statistics[0])[:3])}, …): compute them "
            f"with {needs} of models that have these tensors."
        )
    for one in statistics:
        for name, value in one.items():
            if not value.isfinite().all():
                raise FedlensError(f"The statistics of {name} are not finite.")


@merge_method(
    label="average",
    paper="McMahan et al., 2017, https://arxiv.org/abs/1602.05629",
    order=1,
    aggregates=False,
)
def average(vectors: Sequence[Params], weights: Sequence[float]) -> Vector:
    """λ Σ p_k τ_k, the weighted mean; this is FedAvg for λ = 1."""
    return _combined(vectors, weights, weighted_mean)


@merge_method(
    label="task arithmetic",
    paper="Ilharco et al., 2023, https://arxiv.org/abs/2212.04089",
    order=2,
)
def task_arithmetic(vectors: Sequence[Params], weights: Sequence[float]) -> Vector:
    """λ Σ n p_k τ_k, a sum: n times the average. Choose λ; 0.3 to 0.5 suits a few tasks."""
    return _combined(vectors, weights, weighted_sum)


@merge_method(
    label="TIES",
    paper="Yadav et al., 2023, https://arxiv.org/abs/2306.01708",
    order=3,
)
def ties(
    vectors: Sequence[Params],
    weights: Sequence[float],
    *,
    density: Annotated[float, Range("(0, 1]"), "share of a vector's entries that are kept"] = 0.2,
) -> Vector:
    """Keep the largest entries of each vector, and average those with the sign of their sum.

    An entry is divided by the number of vectors that agree on it, so vectors with little in common
    give a longer vector than their mean. Conventions where others differ: exactly
    round(density · N) entries of the whole vector are kept, of equal magnitudes the first by
    tensor name and position, and equal mass on both signs gives 0. The authors' code keeps all
    entries that tie with the last one, and gives equal mass the sign that most entries have;
    mergekit keeps ⌊density · m⌋ entries of every tensor by itself, and elects the plus sign.
    """
    kept = [_keep_largest(vector, density) for vector in vectors]
    return _combined(vectors, weights, _elected_mean, kept)


@merge_method(
    label="DARE",
    paper="Yu et al., 2024, https://arxiv.org/abs/2311.03099",
    order=4,
    random=True,
)
def dare(
    vectors: Sequence[Params],
    weights: Sequence[float],
    draws: Sequence[Draw],
    *,
    density: Annotated[float, Range("(0, 1]"), "probability that an entry is kept"] = 0.2,
) -> Vector:
    """Drop entries with probability 1 − density, divide the rest by density, and average."""
    kept = [_keep_random(*each, density) for each in zip(vectors, draws, strict=True)]
    rescaled: Combine = lambda values, weights: weighted_mean(values, weights) / density  # noqa: E731
    return _combined(vectors, weights, rescaled, kept)


@merge_method(
    label="Breadcrumbs",
    paper="Davari & Belilovsky, 2023, https://arxiv.org/abs/2312.06795",
    order=5,
)
def breadcrumbs(
    vectors: Sequence[Params],
    weights: Sequence[float],
    *,
    density: Annotated[float, Range("(0, 1]"), "share of a tensor's entries that are kept"] = 0.2,
    outliers: Annotated[
        float, Range("[0, 1)"), "share of a tensor's largest entries that are dropped"
    ] = 0.01,
) -> Vector:
    """Drop the largest entries of every tensor (outliers) and the small ones; then average."""
    kept = [_keep_middle(vector, density, outliers) for vector in vectors]
    return _combined(vectors, weights, weighted_mean, kept)


@merge_method(
    label="consensus",
    paper="Wang et al., 2024, https://arxiv.org/abs/2405.07813",
    order=6,
)
def consensus(
    vectors: Sequence[Params],
    weights: Sequence[float],
    *,
    agreement: Annotated[
        int, Range("[1, inf)"), "keep entries where this many vectors, or all, are active"
    ] = 2,
    threshold: Annotated[
        float | None,
        Range("[0, inf)"),
        "λ_t: a vector is active where its entry is at least λ_t times the sum of the others; "
        "null: min(0.4, 1/(n − 1)) for n vectors, because n equal vectors reach exactly 1/(n − 1)",
    ] = None,
) -> Vector:
    """The average, kept where at least `agreement` vectors are active (TALL masks).

    Vector k is active where its entry is large compared with the sum of the others:
    |τ_k| ≥ λ_t |τ − τ_k|, with τ the weighted sum.
    """
    if threshold is None:  # a little less than 1/(n − 1), so that rounding makes no difference
        threshold = min(0.4, (1 - 1e-9) / max(1, len(vectors) - 1))
    return _combined(
        vectors, weights, partial(_consensus_mean, threshold=threshold, agreement=agreement)
    )


@merge_method(
    label="Fisher-weighted average",
    paper="Matena & Raffel, 2022, https://arxiv.org/abs/2111.09832",
    order=7,
    needs="fisher",
)
def fisher_average(
    vectors: Sequence[Params],
    weights: Sequence[float],
    fishers: Sequence[Params],
    *,
    floor: Annotated[
        float, Range("[0, inf)"), "added to every Fisher value, in units of the tensor's mean"
    ] = 1e-6,
) -> Vector:
    """Σ p_k F_k τ_k / Σ p_k F_k, entry by entry: a model counts more where its F_k is large.

    The paper averages parameters θ_k = θ + τ_k. The common θ has the same factor above and below
    the line, so it cancels, and the formula holds for task vectors as it stands. Computed as
    τ̄ + Σ p_k F_k (τ_k − τ̄) / (Σ p_k F_k + floor), so that entries without information get the
    average τ̄. Conventions where others differ: the authors raise every value below 10⁻⁶ to it,
    which depends on the loss's scale; here the floor is relative to the tensor's own mean.
    """
    merged = {}
    for name in vectors[0]:
        values = [vector[name].detach().double() for vector in vectors]
        merged[name] = mean = weighted_mean(values, weights)
        if name not in fishers[0]:
            continue
        factors = [one[name].detach().to(mean) for one in fishers]
        for factor in factors:
            if factor.shape != mean.shape or bool((factor < 0).any()):
                raise FedlensError(
                    f"The Fisher information of {name} must have the tensor's shape "
                    f"{tuple(mean.shape)} and no negative value: compute it with fisher."
                )
        total = weighted_sum(factors, weights)
        pulled = weighted_sum(
            [factor * (value - mean) for factor, value in zip(factors, values, strict=True)],
            weights,
        )
        total += floor * total.mean() if total.numel() else 0.0
        merged[name] = mean + pulled / total.masked_fill(total == 0, 1.0)
    return merged


def _combined(
    vectors: Sequence[Params],
    weights: Sequence[float],
    combine: Combine,
    kept: Sequence[Params] | None = None,
) -> Vector:
    """Combines the vectors tensor by tensor, in float64, without the entries that are not kept."""
    merged = {}
    for name in vectors[0]:
        values = [double(vector[name]) for vector in vectors]
        if kept is not None:
            values = [value * mask[name] for value, mask in zip(values, kept, strict=True)]
        merged[name] = combine(values, weights)
    return merged


def _largest(magnitudes: Tensor, count: int) -> Tensor:
    """Marks exactly `count` entries of a row, the largest; of equal ones the first."""
    if count == 0:
        return torch.zeros_like(magnitudes, dtype=torch.bool)
    place = magnitudes.numel() - count
    partitioned = magnitudes.cpu().numpy().copy()
    partitioned.partition(place)  # finds that place without sorting the rest
    least = float(partitioned[place])
    marks = magnitudes > least
    level = (magnitudes == least).nonzero()
    marks[level[: count - int(marks.count_nonzero())]] = True
    return marks


def _keep_largest(vector: Params, density: float) -> Vector:
    """Marks the largest of the whole vector; of equal magnitudes the first by name and place."""
    names = sorted(vector)
    magnitudes = torch.cat([vector[name].detach().abs().reshape(-1) for name in names])
    marks = _largest(magnitudes, round(density * magnitudes.numel()))
    parts = torch.split(marks, [vector[name].numel() for name in names])
    return {name: part.view_as(vector[name]) for name, part in zip(names, parts, strict=True)}


def _keep_random(vector: Params, draw: Draw, density: float) -> Vector:
    return {
        name: (torch.rand(value.shape, generator=draw(name), dtype=torch.float32) < density).to(
            value.device
        )
        for name, value in vector.items()
    }


def _keep_middle(vector: Params, density: float, outliers: float) -> Vector:
    """In every tensor of m entries, skips the largest round(outliers · m) and marks the next
    round(density · m), or as many as there are."""
    masks = {}
    for name, value in vector.items():
        magnitudes = value.detach().abs().reshape(-1)
        size = magnitudes.numel()
        cut = round(outliers * size)
        last = min(size, cut + round(density * size))
        masks[name] = (_largest(magnitudes, last) ^ _largest(magnitudes, cut)).view_as(value)
    return masks


def weighted_sum(values: Values, weights: Sequence[float]) -> Tensor:
    total = torch.zeros_like(values[0])
    for value, weight in zip(values, weights, strict=True):
        total.add_(value, alpha=weight)
    return total


def weighted_mean(values: Values, weights: Sequence[float]) -> Tensor:
    return weighted_sum(values, weights) / len(values)


def _elected_mean(values: Values, weights: Sequence[float]) -> Tensor:
    """The mean of the values that have the sign with more mass; equal mass gives 0."""
    elected = weighted_sum(values, weights).sign()
    agreeing = [(value * elected).clamp_(min=0) for value in values]
    count = weighted_sum([(part > 0).double() for part in agreeing], weights)
    return elected * weighted_sum(agreeing, weights) / count.masked_fill(count == 0, 1.0)


def _consensus_mean(
    values: Values, weights: Sequence[float], *, threshold: float, agreement: int
) -> Tensor:
    total = weighted_sum(values, weights)
    active = torch.zeros_like(total, dtype=torch.int64)
    for value in values:
        active += value.abs() >= threshold * (total - value).abs()
    return (total / len(values)).masked_fill(active < min(agreement, len(values)), 0.0)
