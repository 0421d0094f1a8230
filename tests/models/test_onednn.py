"""Linear layers by oneDNN give what torch's own give, up to rounding."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from fedlens.models.architectures import onednn
from fedlens.models.architectures.onednn import OneDnnLinear, use_onednn
from fedlens.models.classifier import Classifier
from fedlens.rng import generator, scoped

pytestmark = pytest.mark.skipif(not onednn.available(), reason="this build of torch has no oneDNN")


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=generator(0, "numbers", *shape))


def layer(inputs: int, outputs: int, *, bias: bool = True) -> tuple[nn.Linear, nn.Linear]:
    """torch's own, and the same by oneDNN."""
    with scoped(generator(0, "layer")):
        plain = nn.Linear(inputs, outputs, bias=bias)
    changed = copy.deepcopy(plain)
    assert use_onednn(changed)
    assert type(changed) is OneDnnLinear
    return plain, changed


def results(net: nn.Module, inputs: Tensor, slope: Tensor) -> list[Tensor | None]:
    """The output, and the gradients by input and parameters."""
    read = inputs.clone().requires_grad_()
    output = net(read)
    output.backward(slope)
    return [output.detach(), read.grad, *(one.grad for one in net.parameters())]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("shape", "outputs"),
    [
        ((4, 7), 5),
        ((2, 3, 8), 6),
        ((1, 1), 1),
        ((17, 64, 96), 33),
        ((0, 4), 3),
        ((5,), 2),
        ((2, 0, 4), 3),
    ],
    ids=str,
)
def test_outputs_and_gradients_are_those_of_exact_products(
    shape: tuple[int, ...], outputs: int, *, bias: bool
) -> None:
    plain, changed = layer(shape[-1], outputs, bias=bias)
    inputs, slope = draw(*shape), draw(*shape[:-1], outputs)
    expected = results(plain.double(), inputs.double(), slope.double())
    for exact, one in zip(expected, results(changed, inputs, slope), strict=True):
        assert exact is not None
        assert one is not None
        assert one.dtype == torch.float32
        largest = exact.abs().max().item() if exact.numel() else 0.0
        torch.testing.assert_close(one.double(), exact, rtol=1e-5, atol=1e-6 * largest)


def test_inputs_in_any_memory_layout() -> None:
    plain, changed = layer(6, 4)
    for inputs in (draw(6, 9).t(), draw(9, 12)[:, ::2], draw(6).expand(9, 6)):
        torch.testing.assert_close(changed(inputs), plain(inputs))


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_frozen_parameter_gets_no_gradient(frozen: str) -> None:
    plain, changed = layer(6, 4)
    for net in (plain, changed):
        getattr(net, frozen).requires_grad_(requires_grad=False)
    expected, actual = (results(net, draw(3, 6), draw(3, 4)) for net in (plain, changed))
    for one, other in zip(expected, actual, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(other, one)
    assert getattr(changed, frozen).grad is None


def test_other_precisions_take_torchs_own_way() -> None:
    plain, changed = layer(6, 4)
    inputs = draw(3, 6)
    assert torch.equal(changed.double()(inputs.double()), plain.double()(inputs.double()))
    plain, changed = layer(6, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(changed(inputs), plain(inputs))
        assert changed(inputs).dtype == torch.bfloat16


def test_a_model_travels_and_keeps_its_names() -> None:
    model = Classifier(nn.Sequential(nn.Linear(6, 5), nn.GELU()), nn.Linear(5, 2))
    names, inputs = list(model.state_dict()), draw(3, 6)
    expected = model(inputs)
    assert use_onednn(model)
    assert not use_onednn(model)
    assert list(model.state_dict()) == names
    for net in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(net.head) is OneDnnLinear
        torch.testing.assert_close(net(inputs), expected)


def test_models_without_linear_layers_or_builds_without_onednn_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not use_onednn(nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten()))
    monkeypatch.setattr(onednn, "available", lambda: False)
    net = nn.Linear(6, 4)
    assert not use_onednn(net)
    assert type(net) is nn.Linear


@pytest.mark.parametrize(("seconds", "faster"), [(1.0, True), (1.5, True), (1.7, False)])
def test_it_is_faster_only_by_a_clear_margin(
    seconds: float, *, faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MKL takes 2 seconds here."""
    times = iter([2.0, seconds])
    monkeypatch.setattr(onednn, "_seconds", lambda work: next(times))
    assert onednn.is_faster.__wrapped__() is faster


def test_the_machine_is_measured_once_and_nothing_is_drawn() -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    onednn.is_faster.cache_clear()
    assert onednn.is_faster() is onednn.is_faster()
    assert onednn.is_faster.cache_info().misses == 1
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
