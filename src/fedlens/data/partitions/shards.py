"""A federation's images split into folders without overlap, one for each node's own disk.

node-i/ has the training images of consecutive clients; server/ has the images it evaluates on and
the class counts of all clients. Each shard.json has its files' checksums and one of its own.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from fedlens import files, params
from fedlens.data.images import Dataset, Images
from fedlens.data.partitions import node_name
from fedlens.data.partitions.partition import Partition
from fedlens.data.partitions.partition_statistics import histogram
from fedlens.errors import FedlensError

VERSION = 1  # of the folders' format
ABOUT = "shard.json"
TRAIN, VALIDATION, TEST = (f"{split}.safetensors" for split in ("train", "validation", "test"))
SHARED = ("dataset", "partition_spec", "nodes", "dataset_digest", "partition_digest")


@dataclass(frozen=True)
class _Shard:
    dataset: str
    classes: tuple[str, ...]
    dataset_digest: str  # of the whole dataset
    partition_spec: dict[str, Any]  # the settings that decide who holds which image
    nodes: int
    partition_digest: str  # of who holds which image
    class_counts: torch.Tensor  # int64 [K, C]: examples of each class by client, 0 if not known
    partition: Partition  # clients in order
    digest: str  # of the folder's content


@dataclass(frozen=True)
class NodeShard(_Shard):
    """Its partition is of its own images over all K clients; clients of other nodes have none."""

    clients: tuple[int, ...]
    images: Images


@dataclass(frozen=True)
class ServerShard(_Shard):
    """Its partition has the clients' sizes; the images themselves are on the nodes."""

    validation: Images
    load_test: Callable[[], Images]


@dataclass(frozen=True)
class _Folder:
    about: dict[str, Any]
    content: dict[str, tuple[Images, torch.Tensor]]  # of each file: images, and which of them


def clients_by_node(clients: int, nodes: int) -> list[range]:
    """The clients of each node: consecutive, and as many on each, within one."""
    if nodes < 1:
        raise FedlensError(f"nodes={nodes} must be 1 or more.")
    if nodes > clients:
        raise FedlensError(
            f"nodes={nodes} is more than the {clients} clients: choose {clients} or fewer, or more "
            "clients."
        )
    return [range(i * clients // nodes, (i + 1) * clients // nodes) for i in range(nodes)]


def write(
    folder: Path,
    *,
    dataset: Dataset,
    images: Images,
    train_index: torch.Tensor,
    validation_index: torch.Tensor,
    test: Images,
    partition: Partition,
    partition_spec: Mapping[str, Any],
    nodes: int,
    check: Callable[[], None] = lambda: None,
) -> bool:
    """Writes server/ and node-0/, node-1/, … into `folder`; False if all of it existed already.

    The partition's positions are those in `train_index`. Missing or damaged folders are written
    again; a folder of another federation, or one that is not a shard, is refused before anything
    is changed. Between two folders `check` may raise to stop: the same call later writes the rest.
    """
    if len(train_index) != len(partition.order):
        raise ValueError(
            f"a partition of {len(partition.order)} for {len(train_index)} training images"
        )
    homes = clients_by_node(len(partition), nodes)
    class_counts = histogram(partition, images.labels[train_index], len(dataset.classes))
    order = train_index[partition.order]
    shared = {
        "version": VERSION,
        "dataset": dataset.name,
        "classes": list(dataset.classes),
        "dataset_digest": dataset.digest,
        "partition_spec": json.loads(json.dumps(dict(partition_spec), allow_nan=False)),
        "nodes": nodes,
        "partition_digest": partition_digest(partition, train_index, validation_index),
    }
    wanted = {}
    for node, home in enumerate(homes):
        own = order[int(partition.offsets[home.start]) : int(partition.offsets[home.stop])]
        about = {**shared, "kind": "node", **_counted(class_counts, home)}
        wanted[folder / node_name(node)] = _Folder(about, {TRAIN: (images, own)})
    about = {**shared, "kind": "server", **_counted(class_counts, range(len(class_counts)))}
    evaluated = {VALIDATION: (images, validation_index), TEST: (test, torch.arange(len(test)))}
    wanted[folder / "server"] = _Folder(about, evaluated)  # last: it completes the federation

    for stray in {path.parent for path in folder.glob(f"node-*/{ABOUT}")} - wanted.keys():
        _is_complete(stray, shared)
    missing = [path for path, made in wanted.items() if not _is_complete(path, made.about)]
    for path in missing:
        check()
        files.clear_partials(folder, of=path.name)
        _write(path, wanted[path])
    for path in wanted:
        with suppress(PermissionError):  # of another user, who may read it
            files.make_private(path)
    return bool(missing)


def partition_digest(
    partition: Partition, train_index: torch.Tensor, validation_index: torch.Tensor
) -> str:
    """Of who holds which image, and which images are held out."""
    order = train_index[partition.order]
    return params.digest(
        {"order": order, "offsets": partition.offsets, "held_out": validation_index}
    )


def read_node(folder: Path) -> NodeShard:
    about = _about(folder, kind="node")
    clients = tuple(sorted(map(int, about["clients"])))
    return NodeShard(**_fields(about), clients=clients, images=_images(folder, about, TRAIN))


def read_server(folder: Path) -> ServerShard:
    """The server's shard; test images are neither read nor checked before `load_test` is called."""
    about = _about(folder, kind="server")
    if not (folder / TEST).is_file():
        raise _unusable(folder, f"{TEST} is missing")
    return ServerShard(
        **_fields(about),
        validation=_images(folder, about, VALIDATION),
        load_test=partial(_images, folder, about, TEST),
    )


def _counted(class_counts: torch.Tensor, clients: range) -> dict[str, Any]:
    rows = {client: class_counts[client].tolist() for client in clients}
    listed = {str(k): {"examples": sum(row), "class_counts": row} for k, row in rows.items()}
    return {"total_clients": len(class_counts), "clients": listed}


def _write(folder: Path, made: _Folder) -> None:
    """Writes shard.json last; the folder gets its name once all of it is on the disk."""
    sums = {}
    with files.replacing(folder) as temporary:
        temporary.mkdir(mode=0o700)
        for name, (images, index) in made.content.items():
            data = save({"pixels": images.pixels[index], "labels": images.labels[index]})
            (temporary / name).write_bytes(data)
            sums[name] = hashlib.sha256(data).hexdigest()
        about = {**made.about, "files": sums}
        files.write_json(temporary / ABOUT, {**about, "digest": _digest(about)})


def _is_complete(folder: Path, wanted: Mapping[str, Any]) -> bool:
    """Whether the folder exists as wanted and undamaged; refuses what must not be replaced."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    try:
        about = _about(folder)
    except FedlensError as error:
        raise FedlensError(
            f"{folder} exists and is not a shard that fedlens wrote: move it away, or choose "
            "another --federation."
        ) from error
    existing, new = ({key: one[key] for key in SHARED} for one in (about, wanted))
    if difference := next(_differences(existing, new), None):
        raise FedlensError(
            f"{folder} belongs to another federation ({difference}): choose another "
            "--federation, or delete the old one first."
        )
    same = all(about[key] == value for key, value in wanted.items())
    return same and all(
        (folder / name).is_file() and files.sha256(folder / name) == expected
        for name, expected in about["files"].items()
    )


def _differences(existing: Any, new: Any, path: str = "") -> Iterator[str]:
    if isinstance(existing, dict) and isinstance(new, dict):
        for key in [*existing, *(key for key in new if key not in existing)]:
            below = f"{path}.{key}" if path else key
            yield from _differences(existing.get(key), new.get(key), below)
    elif existing != new:
        yield f"its {path} is {existing}, not {new}"


def _about(folder: Path, kind: str | None = None) -> dict[str, Any]:
    """The content of shard.json, refused unless it is undamaged and of this kind."""
    try:
        about = files.read_json(folder / ABOUT)
    except FedlensError as error:
        raise _unusable(folder, f"{ABOUT} is missing or cannot be read") from error
    if not isinstance(about, dict) or about.get("version") != VERSION:
        raise _unusable(folder, f"{ABOUT} is not of this version of fedlens")
    if about.get("digest") != _digest(about):
        raise _unusable(folder, f"{ABOUT} does not match its checksum")
    if kind not in (None, about["kind"]):
        other = "a folder node-…" if kind == "node" else "the folder server"
        raise FedlensError(f"{folder} is a {about['kind']}'s shard, not a {kind}'s: give {other}.")
    return about


def _digest(about: Mapping[str, Any]) -> str:
    """Of the description, and so of the data too, whose checksums are part of it."""
    text = json.dumps({k: v for k, v in about.items() if k != "digest"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _fields(about: Mapping[str, Any]) -> dict[str, Any]:
    class_counts = torch.zeros(about["total_clients"], len(about["classes"]), dtype=torch.int64)
    for client, row in about["clients"].items():
        class_counts[int(client)] = torch.tensor(row["class_counts"])
    sizes = class_counts.sum(1)
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    return {
        **{key: about[key] for key in SHARED},
        "classes": tuple(about["classes"]),
        "class_counts": class_counts,
        "partition": Partition(order=torch.arange(int(sizes.sum())), offsets=offsets),
        "digest": about["digest"],
    }


def _images(folder: Path, about: Mapping[str, Any], name: str) -> Images:
    try:
        if files.sha256(folder / name) == about["files"][name]:
            stored = load_file(folder / name)
            return Images(stored["pixels"], stored["labels"])
    except OSError as error:
        raise _unusable(folder, f"{name}: {error.strerror or error}") from error
    raise _unusable(folder, f"{name} does not match its checksum")


def _unusable(folder: Path, reason: str) -> FedlensError:
    return FedlensError(
        f"{folder} is not a complete shard ({reason}): copy it again, or write it with 'fedlens "
        f"flower partition … --federation {folder.parent}'."
    )
