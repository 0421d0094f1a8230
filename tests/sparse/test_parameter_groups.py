import pytest
import torch
from timm.models.resnet import BasicBlock, ResNet
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from fedlens.errors import FedlensError
from fedlens.models.classifier import Classifier
from fedlens.sparse import parameter_groups

Named = dict[str, torch.Tensor]
PREFIX = "backbone."


@pytest.fixture(scope="module")
def vit() -> Named:
    backbone = VisionTransformer(
        img_size=8,
        patch_size=4,
        embed_dim=12,
        depth=2,
        num_heads=2,
        num_classes=0,
        init_values=0.1,
        reg_tokens=2,
    )
    return dict(Classifier(backbone, nn.Linear(12, 3)).named_parameters())


@pytest.fixture(scope="module")
def resnet() -> Named:
    backbone = ResNet(BasicBlock, (1, 1, 1, 1), num_classes=0, channels=(4, 4, 8, 8))
    return dict(Classifier(backbone, nn.Linear(8, 3)).named_parameters())


BLOCK_WEIGHTS = ["attn.qkv.weight", "attn.proj.weight", "mlp.fc1.weight", "mlp.fc2.weight"]


def test_by_default_the_matrices_and_kernels_of_the_backbone_are_maskable(vit: Named) -> None:
    assert parameter_groups.maskable(vit, prefix=PREFIX) == [
        "backbone.patch_embed.proj.weight",
        *(f"backbone.blocks.{b}.{leaf}" for b in (0, 1) for leaf in BLOCK_WEIGHTS),
    ]


def test_every_option_adds_its_own_and_all_together_leave_out_the_head_alone(vit: Named) -> None:
    base = set(parameter_groups.maskable(vit, prefix=PREFIX))
    biases = set(parameter_groups.maskable(vit, prefix=PREFIX, biases=True)) - base
    norms = set(parameter_groups.maskable(vit, prefix=PREFIX, norms=True)) - base
    embeddings = set(parameter_groups.maskable(vit, prefix=PREFIX, embeddings=True)) - base
    assert embeddings == {"backbone.cls_token", "backbone.reg_token", "backbone.pos_embed"}
    assert biases == {name.replace("weight", "bias") for name in base}
    assert norms == {
        "backbone.norm.weight",
        "backbone.norm.bias",
        *(
            f"backbone.blocks.{b}.{leaf}"
            for b in (0, 1)
            for leaf in (
                *("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"),
                *("ls1.gamma", "ls2.gamma"),
            )
        ),
    }
    everything = parameter_groups.maskable(
        vit, prefix=PREFIX, biases=True, norms=True, embeddings=True
    )
    assert set(everything) == base | biases | norms | embeddings
    assert set(vit) - set(everything) == {"head.weight", "head.bias"}


def test_batch_norms_without_a_telling_name_are_norms(resnet: Named) -> None:
    """downsample.1 is a BatchNorm, downsample.0 a convolution."""
    assert {resnet[name].ndim for name in parameter_groups.maskable(resnet, prefix=PREFIX)} == {4}
    assert set(parameter_groups.maskable(resnet, prefix=PREFIX, biases=True)) == set(
        parameter_groups.maskable(resnet, prefix=PREFIX)
    )
    norms = parameter_groups.maskable(resnet, prefix=PREFIX, norms=True)
    assert "backbone.layer2.0.downsample.1.bias" in norms
    assert set(resnet) - set(norms) == {"head.weight", "head.bias"}
    assert parameter_groups.pieces(
        "backbone.layer2.0.downsample.1.bias", resnet, prefix=PREFIX
    ) == {"norm": slice(None)}


def test_a_model_without_a_backbone_has_nothing_to_mask() -> None:
    cached = Classifier(nn.Identity(), nn.Linear(4, 2))
    with pytest.raises(FedlensError, match="nothing to mask"):
        parameter_groups.maskable(
            dict(cached.named_parameters()), prefix=PREFIX, biases=True, norms=True, embeddings=True
        )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("backbone.patch_embed.proj.weight", "embedding"),
        ("backbone.cls_token", "embedding"),
        ("backbone.reg_token", "embedding"),
        ("backbone.pos_embed", "embedding"),
        ("backbone.norm_pre.weight", "embedding"),
        ("backbone.blocks.3.attn.qkv.weight", "block 3"),
        ("backbone.blocks.11.ls1.gamma", "block 11"),
        ("backbone.norm.weight", "final"),
        ("backbone.fc_norm.bias", "final"),
        ("backbone.head.norm.weight", "final"),
        ("backbone.conv1.weight", "conv1"),
        ("backbone.layer2.0.downsample.1.weight", "layer2.0"),
        ("backbone.blocks.1.0.conv_pw.weight", "blocks.1.0"),
        ("backbone.stages.0.blocks.1.mlp.fc1.weight", "stages.0.blocks.1"),
        ("backbone.stages.1.downsample.1.weight", "stages.1"),
        ("backbone.layers.0.blocks.1.attn.proj.weight", "layers.0.blocks.1"),
    ],
)
def test_the_layer_of_a_name(name: str, expected: str) -> None:
    assert parameter_groups.layer(name, prefix=PREFIX) == expected
    assert parameter_groups.layer(name.removeprefix(PREFIX)) == expected


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("backbone.patch_embed.proj.weight", (8, 3, 4, 4), "patch"),
        ("backbone.patch_embed.norm.weight", (8,), "norm"),
        ("backbone.cls_token", (1, 1, 8), "embedding"),
        ("backbone.blocks.0.attn.relative_position_bias_table", (9, 2), "embedding"),
        ("backbone.blocks.0.attn.proj.weight", (8, 8), "proj"),
        ("backbone.blocks.0.attn.proj.bias", (8,), "proj"),
        ("backbone.blocks.0.attn.q_norm.weight", (8,), "norm"),
        ("backbone.blocks.0.attn.q_bias", (8,), "q"),
        ("backbone.blocks.0.attn.k_proj.weight", (8, 8), "k"),
        ("backbone.cls_attn_blocks.0.attn.v.weight", (8, 8), "v"),
        ("backbone.blocks.0.mlp.fc1.weight", (8, 8), "mlp"),
        ("backbone.blocks.0.mlp_tokens.fc2.bias", (8,), "mlp"),
        ("backbone.blocks.0.ls1.gamma", (8,), "norm"),
        ("backbone.blocks.0.gamma_1", (8,), "norm"),
        ("backbone.layer1.0.conv1.weight", (8, 8, 3, 3), "other"),
        ("backbone.stages.2.blocks.0.attn.qkv.weight", (24, 8), "qkv"),
    ],
)
def test_the_kind_of_a_name(name: str, shape: tuple[int, ...], expected: str) -> None:
    assert parameter_groups.pieces(name, {name: torch.zeros(shape)}, prefix=PREFIX) == {
        expected: slice(None)
    }
    assert expected in parameter_groups.KINDS


@pytest.mark.parametrize("leaf", ["weight", "bias"])
def test_a_fused_qkv_is_three_pieces_by_rows_as_timm_computes_it(vit: Named, leaf: str) -> None:
    found = parameter_groups.pieces(f"backbone.blocks.0.attn.qkv.{leaf}", vit, prefix=PREFIX)
    assert found == {"q": slice(0, 12), "k": slice(12, 24), "v": slice(24, 36)}


def test_without_the_rows_called_v_attention_says_nothing() -> None:
    """Only values reach the output; queries and keys weigh them."""
    backbone = VisionTransformer(
        img_size=8, patch_size=4, embed_dim=12, depth=1, num_heads=2, num_classes=0
    )
    name = "blocks.0.attn.qkv.weight"
    weights = dict(backbone.named_parameters())
    attention = backbone.blocks[0].attn
    tokens = torch.randn(1, 5, 12, generator=torch.Generator().manual_seed(0))
    before = attention(tokens)
    outputs = {}
    for kind, rows in parameter_groups.pieces(name, weights).items():
        whole = weights[name].detach().clone()
        with torch.no_grad():
            weights[name][rows] = 0
            outputs[kind] = attention(tokens)
            weights[name].copy_(whole)
    assert torch.allclose(outputs["v"], attention.proj.bias.expand(1, 5, 12), atol=1e-6)
    assert torch.equal(outputs["q"], outputs["k"])  # either way all tokens weigh alike
    assert not torch.allclose(outputs["q"], outputs["v"])
    assert not torch.allclose(outputs["q"], before)


def test_without_a_prefix_the_head_is_maskable_too(vit: Named) -> None:
    expected = [*parameter_groups.maskable(vit, prefix=PREFIX), "head.weight"]
    assert parameter_groups.maskable(vit) == expected
