"""fisher, mask and calibrate on modules that know nothing of fedlens, against brute force."""

import doctest
import logging
from collections.abc import Callable

import pytest
import torch
from timm.models.convnext import ConvNeXt
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from fedlens import params, rng
from fedlens.data.examples import TensorExamples
from fedlens.errors import FedlensError
from fedlens.sparse import model_masks
from fedlens.sparse.model_masks import calibrate, fisher, mask


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


def vit() -> nn.Module:
    return VisionTransformer(
        img_size=32, patch_size=16, embed_dim=16, depth=2, num_heads=2, num_classes=4,
        init_values=0.1, drop_rate=0.1,
    )  # fmt: skip


def convnext() -> nn.Module:
    return ConvNeXt(depths=(1, 1, 1, 1), dims=(4, 6, 8, 10), num_classes=4, ls_init_value=0.5)


MODELS = [cnn, vit, convnext]
INPUTS = torch.randn(5, 3, 32, 32, generator=rng.generator(0, "test"), dtype=torch.float64)


def drawn(build: Callable[[], nn.Module]) -> nn.Module:
    """In float64 and training mode, with every parameter and statistic drawn."""
    model = build().double().train()
    with torch.no_grad():
        for number, value in enumerate(model.state_dict().values()):
            if value.is_floating_point():
                draw = rng.generator(number, "test")
                value.copy_(0.3 + 0.5 * torch.rand(value.shape, generator=draw).double())
    return model


def brute_force(model: nn.Module, target: str, names: list[str]) -> dict[str, torch.Tensor]:
    """E_x Σ_y p(y|x) (∂t_y/∂w)², one example and one class at a time."""
    model.eval()
    parameters = {name: model.get_parameter(name) for name in names}
    total = params.zeros_like(parameters)
    for one in INPUTS.split(1):
        logits = model(one)[0]
        scores = logits if target == "logit" else logits.log_softmax(0)
        for p, score in zip(logits.softmax(0), scores, strict=True):
            gradients = torch.autograd.grad(score, list(parameters.values()), retain_graph=True)
            for name, gradient in zip(names, gradients, strict=True):
                total[name] += p.detach() * gradient**2 / len(INPUTS)
    model.train()
    return total


@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize("target", ["logit", "log_prob"])
@pytest.mark.parametrize("every", [False, True])
def test_fisher_is_brute_force_per_example(
    build: Callable[[], nn.Module], target: str, every: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = drawn(build)
    before = params.digest(model.state_dict())
    names = [name for name, value in model.named_parameters() if every or value.ndim > 1]
    names = [name for name in names if every or name.endswith("weight")]
    with caplog.at_level(logging.CRITICAL if every else logging.WARNING):
        found = fisher(
            model, INPUTS, labels="expected", target=target, batch_size=2,
            parameters=names if every else None,
        )  # fmt: skip
    assert not caplog.records  # every matrix and kernel has a fast rule
    assert list(found) == names
    for name, value in brute_force(model, target, names).items():
        torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-14, msg=name)
    assert all(module.training for module in model.modules())
    assert params.digest(model.state_dict()) == before
    assert all(value.requires_grad and value.grad is None for value in model.parameters())


@pytest.mark.parametrize("build", MODELS)
def test_labels_of_the_data_are_used_and_sampled_ones_follow_the_seed(
    build: Callable[[], nn.Module],
) -> None:
    model, labels = drawn(build), torch.tensor([0, 1, 2, 3, 0])
    names = [name for name, value in model.named_parameters() if value.ndim > 1][-1:]
    pair = fisher(model, (INPUTS, labels), labels="data", parameters=names)
    examples = TensorExamples(INPUTS, labels)
    assert params.digest(fisher(model, examples, labels="data", parameters=names)) == params.digest(
        pair
    )
    sampled = [params.digest(fisher(model, INPUTS, seed=s, parameters=names)) for s in (0, 0, 1)]
    assert sampled[0] == sampled[1]
    with pytest.raises(FedlensError, match=r"pass \(inputs, labels\)"):
        fisher(model, INPUTS, labels="data")


@pytest.mark.parametrize("build", MODELS)
def test_one_round_of_calibration_is_the_mask_of_fisher(build: Callable[[], nn.Module]) -> None:
    model = drawn(build)
    before = params.digest(model.state_dict())
    masks = mask(model, fisher(model, INPUTS, seed=3), density=0.1, seed=3)
    once = calibrate(model, INPUTS, density=0.1, rounds=1, seed=3)
    assert params.digest(once) == params.digest(masks)
    total = sum(value.numel() for value in masks.values())
    assert sum(int(value.sum()) for value in masks.values()) == round(0.1 * total)
    talos = calibrate(model, INPUTS, density=0.1, rounds=3, seed=3)
    assert sum(int(value.sum()) for value in talos.values()) == round(0.1 * total)
    assert params.digest(talos) != params.digest(masks)
    assert params.digest(model.state_dict()) == before
    assert all(module.training for module in model.modules())


def test_rules_without_scores_need_no_inputs_and_names_may_be_chosen() -> None:
    model = drawn(cnn)
    assert list(mask(model, rule="random", density=0.5)) == ["0.weight", "3.weight", "9.weight"]
    chosen = mask(model, rule="lowest_magnitude", density=0.5, parameters=["9.weight", "9.bias"])
    assert {name: value.shape for name, value in chosen.items()} == {
        "9.weight": (4, 8),
        "9.bias": (4,),
    }
    some = fisher(model, INPUTS, parameters=["3.weight"])
    assert list(mask(model, some, density=0.5)) == ["3.weight"]
    model[0].requires_grad_(False)
    assert list(mask(model, rule="random", density=0.5)) == ["3.weight", "9.weight"]


class TimeFirst(nn.Module):
    """Pools to [1, batch, width] before its last layer: right with one example, wrong with two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = self.first(x).tanh().mean(1)[None]
        return self.last(pooled)[0]


def test_a_plan_made_with_one_example_holds_for_many() -> None:
    model = drawn(TimeFirst)
    inputs = torch.randn(6, 5, 3, generator=rng.generator(1, "test"), dtype=torch.float64)
    squares = model_masks.SquaredGradients(model, ["last.weight"], inputs[:1])
    squares.add(inputs, lambda logits: [logits[:, 0]])
    expected = torch.zeros(2, 4, dtype=torch.float64)
    for one in inputs.split(1):
        (gradient,) = torch.autograd.grad(model(one)[0, 0], [model.last.weight])
        expected += gradient**2
    torch.testing.assert_close(squares.sums["last.weight"], expected)


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.layer(x)}


def test_what_cannot_be_scored_is_refused_in_words() -> None:
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    with pytest.raises(FedlensError, match="needs scores: pass fisher"):
        mask(layer, density=0.5)
    with pytest.raises(FedlensError, match="no scores for bias"):
        mask(layer, fisher(layer, x), density=0.5, parameters=["weight", "bias"])
    with pytest.raises(FedlensError, match="no parameter wieght"):
        fisher(layer, x, parameters=["wieght"])
    with pytest.raises(FedlensError, match="returns dict for 2 examples"):
        fisher(Wrapped(), x)
    with pytest.raises(FedlensError, match="inputs are empty"):
        fisher(layer, x[:0])
    with pytest.raises(FedlensError, match="nothing to mask"):
        fisher(nn.LayerNorm(3), x)
    for call in (fisher, calibrate):
        layer.train()
        with pytest.raises(FedlensError):
            call(layer, x, target="logits", **({"density": 0.5} if call is calibrate else {}))
        assert layer.training


def test_the_examples_of_the_docstrings_run() -> None:
    assert doctest.testmod(model_masks).failed == 0
