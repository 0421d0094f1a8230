"""What remote clients are sent before they work: the config, a fitted head, masks."""

from dataclasses import replace
from pathlib import Path

from torch import nn

from fedlens.config.compose import getattr_dotted, row_of, to_yaml
from fedlens.config.schema import CheckpointConfig, Config, RunConfig, TrackerConfig
from fedlens.federated.flower.setup import Setup
from fedlens.params import Params
from fedlens.registry import RowSettings
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

    Paths and run names stay here, but for a simulation, whose clients read the same files. On
    which device clients train is for their own host to decide.
    """
    simulated = config.engine.name == "flower_simulation"
    sent = replace(
        config,
        device=config.device if simulated else "auto",
        data=_reached(config, "data", simulated),
        partition=_reached(config, "partition", simulated),
        backbone=config.backbone.but(weights=None, sha256=weights),
        checkpoint=CheckpointConfig(),
        tracker=TrackerConfig(),
        run=RunConfig(),
    )
    tensors = {HEAD + name: value for name, value in (head.state_dict() if head else {}).items()}
    tensors |= {MASK + name: mask_files.packed(mask) for name, mask in (masks or {}).items()}
    return Setup(to_yaml(sent), tensors)


def _reached(config: Config, key: str, simulated: bool) -> RowSettings:
    """A row's settings for clients: whole paths in a simulation, else names, as they read none."""
    row, chosen = row_of(config, key), getattr_dotted(config, key)
    paths = {*row.traits.get("paths", ()), "root"} & chosen.keys()
    if simulated:
        whole = {name: str(Path(chosen[name]).expanduser().absolute())
                 for name in paths if chosen[name]}  # fmt: skip
        return RowSettings({**chosen, **whole})
    hidden = {"root": None} if "root" in paths else {}
    return RowSettings({**chosen, **hidden, **{
        name: value for name, value in row.portable(chosen).items() if value != chosen[name]
    }})  # fmt: skip


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
