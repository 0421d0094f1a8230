"""A backbone whose output has inner layers in it, for heads that read more than its last one.

The output becomes [f(x), the tokens of the last N blocks], where a block's tokens are its class
token, the mean of the others, or both; of feature maps, the mean over their places. Evci et al.,
2022, https://arxiv.org/abs/2201.03529. Parameters and their names stay.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlens import rng
from fedlens.errors import FedlensError
from fedlens.models.architectures.blocks import block_paths

Tokens = Literal["class", "mean", "both"]

NORM = "norm"  # the final norm of timm's ViTs
CHANNELS_LAST = "NHWC"  # how timm marks models with such feature maps


@dataclass(frozen=True)
class Reading:
    """What a head reads: the backbone's output, and these tokens of its last blocks.

    With `random_features`, it reads so many random features of them instead.
    """

    layers: int = 0
    tokens: Tokens = "class"
    random_features: int | None = None
    seed: int = 0  # of the random features

    @property
    def plain(self) -> bool:
        """Whether the backbone's output is all."""
        return self == Reading(seed=self.seed)

    @property
    def key(self) -> dict[str, Any]:
        """The part of a cache's key that says what is read; empty where the output is all."""
        return {} if self.plain else {"reading": self.content}

    def deeper(self, backbone: nn.Module) -> Iterator["Reading"]:
        """Readings of more layers: what this one reads comes first in what they read."""
        if self.random_features is not None:
            return
        try:
            depth = len(block_paths(backbone))
        except FedlensError:  # it has no blocks, so there are none to read
            return
        for tokens in get_args(Tokens) if self.plain else (self.tokens,):
            for layers in range(self.layers + 1, depth + 1):
                yield Reading(layers, tokens)

    @property
    def content(self) -> dict[str, Any]:
        """All that decides what is read, as JSON."""
        seed = {} if self.random_features is None else {"seed": self.seed}
        read = {"layers": self.layers, "tokens": self.tokens}
        return {**read, "random_features": self.random_features, **seed}


@dataclass(frozen=True)
class Layer:
    """One inner layer, and which of its tokens are read."""

    path: str
    class_token: bool
    mean: bool
    first: int  # the first token that is not a class token or a register
    channels_last: bool

    @property
    def count(self) -> int:
        """Of the tokens that are read, where the layer gives tokens."""
        return self.class_token + self.mean

    def read(self, output: Any) -> list[Tensor]:
        if not isinstance(output, Tensor) or output.ndim not in (2, 3, 4):
            kind = f"a tensor of shape {list(output.shape)}" if isinstance(output, Tensor) else ""
            raise FedlensError(
                f"The layer {self.path} gives {kind or f'a {type(output).__name__}'}, which has no "
                "tokens: set head.layers=0."
            )
        if output.ndim == 2:
            return [output]
        if output.ndim == 4:
            return [output.mean((1, 2) if self.channels_last else (2, 3))]
        parts = [output[:, 0]] if self.class_token else []
        return parts + ([output[:, self.first :].mean(1)] if self.mean else [])


class DeepFeatures(nn.Module):
    """Mixed into a backbone's class: its `forward` adds the tokens of `deep_layers`."""

    deep_layers: tuple[Layer, ...]
    widths: tuple[int, ...]  # of what a head reads on 0, 1, … blocks: the first so many features
    random_map: Tensor | None  # [features, tokens]
    given: Mapping[str, list[Tensor]] = {}  # tokens of layers that are known, by path

    def forward(self, inputs: Tensor) -> Tensor:
        parts = self.parts(inputs)
        if self.random_map is None:
            return torch.cat(parts, 1)
        # Layers differ in scale; each is normalised by itself, so that no statistics are needed.
        normalised = torch.cat([F.layer_norm(part, part.shape[1:]) for part in parts], 1)
        return F.linear(normalised, self.random_map.to(normalised.dtype)).relu()

    def parts(self, inputs: Tensor) -> list[Tensor]:
        """The backbone's own output, then every layer's tokens in the order of `deep_layers`."""
        wanted = [layer.path for layer in self.deep_layers if layer.path not in self.given]
        with kept_outputs(self, wanted) as outputs:
            parts = [super().forward(inputs)]
        for layer in self.deep_layers:
            parts += self.given.get(layer.path) or layer.read(outputs[layer.path])
        return parts

    def layers_in(self, paths: Collection[str]) -> list[Layer]:
        """The inner layers at these paths, in their order."""
        return [layer for layer in self.deep_layers if layer.path in paths]

    @contextmanager
    def knowing(self, layers: Sequence[Layer], tokens: Tensor) -> Iterator[None]:
        """Meanwhile, the tokens [B, N, D] of these layers are not read but known."""
        each = iter(tokens.unbind(1))
        self.given = {layer.path: [next(each) for _ in range(layer.count)] for layer in layers}
        try:
            yield
        finally:
            del self.given

    def __reduce__(self) -> tuple[Any, ...]:
        """The class is made at run time, so copies and pickles need to know how it is made."""
        return _empty, (type(self).__bases__[1],), self.__dict__


def deepen(backbone: nn.Module, reading: Reading, *, resolution: int) -> None:
    """Makes the backbone give what a head with this `reading` reads, in place.

    Random features are relu(R·z) with R drawn from the seed, where z has every token normalised to
    mean 0 and variance 1.
    """
    if reading.plain:
        return
    layers = _layers(backbone, reading)
    module: Any = backbone
    module.__class__ = _deep(type(backbone))
    module.deep_layers = layers
    module.register_buffer("random_map", None, persistent=False)
    module.widths = _widths(module, reading, resolution)
    width = module.widths[-1]
    if reading.random_features is not None:
        shape = (reading.random_features, width)
        draw = rng.generator(reading.seed, "random features")
        random_map = torch.randn(shape, generator=draw) / width**0.5
        device = next(backbone.parameters()).device
        module.register_buffer("random_map", random_map.to(device), persistent=False)
        width = reading.random_features
    module.head_hidden_size = width  # timm's name for the width of what a classifier reads


def _layers(backbone: nn.Module, reading: Reading) -> tuple[Layer, ...]:
    prefix, inner = _unwrapped(backbone)
    tokens = int(getattr(inner, "num_prefix_tokens", 0))
    has_class_token = tokens > 0 and getattr(inner, "has_class_token", True)
    channels_last = str(getattr(inner, "output_fmt", "")).endswith(CHANNELS_LAST)

    def layer(path: str, *, class_token: bool) -> Layer:
        mean = reading.tokens != "class" or not has_class_token
        return Layer(path, class_token and has_class_token, mean, tokens, channels_last)

    found = []
    if has_class_token and reading.tokens != "class" and _reads_class_token(inner):
        found.append(layer(prefix + NORM, class_token=False))  # the output is its class token
    if reading.layers:
        paths = block_paths(backbone)
        if reading.layers > len(paths):
            raise FedlensError(
                f"head.layers={reading.layers} must be in 0 to {len(paths)}, the number of blocks."
            )
        asked = reading.tokens != "mean"
        found += [layer(path, class_token=asked) for path in reversed(paths[-reading.layers :])]
    return tuple(found)


def _unwrapped(backbone: nn.Module) -> tuple[str, Any]:
    """The module that somebody's features are taken from, and the beginning of its paths."""
    prefix, inner = "", backbone
    while isinstance(within := getattr(inner, "module", None), nn.Module):
        prefix, inner = f"{prefix}module.", within
    return prefix, inner


def _reads_class_token(inner: Any) -> bool:
    return getattr(inner, "global_pool", None) == "token" and isinstance(
        getattr(inner, NORM, None), nn.Module
    )


@torch.no_grad()
def _widths(backbone: DeepFeatures, reading: Reading, resolution: int) -> tuple[int, ...]:
    """`DeepFeatures.widths`, by a forward pass of one black image."""
    device = next(backbone.parameters()).device
    training = backbone.training
    backbone.eval()
    try:
        black = torch.zeros(1, 3, resolution, resolution, device=device)
        parts = [part.shape[1] for part in backbone.parts(black)]
    finally:
        backbone.train(training)
    outer = 1 + len(backbone.deep_layers) - reading.layers  # the output, and the norm's mean token
    each = (len(parts) - outer) // max(1, reading.layers)
    return tuple(sum(parts[: outer + each * count]) for count in range(reading.layers + 1))


@contextmanager
def kept_outputs(module: nn.Module, paths: Collection[str]) -> Iterator[dict[str, Any]]:
    """Path → the output of the submodule, of all that run meanwhile."""
    outputs: dict[str, Any] = {}
    handles = [
        module.get_submodule(path).register_forward_hook(_keep(outputs, path)) for path in paths
    ]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _keep(outputs: dict[str, Any], path: str) -> Callable[..., None]:
    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        del module, inputs
        outputs[path] = output

    return keep


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def _deep(kind: type[nn.Module]) -> type[nn.Module]:
    if kind not in _CLASSES:
        name = f"Deep{kind.__name__}"
        _CLASSES[kind] = type(name, (DeepFeatures, kind), {"__module__": __name__})
    return _CLASSES[kind]


def _empty(kind: type[nn.Module]) -> nn.Module:
    made: nn.Module = _deep(kind).__new__(_deep(kind))
    return made
