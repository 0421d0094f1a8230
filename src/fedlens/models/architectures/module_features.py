"""Features [B, D] of any `nn.Module`: found, or taken from a submodule that is named.

A module that has `reset_classifier` (as in timm) loses its classifier by it. Another one loses the
linear layer called `fc`, `head`, `heads` or `classifier`, or the last layer of a Sequential of that
name. Features are then what the module's `forward_features` gives (through
`forward_head(…, pre_logits=True)` if there is one), else its output. Maps [B, D, H, W] are averaged
over their places, and tokens [B, N, D] of `forward_features` or of a named submodule over N.
"""

import logging
from typing import Any

import torch
from torch import Tensor, nn

from fedlens.errors import FedlensError

OUTPUT, FORWARD_FEATURES = "output", "forward_features"
CLASSIFIERS = ("fc", "head", "heads", "classifier")

log = logging.getLogger(__name__)


class FeatureModule(nn.Module):
    """A module whose `forward` returns its features; `source` says where they come from."""

    def __init__(self, module: nn.Module, source: str, classifier: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.module = module
        self.source = source
        self.classifier = classifier  # paths of layers that were removed; weight files have them
        self.num_features = 0

    def forward(self, images: Tensor) -> Tensor:
        output: Tensor = self.unpooled(images)
        if output.ndim == 4:
            return output.mean((2, 3))
        return output.mean(1) if output.ndim == 3 else output

    def unpooled(self, images: Tensor) -> Any:
        module: Any = self.module
        if self.source == OUTPUT:
            return module(images)
        if self.source == FORWARD_FEATURES:
            features = module.forward_features(images)
            if hasattr(module, "forward_head"):
                return module.forward_head(features, pre_logits=True)
            return features
        return output_of(self.source, self.module, images)


def output_of(path: str, module: nn.Module, inputs: Tensor) -> Any:
    """What the submodule at `path` gives in the module's forward pass, which ends there."""
    submodule = module.get_submodule(path)
    handle = submodule.register_forward_hook(_stop)
    try:
        module(inputs)
    except _Reached as reached:
        if reached.submodule is not submodule:  # of a call around this one
            raise
        return reached.output
    finally:
        handle.remove()
    raise FedlensError(f"'{path}' is not part of the forward pass: name another submodule.")


class _Reached(Exception):
    def __init__(self, submodule: nn.Module, output: Any) -> None:
        self.submodule = submodule
        self.output = output


def _stop(submodule: nn.Module, args: Any, output: Any) -> None:
    del args
    raise _Reached(submodule, output)


def with_features(
    module: nn.Module, *, name: str, resolution: int, features: str | None
) -> FeatureModule:
    """The module as a backbone; `name` is what errors call it.

    `features` is "output", the path of a submodule, or None: found as said above.
    """
    if features is None:
        removed = _remove_classifier(module, name)
        own = hasattr(module, FORWARD_FEATURES) and not hasattr(module, "reset_classifier")
        made = FeatureModule(module, FORWARD_FEATURES if own else OUTPUT, removed)
    else:
        paths = [path for path, _ in module.named_modules() if path]
        if features != OUTPUT and features not in paths:
            raise FedlensError(
                f"backbone={name} has no submodule '{features}': set backbone.features to one of "
                f"{', '.join(paths[:10])}{', …' if len(paths) > 10 else ''}, or to {OUTPUT}."
            )
        made = FeatureModule(module, features)
    made.num_features = _width(made, name, resolution)
    if made.source not in (OUTPUT, FORWARD_FEATURES):
        _remove_unused(made, resolution)
    return made


def _remove_classifier(module: nn.Module, name: str) -> tuple[str, ...]:
    """Removes the classifier, if there is one, and returns its path."""
    reset: Any = getattr(module, "reset_classifier", None)
    before = {path for path, _ in module.named_parameters()}
    if callable(reset):
        reset(0)
    else:
        holder: nn.Module = module
        last = next((one for one in CLASSIFIERS if hasattr(module, one)), None)
        if last is not None and isinstance(inner := getattr(module, last), nn.Sequential):
            holder, last = inner, next(reversed(inner._modules), None)
        if last is not None and isinstance(getattr(holder, last), nn.Linear):
            setattr(holder, last, nn.Identity())
    after = {path for path, _ in module.named_parameters()}
    removed = tuple(sorted({path.rpartition(".")[0] for path in before - after}))
    if removed:
        log.info("backbone %s: its classifier (%s) is removed", name, ", ".join(removed))
    return removed


def _width(made: FeatureModule, name: str, resolution: int) -> int:
    """D, by a forward pass of two black images; refuses what is not [B, D]."""
    was_training = made.training
    try:
        with torch.no_grad():
            output = made.eval().unpooled(torch.zeros(2, 3, resolution, resolution))
    except FedlensError:
        raise
    except Exception as error:  # of any module: it says what it likes
        raise FedlensError(
            f"backbone={name} cannot read images of shape [2, 3, {resolution}, {resolution}] "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]}): change "
            "backbone.resolution or the module."
        ) from error
    finally:
        made.train(was_training)
    ranks = (2, 4) if made.source == OUTPUT else (2, 3, 4)
    if not isinstance(output, Tensor):
        shown = f"a {type(output).__name__}"
    elif output.ndim not in ranks or len(output) != 2 or not output.is_floating_point():
        shown = f"a tensor of shape {list(output.shape)}"
    else:
        return int(output.shape[2 if output.ndim == 3 else 1])
    raise FedlensError(
        f"backbone={name} has no features: for two images it gives {shown}, not [2, D]; set "
        "backbone.features to the submodule whose output they are."
    )


def _remove_unused(made: FeatureModule, resolution: int) -> None:
    """Removes what follows the features' submodule, so that it is neither trained nor sent."""
    named = dict(made.module.named_parameters())
    flags = [value.requires_grad for value in named.values()]
    for value in named.values():
        value.requires_grad_(True)
    with torch.enable_grad():
        total = made(torch.zeros(2, 3, resolution, resolution)).sum()
        gradients = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    for value, flag in zip(named.values(), flags, strict=True):
        value.requires_grad_(flag)
    used = [name for name, one in zip(named, gradients, strict=True) if one is not None]
    removed: list[str] = []
    for path, module in list(made.module.named_modules()):
        own = any(True for _ in module.parameters())
        inside = path.startswith(tuple(f"{one}." for one in removed))
        if not path or not own or inside or any(one.startswith(f"{path}.") for one in used):
            continue
        holder, _, last = path.rpartition(".")
        setattr(made.module.get_submodule(holder), last, nn.Identity())
        removed.append(path)
    made.classifier = tuple(removed)
