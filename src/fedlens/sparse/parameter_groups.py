"""What a parameter is, told by name and shape: what can be masked, in which layer, of what kind.

A module whose weight has one dimension is a norm or a scale; matrices and kernels are weights; any
other parameter of two dimensions or more is an embedding. Kinds cut a fused qkv into its thirds.
"""

import re

from fedlens.errors import FedlensError
from fedlens.params import Params

BACKBONE = "backbone."
KINDS = ("patch", "embedding", "q", "k", "v", "qkv", "proj", "mlp", "norm", "other")

# Rows are q, then k, then v in this family (ViT, DeiT, EVA, BEiT, Swin). Others may go head by
# head, which a name does not tell: theirs stay whole, as kind "qkv".
_FUSED = re.compile(r"(layers\.\d+\.)?blocks\.\d+\.attn\.qkv\.")
_ATTENTION = re.compile(r"\battn\.(q|k|v|qkv|proj)(_proj|_bias)?\b")
_MLP = re.compile(r"\bmlp(_\w+)?\.")
_BLOCK = re.compile(r"blocks\.(\d+)\.(?!\d)")
_PLACE = re.compile(r"\w+(\.\d+(\.blocks\.\d+|\.\d+)?)?")
_EMBEDDING = re.compile(r"(patch_embed|pos_embed|norm_pre|\w+_token)\b")
_FINAL = re.compile(r"(norm|fc_norm|head)\b")


def maskable(
    parameters: Params, *, biases: bool = False, norms: bool = False, embeddings: bool = False
) -> list[str]:
    """Names, in the order given, of what a mask is drawn over; never the head's.

    Always the backbone's matrices and kernels, the patch projection among them. By option:
    `biases` of matrices and kernels; `norms`, which are the gains and the biases of LayerNorm and
    BatchNorm, and LayerScale; `embeddings`, which are class and register tokens, position
    embeddings and tables of position biases.
    """
    wanted = {"weights": True, "biases": biases, "norms": norms, "embeddings": embeddings}
    found = [
        name for name in parameters if name.startswith(BACKBONE) and wanted[group(name, parameters)]
    ]
    if not found:
        raise FedlensError(
            "There is nothing to mask: the model has no backbone weights; train the backbone "
            "rather than a head on cached features."
        )
    return found


def group(name: str, parameters: Params) -> str:
    """weights, biases, norms or embeddings; `parameters` are those beside it."""
    module, _, leaf = name.rpartition(".")
    if parameters[name].ndim > 1:
        return "weights" if leaf.endswith("weight") else "embeddings"
    if not leaf.endswith("bias"):
        return "norms"
    beside = parameters.get(f"{module}.weight")
    return "norms" if beside is not None and beside.ndim <= 1 else "biases"


def layer(name: str) -> str:
    """embedding, block 0, block 1, …, final; elsewhere than in a ViT, a place such as layer1.0."""
    local = name.removeprefix(BACKBONE)
    if _EMBEDDING.match(local):
        return "embedding"
    if found := _BLOCK.match(local):
        return f"block {found[1]}"
    if _FINAL.match(local):
        return "final"
    place = _PLACE.match(local)
    return place[0] if place else local


def pieces(name: str, parameters: Params) -> dict[str, slice]:
    """Which rows of a parameter are of which of the `KINDS`; a bias is of its matrix's kind."""
    local = name.removeprefix(BACKBONE)
    if _FUSED.match(local):
        third = parameters[name].shape[0] // 3
        return {kind: slice(i * third, (i + 1) * third) for i, kind in enumerate("qkv")}
    return {_kind(local, group(name, parameters)): slice(None)}


def _kind(local: str, which: str) -> str:
    if which == "norms":
        return "norm"
    if which == "embeddings":
        return "embedding"
    if local.startswith("patch_embed."):
        return "patch"
    if found := _ATTENTION.search(local):
        return found[1]
    return "mlp" if _MLP.search(local) else "other"
