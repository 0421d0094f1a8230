"""Datasets of the Hugging Face hub, or of a local path: `data=huggingface:NAME`.

The columns of images and labels are found by their types, or named. Splits are found too: `train`
and `test` (or `validation`), or one split that is divided by a seed that never changes.
"""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from PIL import Image

from fedlens import files
from fedlens.data.images import Dataset
from fedlens.data.sources.downloads import unreachable
from fedlens.data.sources.folder_layout import VALIDATION
from fedlens.data.sources.image_cache import Source
from fedlens.data.sources.image_dataset import RESOLUTION, Split, image_dataset
from fedlens.data.sources.image_files import describe
from fedlens.errors import FedlensError, suggest
from fedlens.paths import expanded
from fedlens.registry import Range, dataset, is_path
from fedlens.runtime.progress import progress_bar
from fedlens.runtime.stop import current

LABEL_NAMES = ("label", "labels", "fine_label", "class", "target")

log = logging.getLogger(__name__)


@dataset(
    label="{dataset} (Hugging Face)",
    order=5,
    argument="dataset",
    path_or_name="dataset",
    resolution=True,
)
def huggingface(
    root: Path | str | None = None,
    resolution: int = RESOLUTION,
    *,
    dataset: Annotated[str, "its name on the hub, or a path that begins with /, . or ~"],
    subset: Annotated[str | None, "the configuration, of a dataset that has several"] = None,
    image: Annotated[str | None, "the column of images; null: found by its type"] = None,
    label: Annotated[str | None, "the column of labels; null: found by its type"] = None,
    client: Annotated[str | None, "the column of client ids, for partition=key"] = None,
    test_split: Annotated[str | None, "the test split; null: test, else validation"] = None,
    test_fraction: Annotated[
        float, Range("(0, 1)"), "images for testing, where there is one split only"
    ] = 0.2,
    size: Annotated[
        int | None, Range("[1, 4096]"), "pixels of the stored images; null: the backbone's"
    ] = None,
    crop: Annotated[
        Literal["centre", "squash"], "cut a square from the centre, or squash the image into one"
    ] = "centre",
) -> Dataset:
    """A dataset with a column of images and one of labels; needs fedlens[huggingface]."""
    tables = _loaded(dataset, subset, root)
    place = f"huggingface:{dataset}"
    train_names, test_name = _split_names(place, list(tables), test_split)
    columns = next(iter(tables.values())).features
    pixels = _image_column(place, columns, image)
    target = _label_column(place, columns, label, besides=(pixels, client))
    if client is not None and client not in columns:
        raise FedlensError(
            f"{place} has no column '{client}' (data.client): {suggest(client, list(columns))}"
        )
    used = [*train_names, *([test_name] if test_name else [])]
    values = {name: tables[name][target] for name in used}
    classes, numbers = _classes(columns[target], values)
    splits = {
        name: _split(f"{place}, split {name}", tables[name], pixels, client, numbers[name])
        for name in used
    }
    return image_dataset(
        Path(dataset).name,
        place,
        classes,
        _joined([splits[name] for name in train_names]),
        splits[test_name] if test_name else None,
        size=size,
        resolution=resolution,
        crop=crop,
        test_fraction=test_fraction,
    )


# --- loading -------------------------------------------------------------------------------------


def _loaded(name: str, subset: str | None, root: Path | str | None) -> dict[str, Any]:
    """The tables of all splits, by name."""
    if find_spec("datasets") is None:
        raise FedlensError(
            "data=huggingface needs the package datasets: pip install 'fedlens[huggingface]'."
        )
    path = expanded(name)
    if is_path(name) and not path.exists():
        raise FedlensError(f"{path} does not exist: give the path of a dataset, or its name.")
    with _quiet() as datasets:
        try:
            if is_path(name) and _saved_to_disk(path):
                loaded = datasets.load_from_disk(str(path))
            elif is_path(name):
                loaded = datasets.load_dataset(str(path), subset)
            else:
                loaded = _from_hub(datasets, name, subset, root)
        except FedlensError:
            raise
        except Exception as error:  # its errors are of many kinds
            reason = " ".join(str(error).split()) or type(error).__name__
            raise FedlensError(
                f"huggingface:{name} could not be loaded ({reason.rstrip('.')})."
            ) from error
    return dict(loaded) if isinstance(loaded, dict) else {"train": loaded}


def _from_hub(datasets: Any, name: str, subset: str | None, root: Path | str | None) -> Any:
    from huggingface_hub import constants

    folder = None if root is None else str(root)
    reason = unreachable(constants.ENDPOINT)
    if reason is None:
        return datasets.load_dataset(name, subset, cache_dir=folder)
    try:  # what was downloaded before is enough
        with _offline(datasets.config, constants):
            return datasets.load_dataset(name, subset, cache_dir=folder)
    except Exception as error:
        raise FedlensError(
            f"huggingface:{name} is not on this computer and could not be downloaded ({reason}): "
            f"run 'fedlens data fetch huggingface:{name}' with a network, or give a local path."
        ) from error


@contextmanager
def _offline(*modules: Any) -> Iterator[None]:
    """As with HF_HUB_OFFLINE=1, which is read on import: no request is tried again and again."""
    before = [one.HF_HUB_OFFLINE for one in modules]
    for one in modules:
        one.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for one, value in zip(modules, before, strict=True):
            one.HF_HUB_OFFLINE = value


def _saved_to_disk(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


@contextmanager
def _quiet() -> Iterator[Any]:
    """The package, without its progress bars."""
    import datasets

    shown = not datasets.utils.are_progress_bars_disabled()
    datasets.utils.disable_progress_bars()
    try:
        yield datasets
    finally:
        if shown:
            datasets.utils.enable_progress_bars()


# --- splits and columns --------------------------------------------------------------------------


def _split_names(
    place: str, names: list[str], test_split: str | None
) -> tuple[list[str], str | None]:
    """The splits that are trained on, and the one that is tested on; None: to be divided."""
    if test_split is not None and test_split not in names:
        raise FedlensError(
            f"{place} has no split '{test_split}' (data.test_split): {suggest(test_split, names)}"
        )
    validation = [name for name in VALIDATION if name in names]
    test = test_split or ("test" if "test" in names else validation[0] if validation else None)
    if len(names) == 1:
        if test_split is not None:
            raise FedlensError(f"{place} has one split only: leave data.test_split out.")
        return names, None
    if "train" not in names:
        raise FedlensError(
            f"{place} has the splits {', '.join(names)} and none is called train: save it with "
            "a split train."
        )
    train = ["train", *(name for name in validation if name != test)]
    return train, test


def _image_column(place: str, columns: Any, named: str | None) -> str:
    import datasets

    found = [name for name, kind in columns.items() if isinstance(kind, datasets.Image)]
    if named is not None:
        if named not in columns:
            raise FedlensError(
                f"{place} has no column '{named}' (data.image): {suggest(named, list(columns))}"
            )
        if named not in found:
            raise FedlensError(f"The column '{named}' of {place} (data.image) has no images.")
        return named
    if not found:
        raise FedlensError(
            f"{place} has no column of images; its columns are {', '.join(columns)}."
        )
    if len(found) > 1:
        raise FedlensError(
            f"{place} has several columns of images, {', '.join(found)}: set data.image."
        )
    return str(found[0])


def _label_column(
    place: str, columns: Any, named: str | None, besides: Sequence[str | None]
) -> str:
    import datasets

    plain = [
        name
        for name, kind in columns.items()
        if isinstance(kind, datasets.Value) and kind.dtype.startswith(("int", "uint", "string"))
    ]
    typed = [
        name
        for name, kind in columns.items()
        if isinstance(kind, datasets.ClassLabel) and name not in besides
    ]
    if named is not None:
        if named not in columns:
            raise FedlensError(
                f"{place} has no column '{named}' (data.label): {suggest(named, list(columns))}"
            )
        if named not in plain and not isinstance(columns[named], datasets.ClassLabel):
            raise FedlensError(
                f"The column '{named}' of {place} (data.label) has neither whole numbers nor words."
            )
        return named
    found = typed or [name for name in LABEL_NAMES if name in plain]
    if not found:
        raise FedlensError(
            f"{place} has no column of labels; its columns are {', '.join(columns)}: set "
            "data.label to the one with the classes."
        )
    if len(found) > 1:
        raise FedlensError(
            f"{place} has several columns of labels, {', '.join(found)}: set data.label."
        )
    return str(found[0])


def _classes(kind: Any, values: dict[str, Any]) -> tuple[list[str], dict[str, torch.Tensor]]:
    """The names of the classes, and the labels of each split as their numbers."""
    import datasets

    lists = {name: list(one) for name, one in values.items()}
    if isinstance(kind, datasets.ClassLabel):
        numbers = {
            name: [-1 if one is None else one for one in part] for name, part in lists.items()
        }
        return list(kind.names), {n: torch.tensor(part) for n, part in numbers.items()}
    words = sorted({one for part in lists.values() for one in part if one is not None})
    place = {word: number for number, word in enumerate(words)}
    numbers = {name: [place.get(one, -1) for one in part] for name, part in lists.items()}
    return [str(word) for word in words], {n: torch.tensor(part) for n, part in numbers.items()}


# --- images --------------------------------------------------------------------------------------


def _split(place: str, table: Any, column: str, client: str | None, labels: torch.Tensor) -> Split:
    import datasets

    encoded = table.select_columns([column]).cast_column(column, datasets.Image(decode=False))
    names = [f"image {position} of {place}" for position in range(len(encoded))]

    def content(position: int) -> bytes:
        return _bytes(encoded[position][column], names[position])

    hashes, sides = _facts(encoded, content, names)
    return Split(
        Source(names, lambda position: Image.open(BytesIO(content(position))), hashes),
        labels.long(),
        sides,
        clients=None if client is None else tuple(str(one) for one in table[client]),
    )


def _bytes(cell: dict[str, Any] | None, name: str) -> bytes:
    if cell is None:
        raise FedlensError(f"{name} is missing: remove its row.")
    if cell["bytes"] is not None:
        stored: bytes = cell["bytes"]
        return stored
    try:
        return Path(cell["path"]).read_bytes()
    except OSError as error:
        raise FedlensError(f"{name} cannot be read: {error}.") from error


def _facts(table: Any, content: Any, names: list[str]) -> tuple[list[str], list[int]]:
    """The hash and the shorter side of each image, remembered by the table's fingerprint."""
    key = hashlib.sha256(f"{table._fingerprint} {len(table)}".encode()).hexdigest()[:32]
    memory = files.cache_dir() / "image_files" / f"huggingface-{key}.json"
    with suppress(FedlensError, KeyError, TypeError):
        stored = files.read_json(memory)
        if len(stored["hashes"]) == len(stored["sides"]) == len(table):
            return stored["hashes"], stored["sides"]
    hashes, sides = [], []
    with progress_bar("reading the images", current()) as update:
        for position, name in enumerate(names):
            digest, side = describe(content(position), name)
            hashes.append(digest)
            sides.append(side)
            update(position + 1, len(names))
    with suppress(FedlensError):
        files.write_json(memory, {"hashes": hashes, "sides": sides}, indent=None)
    return hashes, sides


def _joined(splits: list[Split]) -> Split:
    """Several splits as one, in their order."""
    if len(splits) == 1:
        return splits[0]
    starts = np.cumsum([0, *(len(one) for one in splits)])

    def opened(position: int) -> Image.Image:
        part = int(np.searchsorted(starts, position, side="right")) - 1
        return splits[part].source.open(position - int(starts[part]))

    return Split(
        Source(
            [name for one in splits for name in one.source.names],
            opened,
            [digest for one in splits for digest in one.source.hashes],
        ),
        torch.cat([one.labels for one in splits]),
        [side for one in splits for side in one.sides],
        clients=(
            None
            if any(one.clients is None for one in splits)
            else tuple(word for one in splits for word in one.clients or ())
        ),
    )
