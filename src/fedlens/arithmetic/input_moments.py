"""Second moments of the inputs of a model's linear maps: G = E[x xᵀ], what RegMean merges by.

The inputs x of a linear layer are its rows, those of a convolution the patches under its kernel.
Means of several clients, weighted by their numbers of examples, are the mean of all examples.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlens.data.examples import Examples, TensorExamples, as_examples
from fedlens.errors import FedlensError
from fedlens.models.architectures.mode import evaluating

Inputs = Tensor | tuple[Tensor, Tensor] | Sequence[tuple[Tensor, int]] | Examples


def input_moments(
    model: nn.Module,
    inputs: Inputs,
    *,
    batch_size: int = 64,
    parameters: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """E[Σ x xᵀ] of the inputs x of every linear layer and two-dimensional convolution.

    The sum is over the positions of one example (tokens, patches), the mean over examples. The
    model is evaluated in eval mode and left as it was. Layers that the model does not call
    (the maps inside `nn.MultiheadAttention`), and convolutions that pad with other values than
    zeros or by name, have no entry: `merge` averages their weights.

    Args:
        model: Any module whose `forward` takes one argument.
        inputs: A tensor [N, …], a pair (inputs, labels), a torch dataset, or `Examples`.
        batch_size: Examples in one forward pass; it changes rounding only.
        parameters: Names of the weights to compute moments for; by default all of them.

    Returns:
        By the name of the layer's weight: a matrix [inputs, inputs], or [groups, inputs, inputs]
        for a convolution with groups. float64, on the CPU.

    Examples:
        >>> import torch
        >>> import fedlens as fl
        >>> model = torch.nn.Linear(2, 1)
        >>> fl.input_moments(model, torch.tensor([[1.0, 0.0], [3.0, 2.0]]))["weight"]
        tensor([[5., 3.],
                [3., 2.]], dtype=torch.float64)
    """
    if batch_size < 1:
        raise FedlensError(f"batch_size={batch_size} must be 1 or more.")
    if isinstance(inputs, Tensor):
        examples: Examples = TensorExamples(inputs, torch.zeros(len(inputs), dtype=torch.int64))
    else:
        examples = as_examples(inputs)
    if not len(examples):
        raise FedlensError("inputs has no examples: give at least one.")
    index = torch.arange(len(examples))
    with evaluating(model):
        return moments_at(model, examples, index, batch_size, parameters=parameters)


@torch.no_grad()
def moments_at(
    model: nn.Module,
    examples: Examples,
    index: Tensor,
    batch_size: int = 64,
    *,
    parameters: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """`input_moments` over the examples at `index`, of the model in the mode that it is in."""
    device = next(model.parameters()).device
    sums: dict[str, Tensor] = {}
    with _watching(model, parameters, sums):
        for part in torch.split(index, batch_size):
            model(examples.batch(part).to(device))
    return {name: total.cpu() / len(index) for name, total in sums.items()}


def moment_shapes(
    model: nn.Module, parameters: Collection[str] | None = None
) -> dict[str, tuple[int, ...]]:
    """The shapes of the moments of all layers that the model may call."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, module in _layers(model, parameters):
        assert isinstance(module.weight, Tensor)
        width = module.weight[0].numel()
        groups = module.groups if isinstance(module, nn.Conv2d) else 1
        shapes[name] = (groups, width, width) if groups > 1 else (width, width)
    return shapes


def _layers(
    model: nn.Module, parameters: Collection[str] | None
) -> Iterator[tuple[str, nn.Linear | nn.Conv2d]]:
    """Linear maps by the name of their weight; a shared weight has one name for all its layers."""
    names = {id(value): name for name, value in model.named_parameters()}
    for module in model.modules():
        if not isinstance(module, nn.Linear | nn.Conv2d):
            continue
        name = names.get(id(module.weight))  # None: the weight is computed, not a parameter
        if name is None or (parameters is not None and name not in parameters):
            continue
        if isinstance(module, nn.Linear) or _unfolds(module):
            yield name, module


def _unfolds(module: nn.Conv2d) -> bool:
    return module.padding_mode == "zeros" and not isinstance(module.padding, str)


@contextmanager
def _watching(
    model: nn.Module, parameters: Collection[str] | None, sums: dict[str, Tensor]
) -> Iterator[None]:
    """Adds the moments of every layer's inputs to `sums` while the model is called."""

    def add(name: str, module: nn.Linear | nn.Conv2d, args: tuple[Tensor, ...]) -> None:
        if not args:  # called by a keyword: as if it were not called
            return
        rows = _rows(module, args[0].detach())
        moment = torch.bmm(rows.mT, rows).double()
        moment = moment[0] if len(moment) == 1 else moment
        sums[name] = sums[name].add_(moment) if name in sums else moment

    handles = [
        module.register_forward_pre_hook(partial(add, name))
        for name, module in _layers(model, parameters)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _rows(module: nn.Linear | nn.Conv2d, x: Tensor) -> Tensor:
    """All inputs of the layer's linear map, [groups, rows, width], in float32 or float64."""
    x = x if x.dtype == torch.float64 else x.float()
    if isinstance(module, nn.Linear):
        return x.reshape(1, -1, x.shape[-1])
    assert not isinstance(module.padding, str)
    patches = F.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride)
    grouped = patches.view(len(x), module.groups, -1, patches.shape[2])
    return grouped.permute(1, 0, 3, 2).reshape(module.groups, -1, grouped.shape[2])
