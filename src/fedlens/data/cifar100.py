"""CIFAR-100: 50,000 + 10,000 colour images of 32×32 pixels in 100 classes (Krizhevsky, 2009).

torchvision downloads, checks and reads the official files; this module makes one uint8 tensor.
"""

import hashlib
import os
import pickle
import urllib.request
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torchvision.datasets import CIFAR100
from torchvision.datasets.utils import (
    check_integrity,
    download_and_extract_archive,
    extract_archive,
)

from fedlens import files
from fedlens.data.images import Dataset, Images, Status
from fedlens.errors import FedlensError
from fedlens.registry import dataset

FOLDER: str = CIFAR100.base_folder
ARCHIVE: str = CIFAR100.filename
MD5: dict[str, str] = {
    **dict(CIFAR100.train_list),
    **dict(CIFAR100.test_list),
    CIFAR100.meta["filename"]: CIFAR100.meta["md5"],
}
TIMEOUT_S = 10  # of the first request, so that a missing network is reported soon


@dataset(
    label="CIFAR-100",
    paper="Krizhevsky, 2009, https://www.cs.toronto.edu/~kriz/learning-features-2009-TR.pdf",
    classes=100,
    train_images=50000,
    test_images=10000,
    image_size=32,
    order=1,
)
def cifar100(root: Path | str | None = None) -> Dataset:
    """100 classes of objects; missing files are downloaded on first use."""
    folder = locate(root)
    complete = cache(partial(fetch, folder))  # the md5 sums are compared once
    return Dataset(
        name="cifar100",
        digest=hashlib.sha256(repr(sorted(MD5.items())).encode()).hexdigest(),
        load_classes=lambda: _class_names(complete()),
        load_train=lambda: _load(complete(), train=True),
        load_test=lambda: _load(complete(), train=False),
        verify=lambda: {folder / FOLDER / name: state for name, state in verify(folder).items()},
    )


def locate(root: Path | str | None = None) -> Path:
    """The folder that holds `cifar-100-python`: the argument, else FEDLENS_DATA, else the cache."""
    named = root or os.environ.get("FEDLENS_DATA")
    return Path(named).expanduser() if named else files.cache_dir() / "data"


def verify(root: Path | str | None = None) -> dict[str, Status]:
    """The state of each file, by the official md5 sums."""
    folder = locate(root) / FOLDER
    return {name: _status(folder / name, md5) for name, md5 in MD5.items()}


def fetch(root: Path | str | None = None) -> Path:
    """Completes the dataset: existing files stay, missing ones are taken from the archive."""
    root = locate(root)
    states = verify(root)
    _refuse_corrupt(root, states)
    if missing := [name for name, state in states.items() if state == "missing"]:
        try:
            _extract(root, missing)
        except (OSError, RuntimeError) as error:
            raise _unavailable(root, str(error)) from error
    return root


def _extract(root: Path, missing: list[str]) -> None:
    """Unpacks to a temporary folder and moves each file, so that no file is ever half written."""
    archive = root / ARCHIVE
    state = _status(archive, CIFAR100.tgz_md5)
    _refuse_corrupt(root, {ARCHIVE: state})
    (root / FOLDER).mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=root, prefix=files.TEMPORARY) as scratch:
        if state == "ok":
            extract_archive(archive, scratch)
        else:
            request = urllib.request.Request(CIFAR100.url, method="HEAD")
            urllib.request.urlopen(request, timeout=TIMEOUT_S).close()
            download_and_extract_archive(
                CIFAR100.url, scratch, filename=ARCHIVE, md5=CIFAR100.tgz_md5
            )
        for name in missing:
            (Path(scratch) / FOLDER / name).replace(root / FOLDER / name)


def _status(path: Path, md5: str) -> Status:
    if not path.is_file():
        return "missing"
    return "ok" if check_integrity(path, md5) else "corrupt"


def _refuse_corrupt(root: Path, states: dict[str, Status]) -> None:
    for name, state in states.items():
        if state == "corrupt":
            path = root / name if name == ARCHIVE else root / FOLDER / name
            raise FedlensError(
                f"{path} is not the official file (its md5 differs): move or delete it, then run "
                "'fedlens data fetch'."
            )


def _unavailable(root: Path, reason: str) -> FedlensError:
    return FedlensError(
        f"CIFAR-100 is not in {root} and could not be downloaded ({reason}): put the folder "
        f"{FOLDER} or the file {ARCHIVE} there, run 'fedlens data fetch' with a network, or use "
        "the synthetic benchmark, which works offline (data=synthetic)."
    )


def _class_names(root: Path) -> tuple[str, ...]:
    # Unpickling is safe: the file's md5 has just been compared with the official sum.
    with (root / FOLDER / CIFAR100.meta["filename"]).open("rb") as stream:
        return tuple(pickle.load(stream, encoding="latin1")[CIFAR100.meta["key"]])


def _load(root: Path, *, train: bool) -> Images:
    source = CIFAR100(root, train=train)
    # torchvision views the stored planes as height × width × channels; this undoes it.
    pixels = torch.from_numpy(source.data.transpose(0, 3, 1, 2)).contiguous()
    return Images(pixels, torch.tensor(source.targets, dtype=torch.int64))
