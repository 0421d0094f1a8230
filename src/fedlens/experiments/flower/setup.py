"""What remote clients are sent before they work: a config, a fitted head, masks.

Simulated clients belong to the run's own user and get its whole config. Nodes of a deployment get
the client part: plain values that say what to learn, in JSON. A node builds its config from these
and from its own settings, and refuses everything else, so no server can name a file of the node's
host, read its environment, or choose its devices and threads.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from fedlens.config.compose import from_plain, getattr_dotted, row_of, to_yaml
from fedlens.config.schema import CheckpointConfig, Config, RunConfig, TrackerConfig
from fedlens.federated.flower import plain
from fedlens.federated.flower.plain import NotPlain
from fedlens.federated.flower.refusals import Refusal, Refused
from fedlens.federated.flower.setup import Setup
from fedlens.params import Params
from fedlens.paths import expanded
from fedlens.registry import RowSettings
from fedlens.sparse import mask_files
from fedlens.sparse.masks import Masks

HEAD, MASK = "head/", "mask/"

# The client part of a config, and of its engine.
CLIENT_KEYS = (
    "experiment", "seed", "onednn", "data", "augment", "backbone", "head", "train", "sparse",
    "federated", "partition", "algorithm", "privacy", "evaluate",
)  # fmt: skip
VECTORISE = "vectorise"
OWN_KEYS = {"backbone": ("weights",)}  # parameters of these rows that are the node's own
CHARACTERS, WORD = 2**18, 256  # the most of a client part, and of a string in it


@dataclass(frozen=True)
class NodeSettings:
    """What a node decides itself, on its command line."""

    device: str = "auto"
    threads: int | None = None  # null: as many as its process began with


def encode_setup(
    config: Config,
    weights: str | None,
    *,
    head: nn.Linear | None = None,
    masks: Masks | None = None,
) -> Setup:
    """`weights` is the hash of the file the backbone starts from: everybody's must be the same.

    Paths and run names stay here, but for a simulation, whose clients read the same files.
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
    return Setup(to_yaml(sent) if simulated else _client_part(sent), tensors)


def _client_part(config: Config) -> str:
    values = asdict(config)
    part = {key: values[key] for key in CLIENT_KEYS}
    for key, names in OWN_KEYS.items():
        part[key] = {name: one for name, one in part[key].items() if name not in names}
    return json.dumps({**part, VECTORISE: config.engine.vectorise})


def read_client_part(text: str, own: NodeSettings) -> Config:
    """The config of a client part that a server sent, with the node's own settings.

    Whatever is not plain data of the schema raises `Refused` or another `FedlensError`.
    """
    try:
        part = plain.parsed(text, limit=CHARACTERS)
    except NotPlain as error:
        raise Refused(Refusal.SETUP, str(error)) from error
    if not isinstance(part, dict) or part.keys() != {*CLIENT_KEYS, VECTORISE}:
        raise Refused(Refusal.SETUP, "it has other keys than the client part of a config")
    for word in _words(part):
        if not _is_name(word):
            raise Refused(Refusal.SETUP, f"{plain.one_line(repr(word))} is not a name")
    for key, names in OWN_KEYS.items():
        if not isinstance(part[key], dict) or not part[key].keys().isdisjoint(names):
            raise Refused(Refusal.SETUP, f"{key} has keys that are the node's own")
    engine = {
        "name": "flower",
        VECTORISE: part.pop(VECTORISE),
        "threads_per_client": own.threads,
    }
    config = from_plain(
        {**part, "device": own.device, "engine": engine}, "The setup the server sent"
    )
    _refuse_paths(config)
    largest = Config().train.prefix_cache_gb
    config.train.prefix_cache_gb = min(config.train.prefix_cache_gb, largest)
    return config


def _refuse_paths(config: Config) -> None:
    """Parameters that are paths must be names: a node's data are those of its own shard."""
    for key in ("data", "partition"):
        chosen = getattr_dotted(config, key)
        for name in {*row_of(config, key).traits.get("paths", ()), "root"} & chosen.keys():
            if "/" in str(chosen[name]):
                raise Refused(Refusal.SETUP, f"{key}.{name} is a path")


def _words(value: Any) -> Iterator[str]:
    """All strings in plain data, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        for one in value.values():
            yield from _words(one)
    elif isinstance(value, list):
        for one in value:
            yield from _words(one)


def _is_name(word: str) -> bool:
    """Whether it is the name of a row, a model or a dataset: no path, no interpolation."""
    return (
        len(word) <= WORD
        and (word == "" or word.isprintable())
        and not word.startswith(("/", "~", "."))
        and "${" not in word
        and "\\" not in word
        and ".." not in word.split("/")
    )


def _reached(config: Config, key: str, simulated: bool) -> RowSettings:
    """A row's settings for clients: whole paths in a simulation, else names, as they read none."""
    row, chosen = row_of(config, key), getattr_dotted(config, key)
    paths = {*row.traits.get("paths", ()), "root"} & chosen.keys()
    if simulated:
        whole = {name: str(expanded(chosen[name]).absolute())
                 for name in paths if chosen[name]}  # fmt: skip
        return RowSettings({**chosen, **whole})
    hidden = {"root": None} if "root" in paths else {}
    return RowSettings({**chosen, **hidden, **{
        name: value for name, value in row.portable(chosen).items() if value != chosen[name]
    }})  # fmt: skip


def decode_head(setup: Setup, classes: int) -> nn.Linear | None:
    """The head that a setup contains, of so many classes; None if there is none."""
    tensors = _below(HEAD, setup.tensors)
    if not tensors:
        return None
    weight, bias = tensors.get("weight"), tensors.get("bias")
    if (
        len(tensors) != 2
        or weight is None
        or bias is None
        or weight.ndim != 2
        or weight.shape[0] != classes
        or bias.shape != (classes,)
    ):
        raise Refused(Refusal.SETUP, f"its head is not one of {classes} classes")
    head = nn.Linear(weight.shape[1], classes)
    head.load_state_dict(tensors)
    return head


def decode_masks(setup: Setup, parameters: Params) -> Masks:
    packed = _below(MASK, setup.tensors)
    if unknown := packed.keys() - parameters.keys():
        raise Refused(Refusal.SETUP, f"{len(unknown)} of its masks are of no parameter")
    try:
        return {
            name: mask_files.unpacked(bits, parameters[name].shape) for name, bits in packed.items()
        }
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise Refused(Refusal.SETUP, "its masks do not fit their parameters") from error


def _below(prefix: str, tensors: Params) -> Params:
    return {n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)}
