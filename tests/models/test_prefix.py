"""A backbone cut after some of its blocks gives what the whole gives: features and gradients."""

from copy import deepcopy

import pytest
import timm
import torch
from torch import nn

from fedlens import rng
from fedlens.models.architectures import backbones
from fedlens.models.architectures.blocks import block_paths, last_blocks
from fedlens.models.architectures.module_features import with_features
from fedlens.models.classifier import Classifier
from fedlens.models.deep_features import Reading, Tokens, deepen
from fedlens.models.prefix import cut, frozen_blocks

FAMILIES = {
    "test_vit": 160,  # timm's smallest models of each family
    "test_resnet": 32,
    "test_convnext": 32,
    "test_efficientnet": 32,
}


def images(size: int, count: int = 2) -> torch.Tensor:
    return torch.randn(count, 3, size, size, generator=rng.generator(0, "images"))


def backbone_of(name: str) -> tuple[nn.Module, torch.Tensor]:
    if name == "vit_pico":
        return backbones.create(backbones.find(name), resolution=32).eval(), images(32)
    if name == "class token and registers":
        model = timm.models.vision_transformer.VisionTransformer(
            img_size=32, patch_size=16, embed_dim=24, depth=3, num_heads=2, num_classes=0,
            reg_tokens=2, pre_norm=True,
        )  # fmt: skip
        return model.eval(), images(32)
    if name == "swin":
        model = timm.models.swin_transformer.SwinTransformer(
            img_size=32, patch_size=4, embed_dim=8, depths=(1, 2), num_heads=(1, 2),
            window_size=4, num_classes=0,
        )  # fmt: skip
        return model.eval(), images(32)
    size = FAMILIES[name]
    return timm.create_model(name, num_classes=0).eval(), images(size)


@pytest.mark.parametrize("name", [*FAMILIES, "vit_pico", "class token and registers", "swin"])
def test_the_halves_give_the_whole_wherever_it_is_cut(name: str) -> None:
    backbone, inputs = backbone_of(name)
    expected = backbone(inputs)
    for blocks in range(1, len(block_paths(backbone)) + 1):
        found = cut(backbone, blocks, inputs)
        assert found is not None
        assert torch.equal(found.rest(backbone, found.first(backbone, inputs)), expected)
        assert found.halves_give_the_whole(backbone, inputs)
    assert torch.equal(backbone(inputs), expected)  # nothing of the cut is left
    assert not any("forward" in vars(module) for module in backbone.modules())


@pytest.mark.parametrize("tokens", ["class", "mean", "both"])
@pytest.mark.parametrize("name", ["vit_pico", "class token and registers"])
def test_tokens_that_a_head_reads_before_the_cut_are_carried_along(
    name: str, tokens: Tokens
) -> None:
    backbone, inputs = backbone_of(name)
    depth = len(block_paths(backbone))
    deepen(backbone, Reading(depth, tokens), resolution=32)
    expected = backbone(inputs)
    for blocks in range(1, depth + 1):
        found = cut(backbone, blocks, inputs)
        assert found is not None
        first = found.first(backbone, inputs)
        assert torch.equal(found.rest(backbone, first), expected)
        assert torch.equal(backbone(inputs), expected)
        assert "given" not in vars(backbone)


def test_maps_of_other_widths_are_not_carried() -> None:
    backbone, inputs = backbone_of("test_resnet")
    deepen(backbone, Reading(len(block_paths(backbone)), "both"), resolution=32)
    found = cut(backbone, 1, inputs)
    assert found is not None
    assert not found.halves_give_the_whole(backbone, inputs)


def test_gradients_are_those_of_the_whole_model_also_in_a_copy() -> None:
    backbone, inputs = backbone_of("class token and registers")
    last_blocks(backbone, 1)
    model = Classifier(backbone, nn.Linear(24, 5))
    found = cut(backbone, 2, inputs)
    assert found is not None
    names = [name for name, value in model.named_parameters() if value.requires_grad]

    def gradients(of: Classifier, x: torch.Tensor) -> list[torch.Tensor]:
        parameters = [of.get_parameter(name) for name in names]
        return list(torch.autograd.grad(of(x).square().sum(), parameters))

    expected = gradients(model, inputs)
    with torch.no_grad():
        activations = found.first(backbone, inputs)
    model.cut = found
    copied = deepcopy(model)
    for one in (model, copied):
        assert [name for name, value in one.named_parameters() if value.requires_grad] == names
        for ours, theirs in zip(gradients(one, activations), expected, strict=True):
            assert torch.equal(ours, theirs)


def test_blocks_before_the_first_trained_tensor_are_frozen() -> None:
    backbone, _ = backbone_of("class token and registers")
    assert frozen_blocks(backbone, {"blocks.2.mlp.fc1.bias"}) == 2
    assert frozen_blocks(backbone, {"blocks.2.mlp.fc1.bias", "blocks.1.norm1.weight"}) == 1
    assert frozen_blocks(backbone, {"norm.weight"}) == 3
    assert frozen_blocks(backbone, {"norm.weight", "pos_embed"}) == -1
    resnet, _ = backbone_of("test_resnet")
    statistics = next(name for name, _ in resnet.named_buffers() if name.startswith("layer2"))
    assert 0 < frozen_blocks(resnet, {statistics}) < len(block_paths(resnet))


def test_a_model_whose_blocks_need_more_than_one_input_is_not_cut() -> None:
    class Scaled(nn.Module):
        """Its blocks also get the mean of the image, which is not known after the cut."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mean = x.mean()
            for block in self.blocks:
                x = block(x) + mean
            return x

    model, inputs = Scaled(), torch.randn(2, 4, generator=rng.generator(0, "inputs"))
    found = cut(model, 2, inputs)
    assert found is not None
    assert not found.halves_give_the_whole(model, inputs)


def test_features_of_a_named_submodule_are_cut_too() -> None:
    backbone, inputs = backbone_of("test_resnet")
    module = with_features(backbone, name="mine", resolution=32, features="layer3").eval()
    found = cut(module, 2, inputs)
    assert found is not None
    assert found.halves_give_the_whole(module, inputs)
