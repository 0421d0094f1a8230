"""Pooling before ReLU gives what pooling after it gives, to the bit."""

import copy
import pickle

import pytest
import torch
from torch import nn

from fedlens.models.architectures.pool_order import pool_first
from fedlens.models.classifier import Classifier
from fedlens.rng import generator, scoped


def network(**pool: int) -> nn.Sequential:
    with scoped(generator(0, "network")):
        block = nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.MaxPool2d(2, **pool))
        return nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2, **pool), block, nn.Flatten()
        )


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("pool", [{}, {"padding": 1}, {"stride": 1}, {"dilation": 2}], ids=str)
@pytest.mark.parametrize("levels", [2, 5, None])
def test_outputs_and_gradients_are_the_same_bits(
    layout: torch.memory_format, pool: dict[str, int], levels: int | None
) -> None:
    """Images and kernels of few levels make many windows with more than one maximum."""
    after = network(**pool).to(memory_format=layout)
    images = torch.randn(5, 3, 20, 20, generator=generator(0, "images"))
    if levels is not None:
        images = (images * levels).round() / levels
        for parameter in after.parameters():
            parameter.data = (parameter.data * levels).round()
    before = copy.deepcopy(after)
    assert pool_first(before)
    assert [type(one) for one in before[:3]] == [nn.Conv2d, nn.MaxPool2d, nn.ReLU]
    results = []
    for net in (after, before):
        read = images.clone().contiguous(memory_format=layout).requires_grad_()
        output = net(read)
        weights = torch.randn(output.shape, generator=generator(0, "weights"))
        (output * weights).sum().backward()
        results.append([output, read.grad, *(one.grad for one in net.parameters())])
    for expected, actual in zip(*results, strict=True):
        assert torch.equal(actual, expected)


def test_a_classifier_is_changed_once_and_keeps_its_names() -> None:
    model = Classifier(network(), nn.Linear(54, 2))
    names = list(model.state_dict())
    assert pool_first(model)
    assert not pool_first(model)
    assert list(model.state_dict()) == names
    assert pickle.loads(pickle.dumps(model)).backbone[1].kernel_size == 2


class Wrapped(nn.Module):
    """Its forward pass may read any layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()


@pytest.mark.parametrize(
    "left",
    [
        Wrapped(),
        nn.Sequential(nn.GELU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.ReLU(), nn.AvgPool2d(2)),
        nn.Sequential(nn.ReLU(), nn.MaxPool2d(2, return_indices=True)),
        nn.Sequential(nn.MaxPool2d(2), nn.ReLU()),
        nn.Sequential(),
    ],
    ids=lambda net: str([type(one).__name__ for one in net.children()]),
)
def test_other_modules_stay_as_they_are(left: nn.Module) -> None:
    before = [type(one) for one in left.modules()]
    assert not pool_first(left)
    assert [type(one) for one in left.modules()] == before
