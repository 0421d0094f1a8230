"""BatchNorm's statistics: frozen, or updated where the layer's own parameters are trained."""

import pytest
import torch
from torch import nn

from fedlens.errors import FedlensError
from fedlens.models.architectures import batch_norm


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.BatchNorm1d(3)).eval()


def test_statistics_are_those_torch_computes_in_training() -> None:
    one, other = net(), net()
    other.load_state_dict(one.state_dict())
    inputs = torch.randn(8, 2)
    with batch_norm.updating(one, "averaged"):
        one(inputs)
    other.train()(inputs)
    expected = dict(other.named_buffers())
    for name, value in batch_norm.statistics(one).items():
        assert torch.equal(value, expected[name])
    assert not any(module.training for module in one.modules())


def test_hand_computed_running_mean_and_variance() -> None:
    layer = nn.BatchNorm1d(1).eval()
    model = nn.Sequential(layer)
    with batch_norm.updating(model, "averaged"):
        model(torch.tensor([[1.0], [3.0]]))
    assert layer.running_mean is not None
    assert layer.running_var is not None
    assert layer.running_mean.item() == pytest.approx(0.1 * 2.0)  # momentum 0.1
    assert layer.running_var.item() == pytest.approx(0.9 + 0.1 * 2.0)  # unbiased variance 2


def test_frozen_layers_keep_their_statistics() -> None:
    model = net()
    model[1].requires_grad_(False)
    before = [buffer.clone() for buffer in model[1].buffers()]
    with batch_norm.updating(model, "averaged"):
        model(torch.randn(8, 2))
    assert all(torch.equal(a, b) for a, b in zip(before, model[1].buffers(), strict=True))
    assert list(batch_norm.statistics(model)) == ["3.running_mean", "3.running_var"]
    with batch_norm.updating(model, "frozen"):
        assert not any(module.training for module in model.modules())


def test_a_model_of_which_nothing_is_trained_has_no_trained_layers() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))
    assert batch_norm.trained_layers(model)
    assert not batch_norm.trained_layers(model.requires_grad_(False))


def test_what_a_client_keeps_is_all_of_its_layers() -> None:
    assert batch_norm.own_names(net())[:4] == [
        "1.weight", "1.bias", "1.running_mean", "1.running_var",
    ]  # fmt: skip


def test_a_cumulative_mean_counts_only_the_batches_of_one_training() -> None:
    """Else a client's statistics would depend on who trained in this process before it."""
    layer = nn.BatchNorm1d(1, momentum=None).eval()
    model = nn.Sequential(layer)
    for value in (2.0, 4.0):
        with batch_norm.updating(model, "averaged"):
            model(torch.tensor([[value - 1], [value + 1]]))
    assert layer.running_mean is not None
    assert layer.running_mean.item() == pytest.approx(4.0)


def test_a_batch_of_one_example_is_refused_in_a_sentence() -> None:
    model = net()
    with (
        pytest.raises(FedlensError, match="so BatchNorm has no variance"),
        batch_norm.updating(model, "averaged"),
    ):
        model(torch.randn(1, 2))
    assert not any(module.training for module in model.modules())
