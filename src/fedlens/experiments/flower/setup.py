"""What remote clients are sent before they work: the config, a fitted head, masks."""

from dataclasses import replace

from torch import nn

from fedlens.config.compose import to_yaml
from fedlens.config.schema import CheckpointConfig, Config, RunConfig, TrackerConfig
from fedlens.federated.flower.setup import Setup
from fedlens.params import Params
from fedlens.sparse import mask_files
from fedlens.sparse.masks import Masks

HEAD, MASK = "head/", "mask/"


def encode_setup(
    config: Config,
    weights: str | None,
    *,
    head: nn.Linear | None = None,
    masks: Masks | None = None,
) -> Setup:
    """`weights` is the hash of the file the backbone starts from: everybody's must be the same.

    Paths and run names stay here; on which device clients train is for their own host to decide.
    """
    sent = replace(
        config,
        device=config.device if config.engine.name == "flower_simulation" else "auto",
        data=config.data.but(root=None),
        backbone=config.backbone.but(weights=None, sha256=weights),
        checkpoint=CheckpointConfig(),
        tracker=TrackerConfig(),
        run=RunConfig(),
    )
    tensors = {HEAD + name: value for name, value in (head.state_dict() if head else {}).items()}
    tensors |= {MASK + name: mask_files.packed(mask) for name, mask in (masks or {}).items()}
    return Setup(to_yaml(sent), tensors)


def decode_head(setup: Setup) -> nn.Linear | None:
    tensors = _below(HEAD, setup.tensors)
    if not tensors:
        return None
    classes, width = tensors["weight"].shape
    head = nn.Linear(width, classes)
    head.load_state_dict(tensors)
    return head


def decode_masks(setup: Setup, parameters: Params) -> Masks:
    packed = _below(MASK, setup.tensors)
    return {
        name: mask_files.unpacked(bits, parameters[name].shape) for name, bits in packed.items()
    }


def _below(prefix: str, tensors: Params) -> Params:
    return {n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)}
