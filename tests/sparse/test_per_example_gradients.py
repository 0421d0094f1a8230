import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import LayerNorm, LayerScale
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedlens import params, rng
from fedlens.models.architectures.stem import ConvStem
from fedlens.sparse.sensitivity import layer_gradients
from fedlens.sparse.sensitivity.per_example_gradients import SquaredGradients

Found = dict[str, torch.Tensor]
FEW = settings(max_examples=12, deadline=None)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=rng.generator(seed, "test"), dtype=torch.float64)


def drawn(model: nn.Module, seed: int = 0) -> nn.Module:
    """In float64 and eval mode, with every parameter drawn, so that none sits at 0 or 1."""
    model = model.double().eval()
    with torch.no_grad():
        for number, value in enumerate(model.parameters()):
            value.copy_(0.5 * randn(*value.shape, seed=1000 * seed + number))
    return model


def last_logit(logits: torch.Tensor) -> list[torch.Tensor]:
    return [logits[:, -1]]


def two_targets(logits: torch.Tensor) -> list[torch.Tensor]:
    return [logits[:, 0], 0.5 * logits.log_softmax(1)[:, 1]]


def brute_force(
    model: nn.Module, inputs: torch.Tensor, targets: Callable[..., Any] = two_targets
) -> Found:
    """One example, one target, one backward pass; square; sum."""
    total = params.zeros_like(dict(model.named_parameters()))
    for one in inputs.split(1):
        for number in range(len(targets(model(one)))):
            model.zero_grad()
            targets(model(one))[number].sum().backward()
            for name, value in model.named_parameters():
                if value.grad is not None:
                    total[name] += value.grad**2
    model.zero_grad()
    return total


def fast(model: nn.Module, inputs: torch.Tensor, step: int = 64, **keys: Any) -> Found:
    found = SquaredGradients(model, [name for name, _ in model.named_parameters()], inputs[:2])
    for part in inputs.split(step):
        found.add(part, keys.get("targets", two_targets))
    return found.sums


def assert_exact(model: nn.Module, inputs: torch.Tensor, step: int = 64) -> None:
    found, expected = fast(model, inputs, step), brute_force(model, inputs)
    assert set(found) == set(expected)
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-15, msg=name)


@pytest.fixture
def no_fallback(caplog: pytest.LogCaptureFixture) -> Any:
    yield
    assert not caplog.get_records("call")


def vit(**keys: Any) -> nn.Module:
    arguments = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
    return drawn(VisionTransformer(num_classes=3, **{**arguments, **keys}))


@st.composite
def transformers(draw: Any) -> nn.Module:
    class_token = draw(st.booleans())
    return vit(
        embed_dim=draw(st.sampled_from([16, 24])),
        init_values=draw(st.sampled_from([None, 0.1])),
        class_token=class_token,
        reg_tokens=draw(st.sampled_from([0, 2])),
        no_embed_class=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        global_pool=draw(st.sampled_from(["avg", "token"])) if class_token else "avg",
        **({"embed_layer": ConvStem} if draw(st.booleans()) else {}),
    )


@pytest.mark.slow
@pytest.mark.usefixtures("no_fallback")
@FEW
@given(transformers(), st.integers(1, 5), st.integers(1, 6))
def test_a_transformer_s_squares_are_those_of_single_examples(
    model: nn.Module, count: int, step: int
) -> None:
    assert_exact(model, randn(count, 3, 16, 16), step)


@pytest.mark.usefixtures("no_fallback")
@FEW
@given(
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    groups=st.sampled_from([1, 2, 4]),
    bias=st.booleans(),
)
def test_a_convolution_s_squares_are_those_of_single_examples(**keys: Any) -> None:
    keys["kernel_size"] = (keys.pop("kernel"), 2)
    mean = nn.AdaptiveAvgPool2d(2)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.ReLU(inplace=True), nn.Conv2d(4, 8, **keys), mean, nn.Flatten()
    )
    assert_exact(drawn(model), randn(4, 3, 7, 8), 3)


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5), (1, 5)])
def test_a_linear_layer_takes_any_number_of_axes(shape: tuple[int, ...]) -> None:
    layers = [nn.Linear(5, 6), nn.GELU(), LayerNorm(6), LayerScale(6), nn.Linear(6, 3, bias=False)]
    assert_exact(drawn(nn.Sequential(*layers, nn.Flatten())), randn(4, *shape), 3)


def test_squares_by_hand() -> None:
    """t = w·x: (∂t/∂w)² is x², and 1 + 9 is not (1 + 3)²/2, the square of a mean gradient."""
    model = nn.Linear(2, 1, bias=False)
    found = SquaredGradients(model, ["weight"], torch.ones(2, 2))
    found.add(torch.tensor([[1.0, -2.0], [3.0, 2.0]]), last_logit)
    assert found.sums["weight"].tolist() == [[10.0, 8.0]]


def test_small_scratch_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = vit(embed_layer=ConvStem), randn(5, 3, 16, 16)
    expected = fast(model, inputs)
    monkeypatch.setitem(layer_gradients.SCRATCH, "cpu", 5000)
    for name, value in fast(model, inputs).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=0)


class Largest(TorchDispatchMode):
    """Watches what operators return."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.numbers = max(self.numbers, found.numel())
        return found


def test_no_batch_of_weight_gradients_is_ever_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(layer_gradients.SCRATCH, "cpu", 2 * 64 * 64 * 8)
    model = drawn(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Flatten()))
    inputs = randn(32, 3, 64)
    found = SquaredGradients(model, ["0.weight", "2.weight"], inputs[:2])
    with Largest() as largest:
        found.add(inputs, last_logit)
    assert largest.numbers == 2 * 64 * 64  # the activations have 32 · 3 · 64


def test_nothing_is_differentiated_below_the_lowest_scored_layer() -> None:
    seen = []

    class Witness(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            seen.append(len(g))
            return g

    class Between(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Witness.apply(x)

    model = nn.Sequential(nn.Linear(3, 3), Between(), nn.Linear(3, 3), nn.Linear(3, 2)).double()
    SquaredGradients(model, ["2.weight"], randn(2, 3)).add(randn(4, 3), last_logit)
    assert not seen
    SquaredGradients(model, ["0.weight"], randn(2, 3)).add(randn(4, 3), last_logit)
    assert seen[-1] == 4


class Odd(nn.Module):
    """Every way in which a rule can be wrong, and one parameter without any part in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.twice = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.also = nn.Linear(4, 4)
        self.also.weight = self.tied.weight
        self.windows = nn.Linear(2, 2, bias=False)
        self.direct = nn.Linear(4, 4)
        self.same = nn.Conv2d(1, 1, 3, padding="same")
        self.one = nn.Parameter(torch.ones(1, 4))
        self.unused = nn.Parameter(torch.ones(3))
        self.last = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * self.scale
        x = self.twice(self.twice(x).tanh())
        x = self.also(self.tied(x).tanh())
        x = self.windows(x.view(-1, 2)).view(x.shape)
        x = F.linear(x, self.direct.weight, self.direct.bias)
        x = self.same(x.view(-1, 1, 2, 2)).view(x.shape)
        return self.last(x * self.one.view(4))


def test_what_no_rule_gets_right_is_exact_too_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = drawn(Odd())
    assert_exact(model, randn(5, 4), 2)  # three batches
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    slow = ["scale", "one", "twice.weight", "twice.bias", "tied.weight", "windows.weight"]
    slow += ["direct.weight", "direct.bias", "same.weight", "same.bias"]
    assert f"{len(slow)} of 17 parameters" in record.getMessage()
    assert record.getMessage().count("scale") == 1


def test_only_what_is_asked_for_is_scored(caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = drawn(Odd()), randn(4, 4)
    found = SquaredGradients(model, ["first.bias", "unused"], inputs[:2])
    found.add(inputs, two_targets)
    assert set(found.sums) == {"first.bias", "unused"}
    torch.testing.assert_close(found.sums["first.bias"], brute_force(model, inputs)["first.bias"])
    assert not found.sums["unused"].any()
    assert not caplog.records
    with pytest.raises(ValueError, match="no parameter frist"):
        SquaredGradients(model, ["frist.bias"], inputs[:2])


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


@pytest.mark.parametrize("grad", [True, False])
def test_the_model_is_left_as_it_was_also_after_an_error(grad: bool) -> None:
    model = vit()
    model.norm.weight.requires_grad_(False)
    required = [value.requires_grad for value in model.parameters()]
    inputs, before = randn(3, 3, 16, 16), params.digest(model.state_dict())
    names = [name for name, _ in model.named_parameters()]
    with torch.set_grad_enabled(grad):
        found = SquaredGradients(model, names, inputs[:2])
        found.add(inputs, last_logit)
        assert found.sums["patch_embed.proj.weight"].all()
        with pytest.raises(AssertionError):
            found.add(randn(2, 3, 9, 9), last_logit)
    assert [value.requires_grad for value in model.parameters()] == required
    assert all(value.grad is None for value in model.parameters())
    assert hooks(model) == 0
    assert params.digest(model.state_dict()) == before
