"""Which part of a model is trained besides its head: rows that prepare a backbone, in place.

A row leaves gradients on for what is trained. LoRA adds factors to the linear maps (`lora`);
linearised fine-tuning trains all weights of a first-order expansion (`linearised`).
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from torch import nn

from fedlens.models.architectures import blocks
from fedlens.models.trained_parts import lora
from fedlens.registry import Range, trainable
from fedlens.rng import Stream

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)


@trainable(label="full fine-tuning", order=1)
def full(backbone: nn.Module, stream: Stream) -> None:
    """Every weight of the backbone."""
    del stream
    backbone.requires_grad_(True)


@trainable(label="head only", head_only=True, masks=False, order=2)
def head(backbone: nn.Module, stream: Stream) -> None:
    """Nothing of the backbone; without augmentation its features are computed once."""
    del stream
    backbone.requires_grad_(False)


@trainable(label="last {count} blocks", argument="count", order=3)
def last_blocks(
    backbone: nn.Module,
    stream: Stream,
    *,
    count: Annotated[int, Range("[1, 10000]"), "how many blocks, from the end"] = 1,
) -> None:
    """The last blocks and the final norm."""
    del stream
    blocks.last_blocks(backbone, count)


@trainable(
    label="biases and norms",
    paper="Ben Zaken et al., 2022, https://arxiv.org/abs/2106.10199",
    masks=False,
    order=4,
)
def biases_and_norms(backbone: nn.Module, stream: Stream) -> None:
    """Biases, and the scales and shifts of norms; in a ViT about a percent of the weights."""
    del stream
    trained = {id(parameter) for parameter in _biases_and_norms(backbone)}
    for parameter in backbone.parameters():
        parameter.requires_grad_(id(parameter) in trained)


@trainable(
    label="LoRA, rank {rank}",
    paper="Hu et al., 2022, https://arxiv.org/abs/2106.09685",
    name="lora",
    masks=False,
    whole_weights=False,
    order=5,
)
def low_rank(
    backbone: nn.Module,
    stream: Stream,
    *,
    rank: Annotated[int, Range("[1, 100000]"), "r: the product of two factors has this rank"] = 8,
    alpha: Annotated[float, Range("(0, inf)"), "the product is scaled by alpha / rank"] = 16.0,
    layers: Annotated[
        str, "only linear maps whose names contain this text, such as attn; empty: all"
    ] = "",
    average: Annotated[
        Literal["factors", "frozen_a", "products"],
        "what the server averages: both factors, B alone with A frozen (FFA-LoRA), or exactly the "
        "products (FedEx-LoRA)",
    ] = "factors",
) -> None:
    """Low-rank factors on the linear maps, W + (alpha/rank)·B·A with W frozen.

    The mean of products is not the product of means, so averaging both factors is inexact.
    FFA-LoRA (Sun et al., 2024, https://arxiv.org/abs/2403.12313) freezes A, which makes the mean of
    B exact. `products` adds to W what the mean of the products has beyond the product of the
    means, as FedEx-LoRA does (Singhal et al., 2024, https://arxiv.org/abs/2410.09432); clients are
    then sent W in every round, and send the factors alone. Factors are merged into the weights
    when a finished run is loaded.
    """
    lora.add(backbone, stream, rank=rank, alpha=alpha, layers=layers, average=average)


@trainable(
    label="linearised fine-tuning",
    paper="Ortiz-Jimenez et al., 2023, https://arxiv.org/abs/2305.12827",
    linearised=True,
    masks=False,
    whole_weights=False,
    order=6,
)
def linearised(backbone: nn.Module, stream: Stream) -> None:
    """All weights of the expansion f(θ₀) + J(θ₀)·(θ − θ₀) around the pretrained ones.

    The derivative is computed forward, along θ − θ₀; benchmarks/trained_parts.py times a step.
    """
    del stream
    backbone.requires_grad_(True)


def _biases_and_norms(backbone: nn.Module) -> Iterator[nn.Parameter]:
    for module in backbone.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, NORMS) or (name.endswith("bias") and parameter.ndim == 1):
                yield parameter
