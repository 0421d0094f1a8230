"""A node's own data on its own disk: a federation's images, dealt into folders that share none.

node-i/ has the training images of a stretch of clients, server/ has those it evaluates on and only
counts of what the clients hold. Each shard.json names its files' checksums and is sealed itself.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from fedlens import files, params
from fedlens.data.images import Dataset, Images
from fedlens.data.partition import Partition
from fedlens.data.partition_statistics import histogram
from fedlens.errors import FedlensError

VERSION = 1  # of what the folders look like inside
ABOUT = "shard.json"
TRAIN, VALIDATION, TEST = (f"{split}.safetensors" for split in ("train", "validation", "test"))
SHARED = ("dataset", "world", "nodes", "of", "deal")  # alike in all folders of one federation


@dataclass(frozen=True)
class _Shard:
    dataset: str
    classes: tuple[str, ...]
    of: str  # the digest of the dataset it was dealt from
    world: dict[str, Any]  # what decided who holds what
    nodes: int
    deal: str  # the digest of who holds which image
    held: torch.Tensor  # int64 [K, C]: examples of each class by client, 0 where not known here
    partition: Partition  # clients lie one after another
    digest: str  # of all that is in the folder


@dataclass(frozen=True)
class NodeShard(_Shard):
    """Its partition is of its own images, over all K clients: who lives elsewhere holds nothing."""

    clients: tuple[int, ...]
    images: Images


@dataclass(frozen=True)
class ServerShard(_Shard):
    """Its partition has the right sizes; the positions are of images that are all elsewhere."""

    validation: Images
    load_test: Callable[[], Images]


@dataclass(frozen=True)
class _Folder:
    about: dict[str, Any]
    content: dict[str, tuple[Images, torch.Tensor]]  # of each file: those of the images at an index


def stretches(clients: int, nodes: int) -> list[range]:
    """Which clients live on which node: in order, and as many on each, within one."""
    if nodes < 1:
        raise FedlensError(f"A federation has at least 1 node, not {nodes}.")
    if nodes > clients:
        raise FedlensError(
            f"{nodes} nodes are more than the {clients} clients they would hold: choose {clients} "
            "or fewer, or raise federated.clients."
        )
    return [range(i * clients // nodes, (i + 1) * clients // nodes) for i in range(nodes)]


def node_name(number: int) -> str:
    """Of its folder, and of whatever else is this node's."""
    return f"node-{number}"


def write(
    folder: Path,
    *,
    dataset: Dataset,
    images: Images,
    kept: torch.Tensor,
    held_out: torch.Tensor,
    test: Images,
    partition: Partition,
    world: Mapping[str, Any],
    nodes: int,
    check: Callable[[], None] = lambda: None,
) -> bool:
    """Writes server/ and node-0/, node-1/, … into `folder`; False if all of it stood there already.

    The partition's positions count within `kept`. What is missing or damaged is written again;
    what belongs to another world, or is not ours, is refused before anything is touched. Between
    two folders `check` may raise to give up: the same call later writes the rest.
    """
    if len(kept) != len(partition.order):
        raise ValueError(f"a partition of {len(partition.order)} for {len(kept)} training images")
    homes = stretches(len(partition), nodes)
    held = histogram(partition, images.labels[kept], len(dataset.classes))
    order = kept[partition.order]
    dealt = {"order": order, "offsets": partition.offsets, "held_out": held_out}
    shared = {
        "version": VERSION,
        "dataset": dataset.name,
        "classes": list(dataset.classes),
        "of": dataset.digest,
        "world": json.loads(json.dumps(dict(world), allow_nan=False)),  # as it will be read
        "nodes": nodes,
        "deal": params.digest(dealt),
    }
    wanted = {}
    for node, home in enumerate(homes):
        own = order[int(partition.offsets[home.start]) : int(partition.offsets[home.stop])]
        about = {**shared, "kind": "node", **_counted(held, home)}
        wanted[folder / node_name(node)] = _Folder(about, {TRAIN: (images, own)})
    about = {**shared, "kind": "server", **_counted(held, range(len(held)))}
    seen = {VALIDATION: (images, held_out), TEST: (test, torch.arange(len(test)))}
    wanted[folder / "server"] = _Folder(about, seen)  # last: with it the federation is complete

    for stray in {path.parent for path in folder.glob(f"node-*/{ABOUT}")} - wanted.keys():
        _stands(stray, shared)
    lacking = [path for path, made in wanted.items() if not _stands(path, made.about)]
    for path in lacking:
        check()
        files.clear_partials(folder, of=path.name)
        _write(path, wanted[path])
    return bool(lacking)


def read_node(folder: Path) -> NodeShard:
    about = _about(folder, kind="node")
    clients = tuple(sorted(map(int, about["clients"])))
    return NodeShard(**_fields(about), clients=clients, images=_images(folder, about, TRAIN))


def read_server(folder: Path) -> ServerShard:
    """The test images are neither read nor checked before `load_test` is called."""
    about = _about(folder, kind="server")
    if not (folder / TEST).is_file():
        raise _unusable(folder, f"{TEST} is missing")
    return ServerShard(
        **_fields(about),
        validation=_images(folder, about, VALIDATION),
        load_test=partial(_images, folder, about, TEST),
    )


def _counted(held: torch.Tensor, clients: range) -> dict[str, Any]:
    rows = {client: held[client].tolist() for client in clients}
    listed = {str(k): {"examples": sum(row), "held": row} for k, row in rows.items()}
    return {"clients_in_all": len(held), "clients": listed}


def _write(folder: Path, made: _Folder) -> None:
    """The description comes last, and the folder gets its name once all of it is on the disk."""
    sums = {}
    with files.replacing(folder) as temporary:
        temporary.mkdir()
        for name, (images, index) in made.content.items():
            data = save({"pixels": images.pixels[index], "labels": images.labels[index]})
            (temporary / name).write_bytes(data)
            sums[name] = hashlib.sha256(data).hexdigest()
        about = {**made.about, "files": sums}
        files.write_json(temporary / ABOUT, {**about, "seal": _seal(about)})


def _stands(folder: Path, wanted: Mapping[str, Any]) -> bool:
    """Whether the folder is there as wanted and whole; refuses what is not ours to replace."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    try:
        found = _about(folder)
    except FedlensError as error:
        raise FedlensError(
            f"{folder} is in the way, and no shard that can be told to be ours: move it away, or "
            "choose another --federation."
        ) from error
    theirs, ours = ({key: about[key] for key in SHARED} for about in (found, wanted))
    if difference := next(_differences(theirs, ours), None):
        raise FedlensError(
            f"{folder} belongs to another federation ({difference}): choose another "
            "--federation, or remove the old one first."
        )
    alike = all(found[key] == value for key, value in wanted.items())
    return alike and all(
        (folder / name).is_file() and files.sha256(folder / name) == expected
        for name, expected in found["files"].items()
    )


def _differences(there: Any, here: Any, path: str = "") -> Iterator[str]:
    if isinstance(there, dict) and isinstance(here, dict):
        for key in [*there, *(key for key in here if key not in there)]:
            below = f"{path}.{key}" if path else key
            yield from _differences(there.get(key), here.get(key), below)
    elif there != here:
        yield f"its {path} is {there}, not {here}"


def _about(folder: Path, kind: str | None = None) -> dict[str, Any]:
    """What shard.json says, once it is seen to be whole and of this kind."""
    try:
        found = files.read_json(folder / ABOUT)
    except FedlensError as error:
        raise _unusable(folder, f"{ABOUT} is missing or cannot be read") from error
    if not isinstance(found, dict) or found.get("version") != VERSION:
        raise _unusable(folder, f"{ABOUT} is not one of this version of fedlens")
    if found.get("seal") != _seal(found):
        raise _unusable(folder, f"{ABOUT} does not match its seal")
    if kind not in (None, found["kind"]):
        other = "a folder node-…" if kind == "node" else "the folder server"
        raise FedlensError(f"{folder} is a {found['kind']}'s shard, not a {kind}'s: give {other}.")
    return found


def _seal(about: Mapping[str, Any]) -> str:
    """It covers the data too, whose checksums are part of the description."""
    text = json.dumps({k: v for k, v in about.items() if k != "seal"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _fields(about: Mapping[str, Any]) -> dict[str, Any]:
    held = torch.zeros(about["clients_in_all"], len(about["classes"]), dtype=torch.int64)
    for client, counts in about["clients"].items():
        held[int(client)] = torch.tensor(counts["held"])
    sizes = held.sum(1)
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    return {
        **{key: about[key] for key in SHARED},
        "classes": tuple(about["classes"]),
        "held": held,
        "partition": Partition(order=torch.arange(int(sizes.sum())), offsets=offsets),
        "digest": about["seal"],
    }


def _images(folder: Path, about: Mapping[str, Any], name: str) -> Images:
    try:
        if files.sha256(folder / name) == about["files"][name]:
            return Images(**load_file(folder / name))
    except OSError as error:
        raise _unusable(folder, f"{name}: {error.strerror or error}") from error
    raise _unusable(folder, f"{name} does not match its checksum")


def _unusable(folder: Path, reason: str) -> FedlensError:
    return FedlensError(
        f"{folder} is not a whole shard ({reason}): copy it from where it was written, or write it "
        f"with 'fedlens flower partition … --federation {folder.parent}'."
    )
