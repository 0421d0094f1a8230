"""Sensitivity and masks of any `nn.Module`: fisher, mask and calibrate.

`forward` takes one argument and returns logits [batch, classes]. Masks cover weights of two or more
dimensions by default; biases, norms and embeddings are trained whole unless they are named.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedlens.data.examples import Examples, as_examples
from fedlens.errors import FedlensError
from fedlens.models.architectures.mode import evaluating
from fedlens.params import Params
from fedlens.rng import Stream
from fedlens.sparse import calibration
from fedlens.sparse.masks import Masks, Rule, needs_scores, rule_row, select
from fedlens.sparse.parameter_groups import maskable
from fedlens.sparse.sensitivity.fisher import sensitivity
from fedlens.sparse.sensitivity.per_example_gradients import SquaredGradients

Inputs = Tensor | tuple[Tensor, Tensor] | Sequence[tuple[Tensor, int]] | Examples


def fisher(
    model: nn.Module,
    inputs: Inputs,
    *,
    labels: str = "sampled",
    target: str = "logit",
    seed: int = 0,
    batch_size: int = 64,
    parameters: Sequence[str] | None = None,
) -> dict[str, Tensor]:
    """Diagonal Fisher sensitivity of every weight, E (∂t_y/∂w)², exact per example.

    The model is evaluated in eval mode and left as it was. Most layers take one backward pass per
    batch; parameters that no fast rule covers take one per example, which is logged.

    Args:
        model: Any module whose `forward` takes one argument and returns logits [batch, classes].
        inputs: A tensor [N, …], a pair (inputs, labels), a torch dataset, or `Examples`.
        labels: "sampled" draws y from the model's softmax, "expected" sums over all classes, and
            "data" takes the labels of `inputs`.
        target: t_y is the "logit" of class y, or its "log_prob".
        seed: Seed of the sampled labels.
        batch_size: Examples in one backward pass; it changes rounding only.
        parameters: Names of the parameters to score. By default those that require gradients, have
            two or more dimensions and are called "…weight": matrices and kernels, the last layer
            among them, but not biases, norms, scales and position embeddings.

    Returns:
        The mean over examples for every parameter, float64 on the CPU.

    Examples:
        >>> import torch
        >>> import fedlens as fl
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> fl.fisher(model, torch.tensor([[1.0, -2.0], [3.0, 2.0]]))["weight"]
        tensor([[5., 4.]], dtype=torch.float64)
    """
    _check_batch_size(batch_size)
    weights = _named(model, parameters)
    examples = _examples(inputs, weights, labels)
    with evaluating(model):
        squares = _squared_gradients(model, weights, examples)
        return sensitivity(
            squares,
            examples,
            labels=labels,
            target=target,
            stream=Stream(seed, ()),
            micro_batch=batch_size,
        ).mean()


def mask(
    model: nn.Module,
    scores: Params | None = None,
    *,
    rule: Rule = "least_sensitive",
    density: float,
    seed: int = 0,
    scope: str = "global",
    parameters: Sequence[str] | None = None,
    **rule_parameters: Any,
) -> Masks:
    """Masks that train exactly round(density · N) of the model's N maskable weights.

    Args:
        model: Any module.
        scores: Sensitivities by name, from `fisher`; only rules of sensitivity need them.
        rule: "least_sensitive", "most_sensitive", "lowest_magnitude", "highest_magnitude",
            "random", a rule added by `@mask_rule`, or a function `(weight, sensitivity)` of one
            tensor that returns the values to rank by; the smallest are trained.
        density: The fraction of weights that is trained, from 0 to 1.
        seed: Seed of the draws that break ties.
        scope: "global" ranks all weights together, "tensor" each tensor by itself.
        parameters: Names of the parameters to mask; by default those of `scores`, or the weights
            that `fisher` scores by default.
        **rule_parameters: Parameters of the rule.

    Returns:
        A bool tensor for every masked parameter, True where it is trained, on the CPU.

    Examples:
        >>> import torch
        >>> import fedlens as fl
        >>> model = torch.nn.Linear(4, 1)
        >>> _ = torch.nn.init.constant_(model.weight[0, 2:], 9.0)
        >>> fl.mask(model, rule="highest_magnitude", density=0.5)
        {'weight': tensor([[False, False,  True,  True]])}
    """
    row = rule_row(rule)
    rule_parameters = row.checked(rule_parameters)
    if needs_scores(row):
        if scores is None:
            raise FedlensError(
                f"The mask rule '{row.name}' needs scores: pass fisher(model, inputs), or choose a "
                "rule of magnitude or random."
            )
        parameters = list(scores) if parameters is None else parameters
        if unscored := [name for name in parameters if name not in scores]:
            raise FedlensError(
                f"There are no scores for {', '.join(unscored[:3])}: pass the same parameters to "
                "fisher and mask."
            )
    weights = _named(model, parameters)
    return select(
        weights,
        row,
        density,
        stream=Stream(seed, ()),
        scores=scores,
        scope=scope,
        **rule_parameters,
    )


def calibrate(
    model: nn.Module,
    inputs: Inputs,
    *,
    rule: Rule = "least_sensitive",
    density: float,
    rounds: int = 4,
    method: str = "talos",
    shrink_factor: float = 0.1,
    labels: str = "sampled",
    target: str = "logit",
    scope: str = "global",
    seed: int = 0,
    batch_size: int = 64,
    parameters: Sequence[str] | None = None,
    **rule_parameters: Any,
) -> Masks:
    """Masks found in rounds, as in TaLoS: each round scores the model and drops some weights.

    Round r of R keeps the fraction density^(r/R). While the model is scored, dropped weights are
    multiplied by `shrink_factor`. Afterwards the model is bit-identical to what it was. One round
    gives `mask(model, fisher(model, inputs))`. Iurada et al., 2025,
    https://arxiv.org/abs/2504.02620.

    Args:
        model: Any module whose `forward` takes one argument and returns logits [batch, classes].
        inputs: A tensor [N, …], a pair (inputs, labels), a torch dataset, or `Examples`.
        rule: The mask rule, as in `mask`; rules that need no scores rank once.
        density: The fraction of weights that is trained, from 0 to 1.
        rounds: How often the weights are scored.
        method: "talos", or "mean", which ranks once by the mean of all rounds' scores.
        shrink_factor: Multiplies dropped weights while the model is scored.
        labels: As in `fisher`.
        target: As in `fisher`.
        scope: As in `mask`.
        seed: Seed of the sampled labels and of the draws that break ties.
        batch_size: Examples in one backward pass.
        parameters: Names of the parameters to mask, as in `fisher`.
        **rule_parameters: Parameters of the rule.

    Returns:
        A bool tensor for every masked parameter, True where it is trained, on the CPU.

    Examples:
        >>> import torch
        >>> import fedlens as fl
        >>> model = torch.nn.Linear(4, 1, bias=False)
        >>> inputs = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
        >>> fl.calibrate(model, inputs, density=0.5, rounds=2)
        {'weight': tensor([[ True,  True, False, False]])}
    """
    _check_batch_size(batch_size)
    if not 0 <= shrink_factor <= 1:
        raise FedlensError(f"shrink_factor={shrink_factor} must be in [0, 1].")
    rule_parameters = rule_row(rule).checked(rule_parameters)
    weights = _named(model, parameters)
    examples = _examples(inputs, weights, labels)
    squares: SquaredGradients | None = None

    def score(index: int) -> Params:
        nonlocal squares
        squares = squares or _squared_gradients(model, weights, examples)
        return sensitivity(
            squares,
            examples,
            labels=labels,
            target=target,
            stream=Stream(seed, (index,) if index else ()),  # the first round draws as `fisher`
            micro_batch=batch_size,
        ).mean()

    with evaluating(model):
        return calibration.calibrate(
            weights,
            score,
            rule=rule,
            density=density,
            stream=Stream(seed, ()),
            rounds=rounds,
            method=method,
            shrink_factor=shrink_factor,
            scope=scope,
            **rule_parameters,
        ).masks(density)


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise FedlensError(f"batch_size={batch_size} must be 1 or more.")


def _named(model: nn.Module, names: Sequence[str] | None) -> dict[str, nn.Parameter]:
    known = dict(model.named_parameters())
    if names is None:
        names = maskable({name: value for name, value in known.items() if value.requires_grad})
    if unknown := [name for name in names if name not in known]:
        raise FedlensError(
            f"The model has no parameter {', '.join(unknown[:3])}: see model.named_parameters()."
        )
    return {name: known[name] for name in names}


def _examples(inputs: Inputs, weights: Params, labels: str) -> Examples:
    """The inputs as examples on the model's device."""
    if isinstance(inputs, Tensor):
        if labels == "data":
            raise FedlensError("labels='data' needs the examples' labels: pass (inputs, labels).")
        inputs = (inputs, torch.zeros(len(inputs), dtype=torch.int64))
    return as_examples(inputs).to(next(iter(weights.values())).device)


def _squared_gradients(model: nn.Module, weights: Params, examples: Examples) -> SquaredGradients:
    """Planned on two examples; refuses models whose output is not logits."""
    if not len(examples):
        raise FedlensError("The inputs are empty: pass at least one example.")
    sample = examples.batch(torch.arange(min(2, len(examples))))
    with torch.no_grad():
        logits = model(sample)
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != len(sample):
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise FedlensError(
            f"The model returns {shape} for {len(sample)} examples: wrap it in a module that "
            "returns logits [batch, classes]."
        )
    return SquaredGradients(model, list(weights), sample)
