"""What clients elsewhere are told before they work: the config, a prepared head, masks."""

from dataclasses import replace

from torch import nn

from fedlens.config.compose import to_yaml
from fedlens.config.schema import CheckpointConfig, Config, RunConfig, TrackerConfig
from fedlens.federated.tasks import Setup
from fedlens.params import Params
from fedlens.sparse import mask_files
from fedlens.sparse.masks import Masks

HEAD, MASK = "head/", "mask/"


def setup(
    config: Config,
    weights: str | None,
    *,
    head: nn.Linear | None = None,
    masks: Masks | None = None,
) -> Setup:
    """`weights` is the hash of the file the backbone starts from: everybody's must be the same.

    Where things lie, and what a run is called, is nobody else's business; on which device clients
    train is for their own host to say.
    """
    told = replace(
        config,
        device=config.device if config.engine.name == "flower_simulation" else "auto",
        data=replace(config.data, root=None),
        backbone=replace(config.backbone, weights=None, sha256=weights),
        checkpoint=CheckpointConfig(),
        tracker=TrackerConfig(),
        run=RunConfig(),
    )
    tensors = {HEAD + name: value for name, value in (head.state_dict() if head else {}).items()}
    tensors |= {MASK + name: mask_files.packed(mask) for name, mask in (masks or {}).items()}
    return Setup(to_yaml(told), tensors)


def told_head(given: Setup) -> nn.Linear | None:
    found = _below(HEAD, given.tensors)
    if not found:
        return None
    classes, width = found["weight"].shape
    head = nn.Linear(width, classes)
    head.load_state_dict(found)
    return head


def told_masks(given: Setup, parameters: Params) -> Masks:
    found = _below(MASK, given.tensors)
    return {name: mask_files.unpacked(bits, parameters[name].shape) for name, bits in found.items()}


def _below(prefix: str, tensors: Params) -> Params:
    return {n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)}
