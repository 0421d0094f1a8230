"""Backbones of somebody's own: where the features of any module come from, and its weights."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import Tensor, nn

import fedlens as fl
from fedlens.config.compose import compose
from fedlens.errors import FedlensError
from fedlens.models.architectures import backbones, blocks, weights
from fedlens.models.architectures.module_features import FeatureModule
from fedlens.registry import backbone as registry

IMAGES = torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16)


@pytest.fixture(autouse=True)
def _rows() -> Iterator[None]:
    before = dict(registry.added)
    yield
    registry.added = before


def created(make: Callable[..., Any], **settings: Any) -> Any:
    registry.added.pop("mine", None)
    fl.backbone(label="mine", name="mine", resolution=16)(make)
    chosen = registry.settings({"name": "mine", **settings}, "backbone")
    return backbones.create(backbones.find(chosen)).eval()


class Net(nn.Module):
    """A convolution, and what the test gives it besides."""

    def __init__(self, returns: Callable[[Tensor], Any] = lambda x: x, **parts: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 5, 4, stride=4)
        self.returns = returns
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, images: Tensor) -> Any:
        return self.returns(self.stem(images))


class WithClassifier(Net):
    def __init__(self, **classifier: nn.Module) -> None:
        super().__init__(**classifier)
        (self.name,) = classifier

    def forward(self, images: Tensor) -> Any:
        return getattr(self, self.name)(self.stem(images).mean((2, 3)))


class Tokens(Net):
    def forward_features(self, images: Tensor) -> Tensor:
        return self.stem(images).flatten(2).transpose(1, 2)


class Pooled(Tokens):
    def forward_head(self, tokens: Tensor, pre_logits: bool = False) -> Tensor:
        assert pre_logits
        return tokens[:, 0]


def assert_features(backbone: nn.Module, expected: Tensor) -> None:
    with torch.no_grad():
        assert torch.allclose(backbone(IMAGES), expected, atol=1e-6)
    assert backbones.width(backbone) == expected.shape[1]


def test_a_map_is_averaged_over_its_places() -> None:
    backbone = created(Net)
    assert_features(backbone, backbone.module.stem(IMAGES).mean((2, 3)))


def test_forward_features_gives_tokens_or_what_forward_head_makes_of_them() -> None:
    backbone = created(lambda: Tokens(head=nn.Linear(5, 7)))
    stem = backbone.module.stem(IMAGES).flatten(2)
    assert_features(backbone, stem.mean(2))
    assert not [name for name, _ in backbone.named_parameters() if "head" in name]
    backbone = created(Pooled)
    assert_features(backbone, backbone.module.stem(IMAGES).flatten(2)[..., 0])


@pytest.mark.parametrize("name", ["fc", "head", "heads", "classifier"])
@pytest.mark.parametrize("deep", [False, True])
def test_a_classifier_is_removed(name: str, deep: bool) -> None:
    linear = nn.Linear(5, 7)
    classifier = nn.Sequential(nn.LayerNorm(5), linear) if deep else linear
    backbone = created(lambda: WithClassifier(**{name: classifier}))
    assert backbones.width(backbone) == 5
    assert backbone.classifier == (f"{name}.1" if deep else name,)
    assert not any(value is linear.weight for value in backbone.parameters())


@pytest.mark.parametrize(
    ("model", "width"), [("resnet18", 512), ("mobilenet_v3_small", 1024), ("convnext_tiny", 768)]
)
def test_models_of_torchvision_lose_their_classifier(model: str, width: int) -> None:
    make = getattr(torchvision.models, model)
    backbone = created(lambda: make(weights=None), resolution=32)
    assert backbones.width(backbone) == width


def test_features_can_be_named() -> None:
    """The pass ends at the submodule, and what follows it is neither trained nor sent."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 5, 4, stride=4), nn.ReLU(), nn.Conv2d(5, 9, 4))

    backbone = created(make, features="1")
    assert_features(backbone, backbone.module[0](IMAGES).relu().mean((2, 3)))
    assert [name for name, _ in backbone.named_parameters()] == ["module.0.weight", "module.0.bias"]
    whole = created(lambda: WithClassifier(fc=nn.Linear(5, 7)), features="output")
    assert backbones.width(whole) == 7
    pico = backbones.find(registry.settings({"name": "vit_pico", "features": "blocks.1"}, "key"))
    assert backbones.width(backbones.create(pico)) == 96


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (lambda: Net(lambda x: {"x": x}), {}, "has no features: for two images it gives a dict"),
        (lambda: Net(lambda x: x.sum()), {}, r"a tensor of shape \[\], not \[2, D\]"),
        (lambda: Net(lambda x: x.flatten(2)), {}, r"a tensor of shape \[2, 5, 16\], not \[2, D\]"),
        (lambda: Net(lambda x: x.argmax(1).flatten(1)), {}, "has no features"),
        (Net, {"features": "steam"}, "has no submodule 'steam': .* one of stem, or to output"),
        (lambda: nn.Linear(3, 4), {}, r"cannot read images of shape \[2, 3, 16, 16\] \(RuntimeE"),
        (lambda: "net", {}, "returned a str: it must return an nn.Module"),
        (lambda: 1 / 0, {}, r"cannot be built \(ZeroDivisionError: division by zero\)"),
    ],
)
def test_a_module_without_features_gets_one_sentence(
    make: Callable[..., Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(FedlensError, match=f"backbone=mine.*{message}") as error:
        created(make, **settings)
    assert "\n" not in str(error.value)


def test_the_seed_decides_the_first_weights_and_the_resolution_is_passed() -> None:
    asked = []

    def make(resolution: int, *, width: int = 4) -> nn.Module:
        asked.append(resolution)
        return nn.Sequential(nn.Conv2d(3, width, resolution), nn.Flatten())

    fl.backbone(label="mine", name="mine")(make)
    row = backbones.find(registry.settings({"name": "mine", "width": 6}, "backbone"))
    first, again, other = (backbones.create(row, resolution=8, seed=seed) for seed in (0, 0, 1))
    assert asked == [8, 8, 8]
    assert backbones.width(first) == 6
    values = [next(one.parameters()) for one in (first, again, other)]
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])
    with pytest.raises(FedlensError, match=r"set backbone\.resolution"):
        backbones.create(row)


def test_own_weights_are_loaded_whole_and_without_the_classifier(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return WithClassifier(fc=nn.Linear(5, 7))

    state = make().state_dict()
    save_file(state, tmp_path / "mine.safetensors")
    backbone = created(make)
    assert isinstance(backbone, FeatureModule)
    row = backbones.find("mine")
    weights.load(backbone, row, weights.find(row, tmp_path))
    assert torch.equal(backbone.module.stem.weight, state["stem.weight"])
    del state["stem.bias"]
    save_file(state, tmp_path / "mine.safetensors")
    with pytest.raises(FedlensError, match=r"does not fit mine: missing stem\.bias"):
        weights.load(backbone, row, tmp_path / "mine.safetensors")


def test_own_modules_are_pretrained_if_a_file_is_named() -> None:
    fl.backbone(label="mine", name="mine", resolution=16)(Net)
    assert compose("centralized", ["backbone=mine"]).backbone.pretrained is False
    named = compose("centralized", ["backbone=mine", "backbone.weights=mine.pth"])
    assert named.backbone.pretrained is True


def test_blocks_of_an_own_module() -> None:
    def make() -> nn.Module:
        layers = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.ReLU()) for _ in range(3))
        return Net(layers=layers, norm=nn.LayerNorm(5))

    backbone = created(make)
    assert blocks.block_paths(backbone) == [f"module.layers.{number}" for number in range(3)]
    assert [number for number, _ in blocks.numbered(backbone)] == [-1, -1, 0, 0, 1, 1, 2, 2, 3, 3]
    with pytest.raises(FedlensError, match="Net has no sequence of blocks"):
        blocks.last_blocks(created(Net), 1)
