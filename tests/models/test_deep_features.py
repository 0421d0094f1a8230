"""Backbones whose output has inner layers in it."""

import copy
import pickle

import pytest
import timm
import torch
from torch import nn

from fedlens.errors import FedlensError
from fedlens.models.architectures import backbones
from fedlens.models.architectures.class_token import specialise
from fedlens.models.architectures.module_features import with_features
from fedlens.models.classifier import Classifier
from fedlens.models.deep_features import Reading, deepen

SIZE = 32


def vit(**arguments: object) -> nn.Module:
    settings = {"patch_size": 16, "embed_dim": 12, "depth": 3, "num_heads": 2, **arguments}
    torch.manual_seed(0)
    return timm.models.VisionTransformer(img_size=SIZE, num_classes=0, **settings).eval()


def images(count: int = 2) -> torch.Tensor:
    return torch.randn(count, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))


def by_hand(net: nn.Module, x: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The outputs of all blocks and of the final norm, by the model's own parts."""
    x = net.norm_pre(net.patch_drop(net._pos_embed(net.patch_embed(x))))
    outputs = []
    for block in net.blocks:
        x = block(x)
        outputs.append(x)
    return outputs, net.norm(x)


def test_tokens_are_those_of_the_blocks_from_the_last_one_back() -> None:
    net = vit()
    (_, second, third), normed = by_hand(net, images())
    own = net(images())
    deepen(net, Reading(2, "both"), resolution=SIZE)
    expected = [
        own,
        normed[:, 1:].mean(1),
        third[:, 0],
        third[:, 1:].mean(1),
        second[:, 0],
        second[:, 1:].mean(1),
    ]
    assert torch.equal(net(images()), torch.cat(expected, 1))
    assert backbones.width(net) == 6 * 12


@pytest.mark.parametrize(
    ("reading", "width"),
    [
        (Reading(1, "class"), 24),
        (Reading(1, "mean"), 36),
        (Reading(0, "both"), 24),
        (Reading(3, "both"), 96),
        (Reading(2, "both", random_features=50), 50),
        (Reading(0, "class", random_features=7), 7),
    ],
)
def test_the_width_is_known(reading: Reading, width: int) -> None:
    net = vit()
    deepen(net, reading, resolution=SIZE)
    assert backbones.width(net) == width == net(images()).shape[1]


def test_a_plain_reading_changes_nothing() -> None:
    net = vit()
    kind = type(net)
    deepen(net, Reading(seed=3), resolution=SIZE)
    assert type(net) is kind


def test_names_stay_and_random_maps_are_not_stored() -> None:
    net, plain = vit(), vit()
    deepen(net, Reading(2, "both", random_features=5), resolution=SIZE)
    assert list(net.state_dict()) == list(plain.state_dict())


def test_copies_and_pickles_give_the_same() -> None:
    net = vit()
    deepen(net, Reading(2, "both", random_features=5), resolution=SIZE)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(other(images()), net(images()))
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.blocks[2].mlp.fc2.bias.add_(1)
    assert not torch.equal(other(images()), net(images()))


def test_random_features_depend_on_the_seed_alone() -> None:
    one, same, other = vit(), vit(), vit()
    for net, seed in ((one, 1), (same, 1), (other, 2)):
        deepen(net, Reading(1, "both", random_features=9, seed=seed), resolution=SIZE)
    assert torch.equal(one(images()), same(images()))
    assert not torch.equal(one(images()), other(images()))
    assert (one(images()) >= 0).all()


def test_gradients_reach_every_block_directly() -> None:
    net = vit()
    deepen(net, Reading(3, "both"), resolution=SIZE)
    net(images())[:, -24:].sum().backward()  # the tokens of the first block
    assert net.blocks[0].mlp.fc2.weight.grad.any()
    assert not net.blocks[1].mlp.fc2.weight.grad.any()


@pytest.mark.parametrize("tokens", ["class", "mean", "both"])
def test_a_backbone_without_class_token_has_means_only(tokens: str) -> None:
    net = vit(class_token=False, global_pool="avg")
    (_, _, third), _ = by_hand(net, images())
    own = net(images())
    deepen(net, Reading(1, tokens), resolution=SIZE)
    assert torch.equal(net(images()), torch.cat([own, third.mean(1)], 1))


def test_registers_are_no_part_of_the_mean() -> None:
    net = vit(reg_tokens=2)
    (_, _, third), normed = by_hand(net, images())
    own = net(images())
    deepen(net, Reading(1, "both"), resolution=SIZE)
    parts = [own, normed[:, 3:].mean(1), third[:, 0], third[:, 3:].mean(1)]
    assert torch.equal(net(images()), torch.cat(parts, 1))


@pytest.mark.parametrize(
    ("name", "width"),
    [("resnet10t", (512, 512, 256)), ("convnext_atto", (320, 320, 320))],
)
def test_feature_maps_are_averaged_over_their_places(name: str, width: tuple[int, ...]) -> None:
    net = timm.create_model(name, num_classes=0).eval()
    deepen(net, Reading(2, "both"), resolution=SIZE)
    assert [part.shape[1] for part in net.parts(images())] == list(width)


def test_maps_with_channels_last_are_averaged_over_their_places() -> None:
    net = timm.create_model(
        "swin_tiny_patch4_window7_224", num_classes=0, img_size=64, window_size=2,
        embed_dim=8, depths=(1, 1), num_heads=(1, 1),
    ).eval()  # fmt: skip
    deepen(net, Reading(2), resolution=64)
    assert [part.shape[1] for part in net.parts(torch.randn(1, 3, 64, 64))] == [16, 16, 8]


def test_somebodys_module_may_be_read_too() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 4, 8, 8)
            self.blocks = nn.Sequential(nn.Conv2d(4, 6, 1), nn.Conv2d(6, 8, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks(self.stem(x)).mean((2, 3))

    net = with_features(Own(), name="own", resolution=SIZE, features=None)
    deepen(net, Reading(2), resolution=SIZE)
    assert [part.shape[1] for part in net.parts(images())] == [8, 8, 6]
    assert backbones.width(net) == 22


def test_more_layers_than_blocks_are_refused() -> None:
    with pytest.raises(FedlensError, match=r"head.layers=4 must be in 0 to 3"):
        deepen(vit(), Reading(4), resolution=SIZE)


def test_a_layer_without_tokens_is_refused() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
            return x * self.weight, None

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Pair()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[0](x)[0].mean((2, 3))

    with pytest.raises(FedlensError, match=r"blocks.0 gives a tuple, which has no tokens"):
        deepen(Net(), Reading(1), resolution=SIZE)


def test_the_shorter_last_block_is_not_taken() -> None:
    net = vit()
    deepen(net, Reading(1, "both"), resolution=SIZE)
    assert not specialise(Classifier(net, nn.Linear(48, 2)))
