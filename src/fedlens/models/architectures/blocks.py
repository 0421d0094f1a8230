"""A model as a sequence of blocks, so that its first ones can be frozen or its last ones trained.

A ViT, a ResNet, a ConvNeXt and a Swin keep their blocks in the order of the forward pass: one after
the other, or in stages. What comes before them is the stem or the embeddings, what comes after
them the final norm.
"""

from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from fedlens.errors import FedlensError

SEQUENCES = ("blocks", "stages", "layers")  # attributes that hold blocks, or stages of blocks
STAGE = "layer"  # layer1, layer2, … are stages too, as in a ResNet


def freeze_blocks(backbone: nn.Module, n: int) -> None:
    """Freezes the embeddings or the stem, and the first n blocks; n = 0 freezes nothing."""
    if n == 0:
        return
    depth = len(block_paths(backbone))
    if not 0 < n <= depth:
        raise FedlensError(f"freeze_blocks={n} must be in 0 to {depth}, the number of blocks.")
    for block, parameter in numbered(backbone):
        if block < n:
            parameter.requires_grad_(False)


def last_blocks(backbone: nn.Module, n: int) -> None:
    """Exactly the last n blocks and the final norm require gradients."""
    depth = len(block_paths(backbone))
    if not 1 <= n <= depth:
        raise FedlensError(f"last_blocks:{n} must be in 1 to {depth}, the number of blocks.")
    for block, parameter in numbered(backbone):
        parameter.requires_grad_(block >= depth - n)


def numbered(backbone: nn.Module) -> list[tuple[int, nn.Parameter]]:
    """Each parameter with its block's number: −1 before all blocks, their count after them.

    What lies between two blocks, such as a stage's downsampling, belongs to the next one. Modules
    register their parts in the order of use, which decides what is before and what is after.
    """
    named = dict(backbone.named_parameters())
    return [(block, named[name]) for name, block in _numbers(named, block_paths(backbone)).items()]


def numbered_tensors(backbone: nn.Module) -> dict[str, int]:
    """The names of all parameters and buffers with their blocks' numbers, as in `numbered`."""
    names = [
        f"{path}.{name}" if path else name
        for path, module in backbone.named_modules()
        for name in (*module._parameters, *module._buffers)
    ]
    return _numbers(names, block_paths(backbone))


def _numbers(names: Iterable[str], paths: Sequence[str]) -> dict[str, int]:
    """`names` in the order in which the modules register them."""
    found: dict[str, int] = {}
    waiting: list[str] = []  # of the next block, or of the end
    number = -1
    for name in names:
        own = next((i for i, path in enumerate(paths) if name.startswith(f"{path}.")), None)
        if own is None:
            waiting.append(name)
            continue
        found |= dict.fromkeys(waiting, own if number >= 0 else -1)
        found[name] = own
        waiting, number = [], own
    return found | dict.fromkeys(waiting, len(paths))


def block_paths(backbone: nn.Module) -> list[str]:
    """The names of the blocks' modules, in their order; a model without any is refused."""
    stages = [
        (name, child)
        for name, child in backbone.named_children()
        if name.startswith(STAGE) and name.removeprefix(STAGE).isdigit()
    ]
    trunk = [(name, getattr(backbone, name, None)) for name in SEQUENCES]
    for name, module in [*trunk, *([("", nn.ModuleDict(dict(stages)))] if stages else [])]:
        if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            paths = [path for path, _ in _blocks(module, f"{name}." if name else "")]
            if paths:
                return paths
    inner = getattr(backbone, "module", None)
    if isinstance(inner, nn.Module):
        return [f"module.{path}" for path in block_paths(inner)]
    raise FedlensError(
        f"{type(backbone).__name__} has no sequence of blocks (a Sequential or ModuleList called "
        f"{', '.join(SEQUENCES)}, or {STAGE}1, {STAGE}2, …): train or freeze all of it."
    )


def _blocks(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The blocks in a container; one that holds composed modules, or has `blocks`, is a stage."""
    for name, child in module.named_children():
        within = getattr(child, "blocks", None)
        if isinstance(within, nn.Sequential | nn.ModuleList):
            yield from _blocks(within, f"{prefix}{name}.blocks.")
        elif isinstance(child, nn.Sequential | nn.ModuleList) and _is_stage(child):
            yield from _blocks(child, f"{prefix}{name}.")
        elif any(True for _ in child.parameters()):
            yield f"{prefix}{name}", child


def _is_stage(module: nn.Module) -> bool:
    return any(any(True for _ in child.children()) for child in module.children())
