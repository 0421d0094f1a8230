"""A backbone cut after its first blocks: f(x) = rest(first(x)), with the same modules.

Where the first blocks are frozen, first(x) is a constant of x: it can be computed once and stored,
and training starts from it. The forward pass itself is used, so any model whose blocks are known
(`blocks`) can be cut; whether the halves give the whole is for `halves_give_the_whole` to check.
Tokens that a deep head reads of the first blocks are carried along, behind those at the cut.
"""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedlens.models.architectures.blocks import block_paths, numbered_tensors
from fedlens.models.architectures.module_features import output_of
from fedlens.models.deep_features import DeepFeatures, Layer, kept_outputs

EMBEDDING = "_pos_embed"  # timm's ViTs add position embeddings in a method, not in a module


@dataclass(frozen=True)
class Cut:
    """After `blocks` of `depth` blocks; `finished` are the modules that have run by then."""

    blocks: int
    depth: int
    last: str  # the path of the last block before the cut
    finished: tuple[str, ...]
    embedded: tuple[str, ...]  # modules that add position embeddings in a method
    tensors: tuple[str, ...]  # the names of all parameters and buffers before the cut

    def first(self, backbone: nn.Module, inputs: Tensor) -> Tensor:
        """The activations at the cut, and behind them the tokens that a head reads before it."""
        layers = self._read_before(backbone)
        with kept_outputs(backbone, [layer.path for layer in layers]) as outputs:
            activations: Tensor = output_of(self.last, backbone, inputs)
        tokens = [token for layer in layers for token in layer.read(outputs[layer.path])]
        return _behind(activations, torch.stack(tokens, 1)) if tokens else activations

    def rest(self, backbone: nn.Module, activations: Tensor) -> Tensor:
        """The features, from the activations at the cut: finished modules pass them on."""
        layers = self._read_before(backbone)
        with _passing(backbone, self), ExitStack() as stack:
            if layers:
                count = sum(layer.count for layer in layers)
                tokens = activations[:, -count:]
                activations = activations[:, :-count].clone()  # as if nothing were behind them
                deep = cast(DeepFeatures, backbone)
                stack.enter_context(deep.knowing(layers, tokens))
            features: Tensor = backbone(activations)
        return features

    def _read_before(self, backbone: nn.Module) -> list[Layer]:
        """The layers before the cut that a head reads."""
        if not isinstance(backbone, DeepFeatures):
            return []
        return backbone.layers_in(self.finished)

    def halves_give_the_whole(self, backbone: nn.Module, inputs: Tensor) -> bool:
        """Whether `rest` of `first` has the bits of the whole forward pass."""
        try:
            features = self.rest(backbone, self.first(backbone, inputs))
        except Exception:  # of any module: the cut does not suit it
            return False
        return torch.equal(features, backbone(inputs))


def frozen_blocks(backbone: nn.Module, trained: Collection[str]) -> int:
    """How many blocks come before the first tensor named in `trained`; −1: it precedes them all."""
    depth = len(block_paths(backbone))
    return min(
        (block for name, block in numbered_tensors(backbone).items() if name in trained),
        default=depth,
    )


def cut(backbone: nn.Module, blocks: int, sample: Tensor) -> Cut | None:
    """The cut after so many blocks; None if those give anything but one tensor.

    `sample` is a batch of inputs, by which the order of the modules is found.
    """
    paths = block_paths(backbone)
    last = paths[blocks - 1]
    finished: list[str] = []
    handles = [
        module.register_forward_hook(lambda module, args, output, path=path: finished.append(path))
        for path, module in backbone.named_modules()
        if path
    ]
    try:
        with torch.no_grad():
            activations: Any = output_of(last, backbone, sample)
    finally:
        for handle in handles:
            handle.remove()
    if not isinstance(activations, Tensor) or len(activations) != len(sample):
        return None
    whole = [one for one in finished if not any(one.startswith(f"{outer}.") for outer in finished)]
    embedded = [path for path, module in backbone.named_modules() if hasattr(module, EMBEDDING)]
    tensors = [name for name, block in numbered_tensors(backbone).items() if block < blocks]
    return Cut(blocks, len(paths), last, tuple(whole), tuple(embedded), tuple(tensors))


def _behind(activations: Tensor, tokens: Tensor) -> Tensor:
    """Both, laid out in memory as the activations are: another layout gives other last bits."""
    if activations.stride(1) < activations.stride(2):
        return torch.cat([activations.mT, tokens.mT], 2).mT
    return torch.cat([activations, tokens], 1)


@contextmanager
def _passing(backbone: nn.Module, cut: Cut) -> Iterator[None]:
    """Meanwhile, finished modules and position embeddings return what they are given."""
    changed = [(backbone.get_submodule(path), "forward") for path in cut.finished]
    changed += [(backbone.get_submodule(path), EMBEDDING) for path in cut.embedded]
    before = [vars(module).get(name) for module, name in changed]
    for module, name in changed:
        setattr(module, name, _unchanged)
    try:
        yield
    finally:
        for (module, name), own in zip(changed, before, strict=True):
            if own is None:
                delattr(module, name)
            else:
                setattr(module, name, own)


def _unchanged(inputs: Any, *rest: Any, **named: Any) -> Any:
    del rest, named
    return inputs
