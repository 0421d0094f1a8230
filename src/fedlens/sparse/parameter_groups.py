"""Groups of parameters by name and shape: maskable or not, layer, and kind.

A module whose weight has one dimension is a norm or a scale; matrices and kernels are weights; any
other parameter of two or more dimensions is an embedding. A fused qkv is split into its thirds.
"""

import re

from fedlens.errors import FedlensError
from fedlens.params import Params

KINDS = ("patch", "embedding", "q", "k", "v", "qkv", "proj", "mlp", "norm", "other")

# Rows are q, then k, then v in this family (ViT, DeiT, EVA, BEiT, Swin). Other models may order
# them by head, which their names do not show: theirs stay whole, as kind "qkv".
_FUSED = re.compile(r"(layers\.\d+\.)?blocks\.\d+\.attn\.qkv\.")
_ATTENTION = re.compile(r"\battn\.(q|k|v|qkv|proj)(_proj|_bias)?\b")
_MLP = re.compile(r"\bmlp(_\w+)?\.")
_BLOCK = re.compile(r"blocks\.(\d+)\.(?!\d)")
_PLACE = re.compile(r"\w+(\.\d+(\.blocks\.\d+|\.\d+)?)?")
_EMBEDDING = re.compile(r"(patch_embed|pos_embed|norm_pre|\w+_token)\b")
_FINAL = re.compile(r"(norm|fc_norm|head)\b")


def maskable(
    parameters: Params,
    *,
    prefix: str = "",
    biases: bool = False,
    norms: bool = False,
    embeddings: bool = False,
) -> list[str]:
    """Names of the parameters that a mask covers, in the order of `parameters`.

    These are the matrices and kernels whose names start with `prefix`, the patch projection among
    them. Options add `biases` of matrices and kernels; `norms`, which are the gains and biases of
    LayerNorm and BatchNorm, and LayerScale; and `embeddings`, which are class and register tokens,
    position embeddings and tables of position biases.
    """
    wanted = {"weights": True, "biases": biases, "norms": norms, "embeddings": embeddings}
    names = [
        name for name in parameters if name.startswith(prefix) and wanted[group(name, parameters)]
    ]
    if not names:
        place = f" whose name starts with '{prefix}'" if prefix else ""
        raise FedlensError(
            f"There is nothing to mask: no matrix or kernel{place} is trained; unfreeze some, or "
            "train without masks."
        )
    return names


def group(name: str, parameters: Params) -> str:
    """weights, biases, norms or embeddings; `parameters` are all of the model's."""
    module, _, leaf = name.rpartition(".")
    if parameters[name].ndim > 1:
        return "weights" if leaf.endswith("weight") else "embeddings"
    if not leaf.endswith("bias"):
        return "norms"
    beside = parameters.get(f"{module}.weight")
    return "norms" if beside is not None and beside.ndim <= 1 else "biases"


def layer(name: str, *, prefix: str = "") -> str:
    """embedding, block 0, block 1, …, final in a ViT; a place such as layer1.0 in other models.

    `prefix` is the path of the backbone, and is ignored.
    """
    local = _local(name, prefix)
    if _EMBEDDING.match(local):
        return "embedding"
    if block := _BLOCK.match(local):
        return f"block {block[1]}"
    if _FINAL.match(local):
        return "final"
    place = _PLACE.match(local)
    return place[0] if place else local


def pieces(name: str, parameters: Params, *, prefix: str = "") -> dict[str, slice]:
    """The rows of a parameter by kind, one of `KINDS`; a bias has its matrix's kind."""
    local = _local(name, prefix)
    if _FUSED.match(local):
        third = parameters[name].shape[0] // 3
        return {kind: slice(i * third, (i + 1) * third) for i, kind in enumerate("qkv")}
    return {_kind(local, group(name, parameters)): slice(None)}


def _local(name: str, prefix: str) -> str:
    """Without the paths of the backbone and of the module that its features are found in."""
    return name.removeprefix(prefix).removeprefix("module.")


def _kind(local: str, which: str) -> str:
    if which == "norms":
        return "norm"
    if which == "embeddings":
        return "embedding"
    if local.startswith("patch_embed."):
        return "patch"
    if attention := _ATTENTION.search(local):
        return attention[1]
    return "mlp" if _MLP.search(local) else "other"
