"""Which part of a backbone is trained: LoRA, biases and norms, linearised fine-tuning."""

import copy
import pickle

import pytest
import timm
import torch
from torch import nn

from fedlens.errors import FedlensError
from fedlens.models.architectures import blocks
from fedlens.models.classifier import Classifier
from fedlens.models.trained_parts import lora
from fedlens.registry import trainable
from fedlens.rng import Stream, generator, scoped

STREAM = Stream(0, ("trainable",))


def vit() -> nn.Module:
    with scoped(generator(0, "test")):
        return timm.create_model("test_vit", num_classes=0, img_size=32).eval()


def images(count: int = 3) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32, generator=generator(0, "images"))


def trained(module: nn.Module) -> set[str]:
    return {name for name, value in module.named_parameters() if value.requires_grad}


def with_lora(**parameters: object) -> nn.Module:
    backbone = vit()
    row = trainable["lora"]
    row.make(backbone, STREAM, **row.checked(parameters))
    return backbone


def test_each_row_leaves_gradients_on_for_its_part() -> None:
    everything = set(dict(vit().named_parameters()))
    parts = {}
    for name, parameters in [("full", {}), ("head", {}), ("last_blocks", {"count": 1}),
                             ("biases_and_norms", {}), ("linearised", {})]:  # fmt: skip
        backbone = vit()
        trainable[name].make(backbone, STREAM, **parameters)
        parts[name] = trained(backbone)
    assert parts["full"] == parts["linearised"] == everything
    assert parts["head"] == set()
    depth = len(vit().blocks)  # type: ignore[arg-type]
    assert {name.split(".")[1] for name in parts["last_blocks"] if "blocks" in name} == {
        str(depth - 1)
    }
    kept = {name for name in everything if name.endswith("bias") or "norm" in name}
    assert parts["biases_and_norms"] == kept


def test_lora_trains_two_factors_of_every_linear_map_and_nothing_else() -> None:
    backbone = with_lora(rank=2)
    maps = {name for name, module in vit().named_modules() if isinstance(module, nn.Linear)}
    assert {name.partition(".parametrizations")[0] for name in trained(backbone)} == maps
    sizes = {name: value.shape for name, value in vit().named_parameters()}
    expected = sum(2 * sum(sizes[f"{name}.weight"]) for name in maps)
    assert sum(v.numel() for v in backbone.parameters() if v.requires_grad) == expected


def test_lora_starts_as_the_model_it_was_put_on_bit_for_bit() -> None:
    assert torch.equal(with_lora()(images()), vit()(images()))


def test_factors_of_hand_computed_numbers() -> None:
    layer = nn.Linear(2, 2, bias=False)
    net = nn.Sequential(layer)
    nn.init.zeros_(layer.weight)
    lora.add(net, STREAM, rank=1, alpha=3.0, layers="", average="factors")
    one = next(lora.names(net))
    parameters = dict(net.named_parameters())
    with torch.no_grad():
        parameters[one.a].copy_(torch.tensor([[1.0, 2.0]]))
        parameters[one.b].copy_(torch.tensor([[5.0], [7.0]]))
    expected = torch.tensor([[15.0, 30.0], [21.0, 42.0]])  # 3/1 · b aᵀ
    assert torch.equal(layer.weight, expected)
    assert torch.equal(lora.plain([one], parameters)["0.weight"], expected)
    lora.merge(net)
    assert list(dict(net.named_parameters())) == ["0.weight"]
    assert torch.equal(layer.weight, expected)


def test_frozen_a_trains_b_alone() -> None:
    names = trained(with_lora(average="frozen_a"))
    assert names
    assert all(name.endswith(".b") for name in names)


def test_lora_on_some_layers_and_on_none() -> None:
    assert all("attn" in name for name in trained(with_lora(layers="attn")))
    with pytest.raises(FedlensError, match=r"no linear map whose name contains 'nothing' to put"):
        with_lora(layers="nothing")
    with pytest.raises(FedlensError, match="Conv2d has no linear map to put LoRA on"):
        lora.add(nn.Conv2d(3, 4, 3), STREAM, rank=1, alpha=1, layers="", average="factors")


def test_frozen_maps_get_no_factors() -> None:
    backbone = vit()
    blocks.freeze_blocks(backbone, 2)
    lora.add(backbone, STREAM, rank=1, alpha=1, layers="", average="factors")
    deep = {
        name
        for name, module in vit().named_modules()
        if isinstance(module, nn.Linear) and not name.startswith(("blocks.0.", "blocks.1."))
    }
    assert {one.plain.removesuffix(".weight") for one in lora.names(backbone)} == deep
    frozen = vit().requires_grad_(False)
    with pytest.raises(FedlensError, match=r"are frozen: lower backbone\.freeze_blocks"):
        lora.add(frozen, STREAM, rank=1, alpha=1, layers="", average="factors")


def test_a_model_with_factors_is_copied_and_sent_to_another_process() -> None:
    backbone = with_lora(rank=2)
    with torch.no_grad():
        for value in backbone.parameters():
            value.add_(0.01)
    for other in (copy.deepcopy(backbone), pickle.loads(pickle.dumps(backbone))):
        assert torch.equal(other(images()), backbone(images()))
        assert trained(other) == trained(backbone)
        twice = pickle.loads(pickle.dumps(other))
        assert torch.equal(twice(images()), backbone(images()))


def linearised(backbone: nn.Module) -> Classifier:
    head = nn.Linear(backbone.num_features, 3).requires_grad_(False)  # type: ignore[arg-type]
    return Classifier(backbone, head, linearised=True)


def test_the_expansion_is_the_model_at_its_origin() -> None:
    model = linearised(vit())
    plain = Classifier(model.backbone, model.head)
    torch.testing.assert_close(model(images()), plain(images()), rtol=1e-4, atol=1e-5)


def test_the_expansion_is_linear_and_has_the_slope_of_a_difference_quotient() -> None:
    backbone = vit().double()
    model = linearised(backbone).double()
    plain = Classifier(backbone, model.head)
    inputs = images(2).double()
    step = {
        name: torch.randn(value.shape, generator=generator(1, name), dtype=torch.float64)
        for name, value in backbone.named_parameters()
    }

    def at(distance: float, of: Classifier) -> torch.Tensor:
        with torch.no_grad():
            for name, value in backbone.named_parameters():
                value.copy_(model.origin[name] + distance * step[name])
            return of(inputs)

    start = at(0.0, model)
    one, two = at(1.0, model) - start, at(2.0, model) - start
    torch.testing.assert_close(two, 2 * one)
    quotient = (at(1e-6, plain) - at(-1e-6, plain)) / 2e-6
    torch.testing.assert_close(one, quotient, rtol=1e-5, atol=1e-5)


def test_gradients_of_the_expansion_are_those_at_the_origin_wherever_it_is() -> None:
    """A linear function has one gradient: that of the model at its origin."""
    backbone = vit().double()
    model = linearised(backbone).double()
    plain = Classifier(backbone, model.head)
    inputs = images(2).double()
    expected = torch.autograd.grad(plain(inputs).sum(), list(backbone.parameters()))
    with torch.no_grad():
        for value in backbone.parameters():
            value.add_(0.1)
    moved = torch.autograd.grad(model(inputs).sum(), list(backbone.parameters()))
    for one, other in zip(moved, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_linearised_model_has_the_parameters_of_the_plain_one() -> None:
    backbone = vit()
    model = linearised(backbone)
    assert (
        dict(model.named_parameters()).keys()
        == dict(Classifier(backbone, model.head).named_parameters()).keys()
    )
    assert not [name for name in model.state_dict() if "origin" in name]
    other = copy.deepcopy(model)
    assert torch.equal(other(images()), model(images()))
