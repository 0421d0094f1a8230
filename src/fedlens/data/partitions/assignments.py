"""Partitions that are given, not drawn: who an image is from by nature, or as a file says.

A row with the trait `assigned` names the client of every training image of the dataset, before any
are held out for validation; the number of clients follows from it.
"""

import csv
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from fedlens.errors import FedlensError
from fedlens.paths import expanded
from fedlens.registry import partitioner

HEADERS = ("image", "images", "path", "file", "filename", "name")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Samples:
    """All training samples of a dataset, in their order, and what is known of each."""

    count: int
    names: Sequence[str] | None = None  # paths within the dataset
    clients: Sequence[Any] | None = None  # client ids


@partitioner(label="natural clients", order=5, assigned=True, paths=("file",))
def key(
    samples: Samples,
    *,
    file: Annotated[
        str | None, "a CSV file with lines `image,client`; null: the dataset's client column"
    ] = None,
) -> list[Any]:
    """Every client holds the images that are its own: by a column of the dataset, or a file."""
    if file is None:
        if samples.clients is None:
            raise FedlensError(
                "partition=key needs a client for each image: set data.client to a column "
                "of a Hugging Face dataset, or partition.file to a CSV file with lines "
                "image,client."
            )
        if len(samples.clients) != samples.count:
            raise FedlensError(
                f"There are {len(samples.clients)} client ids for {samples.count} samples: give "
                "one for each."
            )
        return list(samples.clients)
    if samples.names is None:
        raise FedlensError(
            "partition.file names images by their paths, which this dataset does not have: use "
            "data.client, or partition=file."
        )
    return _by_name(expanded(file), samples.names)


@partitioner(label="clients of {file}", name="file", order=6, assigned=True, paths=("file",))
def from_file(
    samples: Samples,
    *,
    file: Annotated[
        str,
        "JSON: a list of positions for each client; .npy, .csv: a client id for each image",
    ],
) -> list[Any]:
    """Who holds which training image, as a file of yours says."""
    path = expanded(file)
    if path.suffix == ".json":
        return _from_lists(path, samples.count)
    ids = _read(path)
    if len(ids) != samples.count:
        raise FedlensError(
            f"{path} has {len(ids)} client ids and the dataset has {samples.count} training "
            "images: give one id for each, in their order."
        )
    return ids


def numbered(ids: Sequence[Any]) -> tuple[torch.Tensor, list[str]]:
    """The client of each sample as a number from 0, and the clients' ids in that order.

    Ids are sorted: by value where all of them are whole numbers, else as words.
    """
    words = [str(one) for one in ids]
    whole = all(word.removeprefix("-").isdecimal() for word in words)
    order = sorted(set(words), key=(lambda word: (int(word), word)) if whole else None)
    place = {word: number for number, word in enumerate(order)}
    return torch.tensor([place[word] for word in words], dtype=torch.int64), order


def _read(path: Path) -> list[Any]:
    """One client id for each image, of a .npy file or a file of lines."""
    if path.suffix == ".npy":
        try:
            array = np.load(path, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from error
        if array.ndim != 1 or array.dtype.kind not in "iuUS":
            raise FedlensError(
                f"{path} has shape {array.shape} and type {array.dtype}: give one whole number or "
                "word for each image."
            )
        ids: list[Any] = array.tolist()
        return ids
    rows = _rows(path)
    if wide := next((row for row in rows if len(row) != 1), None):
        raise FedlensError(
            f"{path} has the line '{','.join(wide)}': give one client id in each line, or use "
            "partition=key for lines image,client."
        )
    ids = [row[0] for row in rows]
    return ids[1:] if ids and ids[0].lower() in ("client", "clients", "client_id") else ids


def _from_lists(path: Path, count: int) -> list[int]:
    try:
        lists = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if not (
        isinstance(lists, list)
        and lists
        and all(isinstance(one, list) for one in lists)
        and all(type(position) is int for one in lists for position in one)
    ):
        raise FedlensError(
            f"{path} is not a list of lists of positions: write [[0, 3], [1, 2]] for two clients."
        )
    holder = [-1] * count
    for client, positions in enumerate(lists):
        if not positions:
            raise FedlensError(f"{path} gives client {client} no images: give it at least one.")
        for position in positions:
            if not 0 <= position < count:
                raise FedlensError(
                    f"{path} has position {position}, but the {count} training images are "
                    f"numbered from 0 to {count - 1}."
                )
            if holder[position] >= 0:
                raise FedlensError(
                    f"{path} gives image {position} to client {holder[position]} and to client "
                    f"{client}: give it to one."
                )
            holder[position] = client
    if -1 in holder:
        raise FedlensError(
            f"{path} gives {holder.count(-1)} of {count} training images to no client, such as "
            f"image {holder.index(-1)}: give every image to one."
        )
    return holder


def _by_name(path: Path, names: Sequence[str]) -> list[str]:
    rows = _rows(path)
    if rows and rows[0][0].strip().lower() in HEADERS:
        rows = rows[1:]
    if wide := next((row for row in rows if len(row) != 2), None):
        raise FedlensError(
            f"{path} has the line '{','.join(wide)}': write two columns, image,client."
        )
    clients: dict[str, str] = {}
    for name, client in rows:
        if clients.setdefault(name, client) != client:
            raise FedlensError(f"{path} gives {name} to '{clients[name]}' and to '{client}'.")
    if missing := next((name for name in names if name not in clients), None):
        raise FedlensError(
            f"{path} does not name a client for {missing}: write a line for every training image, "
            "with its path below data.root."
        )
    if others := len(clients.keys() - set(names)):
        log.info("%d lines of %s name no training image and are ignored.", others, path)
    return [clients[name] for name in names]


def _rows(path: Path) -> list[list[str]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            return [[cell.strip() for cell in row] for row in csv.reader(stream) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> FedlensError:
    reason = getattr(error, "strerror", None) or " ".join(str(error).split())
    return FedlensError(f"{path} cannot be read as a partition ({reason}).")
