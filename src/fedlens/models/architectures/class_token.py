"""The last block of a vision transformer for its class token alone, where only that one is read.

With x̂ = norm(x) and the token's query q, scores q·(W_K x̂_j) = (W_Kᵀq)·x̂_j and the mixed value
Σ a_j W_V x̂_j = W_V Σ a_j x̂_j: one row a product instead of one a token, equal up to rounding.
"""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers.attention import Attention
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from fedlens.models.architectures.onednn import OneDnnLinear
from fedlens.models.classifier import Classifier


class ClassTokenBlock(Block):
    """A block that returns its first token only, as a sequence of one."""

    def forward(
        self, x: torch.Tensor, attn_mask: torch.Tensor | None = None, is_causal: bool = False
    ) -> torch.Tensor:
        if attn_mask is not None or is_causal:
            raise ValueError("the class token alone attends to all tokens, without a mask")
        token = x[:, 0]
        token = token + self.drop_path1(self.ls1(self._attention(self.norm1(x))))
        token = token + self.drop_path2(self.ls2(self.mlp(self.norm2(token))))
        out: torch.Tensor = token[:, None]
        return out

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        """Of the first token to all. A key's bias adds the same to all scores, so it has no say."""
        attention: Any = self.attn
        heads, size, width = attention.num_heads, attention.head_dim, attention.attn_dim
        query_w, key_w, value_w = attention.qkv.weight.split(width)
        query_b, _, value_b = (
            (None, None, None) if attention.qkv.bias is None else attention.qkv.bias.split(width)
        )
        query = F.linear(x[:, 0], query_w, query_b) * attention.scale
        by_head = query.view(-1, heads, size).transpose(0, 1)  # [heads, batch, size]
        directions = torch.bmm(by_head, key_w.view(heads, size, -1)).transpose(0, 1)
        shares = torch.bmm(directions, x.transpose(1, 2)).softmax(-1)  # [batch, heads, tokens]
        mixed = torch.bmm(shares, x).transpose(0, 1)  # [heads, batch, dim]
        value = torch.bmm(mixed, value_w.view(heads, size, -1).transpose(1, 2))
        value = value.transpose(0, 1).reshape(-1, width)
        out: torch.Tensor = attention.proj(value if value_b is None else value + value_b)
        return out


def applies(backbone: nn.Module) -> bool:
    """Whether the backbone is a plain vision transformer that reads only its class token."""
    if type(backbone) is not VisionTransformer or not len(backbone.blocks):
        return False
    block: Any = backbone.blocks[-1]
    if type(block) is not Block or type(block.attn) is not Attention:
        return False
    vit: Any = backbone
    attention: Any = block.attn
    plain = (attention.q_norm, attention.k_norm, attention.norm)
    return bool(
        vit.global_pool == "token"
        and vit.attn_pool is None
        and vit.num_prefix_tokens > 0
        and type(attention.qkv) in (nn.Linear, OneDnnLinear)
        and attention.gate is None
        and all(type(module) is nn.Identity for module in plain)
        and not attention.attn_drop.p
        and not attention.proj_drop.p
    )


def specialise(model: nn.Module) -> bool:
    """Computes the class token alone in the last block, in place; whether that was possible.

    `model` is a vision transformer or a classifier on one. Parameters and their names stay.
    """
    backbone: Any = model.backbone if isinstance(model, Classifier) and not model.origin else model
    if not applies(backbone):
        return False
    backbone.blocks[-1].__class__ = ClassTokenBlock
    return True
