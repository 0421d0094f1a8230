"""Max pooling before ReLU instead of after it, so that ReLU has fewer numbers to go through.

Both only choose: max(relu(x)) = relu(max(x)), and where several inputs of a window are its maximum,
either it is positive and the first of them gets the gradient, or nothing gets one. So outputs and
gradients are the same to the bit.
"""

from torch import nn

from fedlens.models.classifier import Classifier


def pool_first(model: nn.Module) -> bool:
    """Swaps them in a Sequential, in place; whether there was anything to swap.

    `model` is a Sequential (of Sequentials, perhaps) or a classifier on one: what any other module
    reads of its layers is not known. Layers without parameters change places, so names stay.
    """
    if isinstance(model, Classifier):
        return model.cut is None and _pool_first(model.backbone)
    return _pool_first(model)


def _pool_first(module: nn.Module) -> bool:
    if type(module) is not nn.Sequential:
        return False
    swapped = [_pool_first(one) for one in module]
    for place in range(len(module) - 1):
        here, following = module[place], module[place + 1]
        pools = type(following) is nn.MaxPool2d and not following.return_indices
        if type(here) is nn.ReLU and pools:
            module[place], module[place + 1] = following, here
            swapped.append(True)
    return any(swapped)
