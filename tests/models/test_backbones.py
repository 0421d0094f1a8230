from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from fedlens.errors import FedlensError
from fedlens.models.architectures import backbones, blocks
from fedlens.registry import backbone as registry

PICO = backbones.find("vit_pico")
DEPTH = 3
SIZE: dict[str, Any] = {"patch_size": 4, "embed_dim": 12, "depth": DEPTH, "num_heads": 3}
EMBEDDINGS = {"pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias"}


@pytest.fixture(params=["class token", "average"])
def small(request: pytest.FixtureRequest) -> tuple[nn.Module, set[str], str]:
    """A ViT of either kind, the names of its embeddings, and that of its final norm."""
    average = {"class_token": False, "global_pool": "avg"} if request.param == "average" else {}
    made = VisionTransformer(num_classes=0, img_size=32, **SIZE, **average)
    embeddings = EMBEDDINGS if average else {*EMBEDDINGS, "cls_token"}
    return made, embeddings, "fc_norm" if average else "norm"


def trained(backbone: nn.Module) -> set[str]:
    return {name for name, value in backbone.named_parameters() if value.requires_grad}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in registry.names if name != "timm"])
def test_rows_build_what_they_say(name: str) -> None:
    row = backbones.find(name)
    backbone = backbones.create(row, resolution=2 * row.patch).eval()
    with torch.inference_mode():
        features = backbone(torch.zeros(2, 3, 2 * row.patch, 2 * row.patch))
    assert features.shape == (2, backbones.width(backbone))
    assert row.resolution
    assert row.resolution % row.patch == 0
    assert row.files or row.name == "vit_pico"
    if row.repository:
        derived = backbones.find(row.repository.replace("timm/", "timm:"))
        assert (derived.mean, derived.std, derived.patch) == (row.mean, row.std, row.patch)
        assert derived.repository == row.repository


def test_vit_pico_is_small() -> None:
    backbone = backbones.create(PICO)
    assert sum(value.numel() for value in backbone.parameters()) < 1_000_000


def test_creation_is_addressed_and_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    first, again, other = (backbones.create(PICO, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    name = "blocks.0.attn.qkv.weight"
    assert torch.equal(first.state_dict()[name], again.state_dict()[name])
    assert not torch.equal(first.state_dict()[name], other.state_dict()[name])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dino_vit16", "did you mean 'dino_vits16'?"),
        ("xyzzy", "choose from dino_vits16, dinov2_vits14, timm:MODEL, vit_pico, vit_tiny."),
        ("resnet18", "backbone=resnet18 is unknown: did you mean 'timm:resnet18'?"),
        ("resnet18.a1_in1k", "did you mean 'timm:resnet18.a1_in1k'?"),
        ("convnext_atoo", "did you mean 'timm:convnext_atto'?"),
        ("timm:vit_tinny_patch16_224", "did you mean 'timm:vit_tiny_patch16_224'?"),
        (
            "timm:vit_tiny_patch16_224.augreg",
            "did you mean 'timm:vit_tiny_patch16_224.augreg_in21k",
        ),
        ("timm:xyzzy", "timm.list_models()"),
    ],
)
def test_unknown_names_get_a_suggestion(name: str, message: str) -> None:
    with pytest.raises(FedlensError) as error:
        backbones.find(name)
    assert message in str(error.value)


def test_any_timm_model_makes_a_row() -> None:
    before = torch.get_rng_state()
    row = backbones.find("timm:vit_tiny_patch16_224")
    assert row.name == "timm:vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    assert row.files[0] == backbones.find("vit_tiny").files[0]
    convolutional = backbones.find("timm:resnet10t")
    assert convolutional.patch == 1
    assert convolutional.classifier == ("fc",)
    backbone = backbones.create(convolutional, resolution=33).eval()
    with torch.inference_mode():
        assert backbone(torch.zeros(1, 3, 33, 33)).shape == (1, backbones.width(backbone))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("name", "resolution", "message"),
    [
        ("dino_vits16", 100, "96 or 112"),
        ("dinov2_vits14", 96, "84 or 98"),
        ("vit_tiny", 7, "choose 16."),
        ("vit_tiny", 0, "choose 16."),
    ],
)
def test_a_resolution_must_fit_the_patches(name: str, resolution: int, message: str) -> None:
    with pytest.raises(FedlensError) as error:
        backbones.create(backbones.find(name), resolution=resolution)
    assert message in str(error.value)


@pytest.mark.parametrize("n", range(DEPTH + 1))
def test_freeze_blocks_freezes_embeddings_and_first_blocks(
    small: tuple[nn.Module, set[str], str], n: int
) -> None:
    backbone, embeddings, _ = small
    names = trained(backbone)
    blocks.freeze_blocks(backbone, n)
    first = {name for name in names if name.startswith(tuple(f"blocks.{i}." for i in range(n)))}
    assert embeddings < names
    assert names - trained(backbone) == (first | embeddings if n else set())


@pytest.mark.parametrize("n", range(1, DEPTH + 1))
def test_last_blocks_trains_them_and_the_norm(
    small: tuple[nn.Module, set[str], str], n: int
) -> None:
    backbone, _, norm = small
    names = trained(backbone)
    blocks.last_blocks(backbone, n)
    kept = tuple(f"blocks.{i}." for i in range(DEPTH - n, DEPTH))
    last = {name for name in names if name.startswith(kept)}
    assert trained(backbone) == last | {f"{norm}.weight", f"{norm}.bias"}


def test_freezing_more_than_there_is_is_refused(small: tuple[nn.Module, set[str], str]) -> None:
    backbone, _, _ = small
    for refuse in (blocks.freeze_blocks, blocks.last_blocks):
        for n in (-1, DEPTH + 1):
            with pytest.raises(FedlensError, match=f"{DEPTH}, the number of blocks"):
                refuse(backbone, n)
        with pytest.raises(FedlensError, match="no sequence of blocks"):
            refuse(nn.Linear(2, 2), 1)
    with pytest.raises(FedlensError, match="last_blocks:0"):
        blocks.last_blocks(backbone, 0)
    blocks.freeze_blocks(nn.Linear(2, 2), 0)
    assert trained(backbone) == {name for name, _ in backbone.named_parameters()}
