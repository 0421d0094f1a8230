"""Linear heads: trained, or in closed form from statistics that add up over clients.

Ridge with a free intercept: W = (S + λI)⁻¹ Xᵀ(Y − ȳ) and b = ȳ − W x̄, where S = Xᵀ(X − x̄).
Hoerl & Kennard, 1970; federated: Fanì et al., 2024, https://arxiv.org/abs/2406.01116. Which layers
of the backbone the features come from is for `deep_features` to say.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn

from fedlens import rng
from fedlens.errors import FedlensError
from fedlens.registry import Range, head

GRID = tuple(10.0**power for power in range(-2, 7))
TINY = 1e-12  # a variance that is rounding
ROUNDING = 1e-9  # of a sum of squares, relative: far above float64's
SHRINKAGES = (1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.3)
WIDE = 1024  # features, above which a factorisation for each λ is cheaper than eigenvectors
UNSEEN_BIAS = -1e9  # of a class without samples: finite, and below any score

Labelled = tuple[torch.Tensor, torch.Tensor]  # features [N, D] and labels [N]


@dataclass(frozen=True)
class Statistics:
    """All that ridge and class means need of (X, y), in float64; statistics of parts add up."""

    xtx: torch.Tensor  # [D, D], Σ x xᵀ
    class_sums: torch.Tensor  # [C, D], Σ of x over each class: YᵀX
    counts: torch.Tensor  # [C]

    @classmethod
    def of(
        cls, features: torch.Tensor, labels: torch.Tensor, classes: int, *, chunk: int = 4096
    ) -> "Statistics":
        """Converts `chunk` rows at a time to float64, so that no copy of all features is made."""
        width = features.shape[1]
        xtx = torch.zeros(width, width, dtype=torch.float64)
        class_sums = torch.zeros(classes, width, dtype=torch.float64)
        labels = labels.cpu()
        for start in range(0, len(labels), chunk):
            rows = slice(start, start + chunk)
            x = features[rows].detach().cpu().double()
            xtx.addmm_(x.T, x)
            class_sums.index_add_(0, labels[rows], x)
        counts = torch.bincount(labels, minlength=classes).double()
        return cls(xtx, class_sums, counts)

    @property
    def total(self) -> torch.Tensor:
        return self.counts.sum()

    @property
    def mean(self) -> torch.Tensor:
        """[D], of all features."""
        return self.class_sums.sum(0) / self.total

    @property
    def centred(self) -> torch.Tensor:
        """[D, D], Σ (x − x̄)(x − x̄)ᵀ."""
        return self.xtx - self.total * torch.outer(self.mean, self.mean)

    @property
    def deviations(self) -> torch.Tensor:
        """[D], the standard deviation of each feature; 1 for one that never changes."""
        variances = self.centred.diagonal() / self.total
        return variances.clamp(min=0).sqrt().where(variances > TINY, torch.ones(()).double())

    def first(self, width: int) -> "Statistics":
        """Of the first features alone."""
        return Statistics(self.xtx[:width, :width], self.class_sums[:, :width], self.counts)

    def sent(self) -> dict[str, torch.Tensor]:
        """The numbers that travel: of XᵀX, which is symmetric, the half that solvers read."""
        width = len(self.xtx)
        lower = self.xtx[*torch.tril_indices(width, width)]
        return {"xtx": lower, "class_sums": self.class_sums, "counts": self.counts}

    @classmethod
    def received(cls, sent: Mapping[str, torch.Tensor]) -> "Statistics":
        """The inverse of `sent`."""
        width = sent["class_sums"].shape[1]
        rows, columns = torch.tril_indices(width, width)
        xtx = torch.empty(width, width, dtype=sent["xtx"].dtype)
        xtx[rows, columns] = sent["xtx"]
        xtx[columns, rows] = sent["xtx"]
        return cls(xtx, sent["class_sums"], sent["counts"])

    @staticmethod
    def sent_shapes(width: int, classes: int) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor in `sent`, all of them float64."""
        half = width * (width + 1) // 2
        return {"xtx": (half,), "class_sums": (classes, width), "counts": (classes,)}

    def fault(self, examples: int, largest: float) -> str | None:
        """Why these cannot be sums over so many examples, with features of at most this norm.

        Of real features the scatter within classes is positive semi-definite, and so is what
        solvers factorise.
        """
        counts = self.counts
        if not bool(((counts >= 0) & (counts == counts.round())).all()) or self.total != examples:
            return f"its class counts are not those of {examples} examples"
        if bool(self.class_sums[counts == 0].any()):
            return "it has features of classes without examples"
        trace = float(self.xtx.diagonal().sum())
        if not trace <= examples * largest**2:
            return f"its features have a norm above {largest:.3g}"
        within = self.xtx - self.class_sums.T @ (self.class_sums / counts.clamp(min=1)[:, None])
        shifted = within + ROUNDING * trace * torch.eye(len(within), dtype=within.dtype)
        if bool(within.any()) and (trace <= 0 or torch.linalg.cholesky_ex(shifted).info):
            return "its sums are not those of any features"
        return None

    def __add__(self, other: "Statistics") -> "Statistics":
        if self.class_sums.shape != other.class_sums.shape:
            raise ValueError(f"{self.class_sums.shape} and {other.class_sums.shape} do not add.")
        return Statistics(
            self.xtx + other.xtx, self.class_sums + other.class_sums, self.counts + other.counts
        )


@head(label="linear head", fitted=False, order=1)
def linear(width: int, classes: int, seed: int) -> nn.Linear:
    """Initialised at random and trained with the rest of the model."""
    with rng.scoped(rng.generator(seed, "head")):
        return nn.Linear(width, classes)


@head(label="trained head", fitted=True, by="training", order=2)
def trained(
    width: int,
    classes: int,
    seed: int,
    *,
    lr: Annotated[float, Range("(0, inf)"), "learning rate"] = 0.03,
    steps: Annotated[int, Range("[1, inf)"), "local steps in all"] = 2000,
) -> nn.Linear:
    """Trained on frozen features before the backbone, by the clients if there are any.

    This is the head that its training starts from.
    """
    del lr, steps
    return linear(width, classes, seed)


@head(
    label="ridge head",
    paper="Fanì et al., 2024, https://arxiv.org/abs/2406.01116",
    fitted=True,
    by="statistics",
    order=3,
)
def ridge(
    statistics: Statistics,
    validation: Labelled | None,
    *,
    l2: Annotated[float | None, Range("(0, inf)"), "null: chosen on validation"] = None,
    temperature: Annotated[
        float | None, Range("(0, inf)"), "scale of the logits; null: fitted on validation"
    ] = None,
) -> tuple[nn.Linear, dict[str, float]]:
    """Minimises Σ‖W x + b − onehot(y)‖² + λ‖W‖², with λ = l2."""
    return _ridge(statistics, validation, l2, temperature, scale=None)


@head(
    label="deep ridge head",
    paper="Evci et al., 2022, https://arxiv.org/abs/2201.03529",
    fitted=True,
    by="statistics",
    layers=6,
    tokens="both",
    order=5,
)
def deep_ridge(
    statistics: Statistics,
    validation: Labelled | None,
    *,
    l2: Annotated[float | None, Range("(0, inf)"), "null: chosen on validation"] = None,
    temperature: Annotated[
        float | None, Range("(0, inf)"), "scale of the logits; null: fitted on validation"
    ] = None,
) -> tuple[nn.Linear, dict[str, float]]:
    """Ridge on the tokens of several blocks, each feature standardised by the clients' sums.

    With z = (x − x̄)/σ it minimises Σ‖W z + b − onehot(y)‖² + λ‖W‖²; the head that is returned reads
    x itself. The sums of the one message give x̄ and σ too.
    """
    return _ridge(statistics, validation, l2, temperature, scale=statistics.deviations)


@head(
    label="Gaussian head",
    paper="Fisher, 1936, https://doi.org/10.1111/j.1469-1809.1936.tb02137.x",
    fitted=True,
    by="statistics",
    order=6,
)
def gaussian(
    statistics: Statistics,
    validation: Labelled | None,
    *,
    shrinkage: Annotated[
        float | None, Range("(0, 1]"), "γ, share of a diagonal Σ; null: chosen on validation"
    ] = None,
    temperature: Annotated[
        float | None, Range("(0, inf)"), "scale of the logits; null: fitted on validation"
    ] = None,
) -> tuple[nn.Linear, dict[str, float]]:
    """Linear discriminant analysis: classes are Gaussian with one covariance Σ.

    W = Σ⁻¹μ and b = log π − μᵀΣ⁻¹μ/2, with Σ = (1 − γ)·S/N + γ·diag(S/N) and S the scatter within
    classes. A class without samples never wins.
    """
    if shrinkage is None:
        if validation is None:
            raise FedlensError(
                "shrinkage is chosen on validation data: give validation data or set shrinkage."
            )
        fitted, shrinkage = _most_accurate(
            SHRINKAGES, (_gaussian(statistics, one) for one in SHRINKAGES), validation
        )
    else:
        fitted = _gaussian(statistics, shrinkage)
    fitted, temperature = _calibrated(fitted, validation, temperature)
    return fitted, {"shrinkage": shrinkage, "temperature": temperature}


@head(
    label="class-mean head",
    paper="Legate et al., 2023, https://arxiv.org/abs/2306.03937",
    fitted=True,
    by="statistics",
    order=4,
)
def class_means(
    statistics: Statistics,
    validation: Labelled | None,
    *,
    temperature: Annotated[
        float | None, Range("(0, inf)"), "scale of the logits; null: fitted on validation"
    ] = None,
) -> tuple[nn.Linear, dict[str, float]]:
    """The nearest class mean as a linear head: argmin ‖x − μ‖² = argmax μ·x − ‖μ‖²/2.

    A class without samples has no mean; its weight is 0 and its bias so low that it never wins.
    """
    means = statistics.class_sums / statistics.counts.clamp(min=1)[:, None]
    bias = -means.square().sum(1) / 2
    fitted = _as_linear(means, bias.masked_fill(statistics.counts == 0, UNSEEN_BIAS))
    fitted, temperature = _calibrated(fitted, validation, temperature)
    return fitted, {"temperature": temperature}


def fit_ridge(
    features: torch.Tensor | npt.NDArray[np.floating],
    labels: torch.Tensor | npt.NDArray[np.integer] | list[int],
    *,
    l2: float,
    classes: int | None = None,
) -> nn.Linear:
    """The linear head that minimises Σ‖W x + b − onehot(y)‖² + l2·‖W‖²; b is not penalised.

    Args:
        features: [N, D].
        labels: The class of each row, from 0.
        l2: The penalty λ, above 0.
        classes: The number of classes; by default the largest label plus one.

    Examples:
        >>> import torch
        >>> import fedlens as fl
        >>> features = torch.tensor([[-1.0], [-2.0], [1.0], [2.0]])
        >>> head = fl.ridge(features, [0, 0, 1, 1], l2=0.1)
        >>> head(features).argmax(1).tolist()
        [0, 0, 1, 1]
    """
    features, labels = torch.as_tensor(features), torch.as_tensor(labels)
    if features.ndim != 2 or labels.shape != features.shape[:1]:
        raise FedlensError(
            f"features has shape {tuple(features.shape)} and labels {tuple(labels.shape)}: "
            "give features [N, D] and N labels."
        )
    if len(labels) == 0:
        raise FedlensError("A ridge head needs at least one sample.")
    if classes is None:
        classes = int(labels.max()) + 1
    return next(ridge_path(Statistics.of(features, labels, classes), [l2]))


def ridge_path(
    statistics: Statistics, grid: Iterable[float], *, scale: torch.Tensor | None = None
) -> Iterator[nn.Linear]:
    """Ridge heads for every λ of `grid`, in its order."""
    return (_as_linear(*solution) for solution in solve(statistics, grid, scale=scale))


def solve(
    statistics: Statistics, grid: Iterable[float], *, scale: torch.Tensor | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(W [C, D], b [C]) in float64 for every λ; the penalty is on `scale` · W, by default on W.

    Up to `WIDE` features from one eigendecomposition, S = QΛQᵀ and W = XᵀY_c · Q(Λ + λ)⁻¹Qᵀ; else
    from a Cholesky factor of S + λI for each λ.
    """
    if not statistics.total > 0:
        raise FedlensError("A ridge head needs at least one sample.")
    mean, prior = statistics.mean, statistics.counts / statistics.total
    centred = statistics.centred
    cross = statistics.class_sums - torch.outer(statistics.counts, mean)
    if scale is not None:
        centred, cross = centred / torch.outer(scale, scale), cross / scale
    weights = _by_eigenvectors if len(centred) <= WIDE else _by_cholesky
    for weight in weights(centred, cross, grid):
        whole = weight if scale is None else weight / scale
        yield whole, prior - whole @ mean


def _by_eigenvectors(
    centred: torch.Tensor, cross: torch.Tensor, grid: Iterable[float]
) -> Iterator[torch.Tensor]:
    values, vectors = torch.linalg.eigh(centred)
    values = values.clamp(min=0)  # S is positive semi-definite but for rounding
    rotated = cross @ vectors
    for l2 in map(_positive, grid):
        yield (rotated / (values + l2)) @ vectors.T


def _by_cholesky(
    centred: torch.Tensor, cross: torch.Tensor, grid: Iterable[float]
) -> Iterator[torch.Tensor]:
    for l2 in map(_positive, grid):
        factor = torch.linalg.cholesky(centred + l2 * torch.eye(len(centred)).to(centred))
        yield torch.cholesky_solve(cross.T, factor).T


def _positive(l2: float) -> float:
    if not l2 > 0:
        raise FedlensError(f"l2={l2} must be positive.")
    return l2


def choose_ridge(
    statistics: Statistics,
    features: torch.Tensor,
    labels: torch.Tensor,
    grid: Iterable[float] = GRID,
    *,
    scale: torch.Tensor | None = None,
) -> tuple[nn.Linear, float]:
    """The ridge head, and its λ, most accurate on validation data; ties go to the larger λ."""
    penalties = sorted(grid)
    if not penalties:
        raise FedlensError("The grid of l2 is empty.")
    path = ridge_path(statistics, penalties, scale=scale)
    return _most_accurate(penalties, path, (features, labels))


def _most_accurate(
    values: Iterable[float], candidates: Iterable[nn.Linear], validation: Labelled
) -> tuple[nn.Linear, float]:
    """The head, and its value, most accurate on validation data; ties go to the later one."""
    features, labels = validation
    best, chosen = -1, None
    for value, fitted in zip(values, candidates, strict=True):
        with torch.no_grad():
            correct = int((fitted.to(features.device)(features).argmax(1) == labels).sum())
        if correct >= best:
            best, chosen = correct, (fitted, value)
    assert chosen is not None
    return chosen


def _ridge(
    statistics: Statistics,
    validation: Labelled | None,
    l2: float | None,
    temperature: float | None,
    *,
    scale: torch.Tensor | None,
) -> tuple[nn.Linear, dict[str, float]]:
    if l2 is not None:
        fitted = next(ridge_path(statistics, [l2], scale=scale))
    elif validation is not None:
        fitted, l2 = choose_ridge(statistics, *validation, scale=scale)
    else:
        raise FedlensError("l2 is chosen on validation data: give validation data or set l2.")
    fitted, temperature = _calibrated(fitted, validation, temperature)
    return fitted, {"l2": l2, "temperature": temperature}


def _gaussian(statistics: Statistics, shrinkage: float) -> nn.Linear:
    if not statistics.total > 0:
        raise FedlensError("A Gaussian head needs at least one sample.")
    counts, total = statistics.counts, statistics.total
    means = statistics.class_sums / counts.clamp(min=1)[:, None]
    within = (statistics.xtx - (means * counts[:, None]).T @ means) / total
    variances = within.diagonal().clamp(min=TINY * max(1.0, float(within.diagonal().max())))
    covariance = (1 - shrinkage) * within + shrinkage * variances.diag()
    weight = torch.cholesky_solve(means.T, torch.linalg.cholesky(covariance)).T
    bias = (counts / total).clamp(min=TINY).log() - (weight * means).sum(1) / 2
    unseen = counts == 0
    return _as_linear(weight.masked_fill(unseen[:, None], 0), bias.masked_fill(unseen, UNSEEN_BIAS))


def widened(head: nn.Linear, width: int) -> nn.Linear:
    """The same head on `width` features, of which it only reads its own, the first ones."""
    return _as_linear(F.pad(head.weight, (0, width - head.in_features)), head.bias)


def fit_temperature(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """The scale s > 0 that minimises the mean of −log softmax(s·logits)_y, which is convex in s.

    Searched over log s between bounds: for logits that separate all samples s would be infinite.
    """
    from scipy.optimize import minimize_scalar  # here, as it would slow every run's start down

    shifted = logits.detach().cpu().double()
    shifted = shifted - shifted.max(1, keepdim=True).values
    truth = shifted.gather(1, labels.cpu()[:, None])[:, 0]

    def loss(log_s: float) -> float:
        s = math.exp(log_s)
        return float((torch.logsumexp(s * shifted, 1) - s * truth).mean())

    bounds = (math.log(1e-4), math.log(1e4))
    return math.exp(minimize_scalar(loss, bounds=bounds, method="bounded").x)


def scaled(linear_head: nn.Linear, s: float) -> nn.Linear:
    """A head with logits s times those of `linear_head`: Guo et al., 2017, arXiv:1706.04599."""
    return _as_linear(linear_head.weight.detach() * s, linear_head.bias.detach() * s)


def _calibrated(
    fitted: nn.Linear, validation: Labelled | None, temperature: float | None
) -> tuple[nn.Linear, float]:
    """The head scaled by the temperature, which is fitted on validation data if it is None."""
    if temperature is None:
        if validation is None:
            raise FedlensError(
                "temperature is fitted on validation data: give validation data or set temperature."
            )
        features, labels = validation
        with torch.no_grad():
            logits = fitted.to(features.device)(features)
        temperature = fit_temperature(logits, labels)
    return scaled(fitted, temperature), temperature


def _as_linear(weight: torch.Tensor, bias: torch.Tensor) -> nn.Linear:
    classes, width = weight.shape
    made = nn.Linear(width, classes, device="meta").to_empty(device=weight.device)  # no random draw
    with torch.no_grad():
        made.weight.copy_(weight)
        made.bias.copy_(bias)
    return made
