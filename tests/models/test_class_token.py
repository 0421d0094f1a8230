"""The last block for the class token alone gives what the whole block gives."""

import copy
import pickle
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from fedlens.models.architectures import class_token
from fedlens.models.classifier import Classifier
from fedlens.models.trained_parts import lora
from fedlens.rng import Stream, generator, scoped


def transformer(**options: Any) -> VisionTransformer:
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 12, "depth": 2, "num_heads": 3}
    with scoped(generator(0, "transformer")):
        net = VisionTransformer(**sizes, num_classes=0, **options)
        for parameter in net.parameters():  # biases that are not zero
            nn.init.normal_(parameter, std=0.3)
    return net.double()


def images() -> torch.Tensor:
    return torch.randn(5, 3, 16, 16, dtype=torch.float64, generator=generator(0, "images"))


@pytest.mark.parametrize(
    "options", [{}, {"qkv_bias": False}, {"init_values": 0.1}, {"reg_tokens": 2}], ids=str
)
def test_outputs_and_gradients_are_those_of_the_whole_block(options: dict[str, Any]) -> None:
    whole = transformer(**options)
    short = copy.deepcopy(whole)
    assert class_token.specialise(short)
    weights = torch.randn(12, dtype=torch.float64, generator=generator(0, "weights"))
    results = []
    for net in (whole, short):
        output = net(images())
        (output @ weights).square().sum().backward()
        results.append((output, {name: p.grad for name, p in net.named_parameters()}))
    (expected, gradients), (output, shorter) = results
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    assert shorter.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(shorter[name], gradient, rtol=1e-9, atol=1e-9, msg=name)


def test_a_classifier_is_specialised_once_and_travels_to_worker_processes() -> None:
    model = Classifier(transformer(), nn.Linear(12, 3).double())
    expected = model(images())
    names = [name for name, _ in model.named_parameters()]
    assert class_token.specialise(model)
    assert not class_token.specialise(model)
    assert [name for name, _ in model.named_parameters()] == names
    for net in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(net(images()), expected)
        assert type(net.backbone.blocks[-1]) is class_token.ClassTokenBlock


@pytest.mark.parametrize(
    "backbone",
    [
        lambda: nn.Linear(3, 2),
        lambda: transformer(global_pool="avg"),
        lambda: transformer(class_token=False, global_pool="avg"),
        lambda: transformer(qk_norm=True),
        lambda: transformer(attn_drop_rate=0.1),
        lambda: nn.Sequential(transformer()),  # it may read more than the output
    ],
)
def test_other_models_stay_as_they_are(backbone: Any) -> None:
    net = backbone()
    assert not class_token.specialise(net)
    assert not any(isinstance(part, class_token.ClassTokenBlock) for part in net.modules())


def test_a_linearised_backbone_and_one_with_lora_stay_as_they_are() -> None:
    linearised = Classifier(transformer(), nn.Linear(12, 3).double(), linearised=True)
    assert not class_token.specialise(linearised)
    backbone = transformer()
    lora.add(backbone, Stream(0, ("lora",)), rank=2, alpha=2.0, layers="qkv", average="factors")
    assert not class_token.specialise(backbone)
