"""A convolutional stem: a few small convolutions embed the patches instead of one large one.

Xiao et al., 2021, "Early convolutions help transformers see better" (arXiv:2106.14881). After the
same thousand steps of pretraining, it about doubles the accuracy of ridge on vit_pico's features.
"""

from typing import Any

from timm.layers.patch_embed import PatchEmbed
from torch import nn


class ConvStem(PatchEmbed):
    """timm's patch embedding for patches of 8 px, with three convolutions for its one."""

    def __init__(self, *, patch_size: int, embed_dim: int, **rest: Any) -> None:
        if patch_size != 8:
            raise ValueError(
                f"the stem halves the image three times: patches of 8, not {patch_size}"
            )
        super().__init__(patch_size=patch_size, embed_dim=embed_dim, **rest)
        quarter, half = embed_dim // 4, embed_dim // 2
        self.proj = nn.Sequential(  # type: ignore[assignment]
            nn.Conv2d(3, quarter, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(quarter, half, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(half, embed_dim, 2, stride=2),
        )
