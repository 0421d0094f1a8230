"""CIFAR-100: 50,000 + 10,000 colour images of 32×32 pixels in 100 classes (Krizhevsky, 2009).

torchvision downloads the official archive. Its files are pickles: they are compared with their
SHA-256 and read by an unpickler that makes arrays, lists and words, and nothing else.
"""

import hashlib
import io
import os
import pickle
import urllib.request
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
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
from fedlens.paths import expanded
from fedlens.registry import dataset

FOLDER: str = CIFAR100.base_folder
ARCHIVE: str = CIFAR100.filename
TRAIN, TEST, META = "train", "test", "meta"
SHA256: dict[str, str] = {
    TRAIN: "735e79b04f092ca3d2e6d07f368c0a7d70d48c48d28865950cc24454cf45129b",
    TEST: "4b67687d9933c4db8f0831104447f15b93774f4f464bd0516f0f0f2ac83b7864",
    META: "a5d4786345c961390f865e93b434dbd5c6904ce880667e0cb888c97d449f28b9",
}
MD5: dict[str, str] = {  # of the same files, in the dataset's name in records
    **dict(CIFAR100.train_list),
    **dict(CIFAR100.test_list),
    CIFAR100.meta["filename"]: CIFAR100.meta["md5"],
}
# All that the files need; numpy's function for making an array has been in several modules.
RECONSTRUCT = np.empty(0).__reduce__()[0]
ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): RECONSTRUCT,
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
    complete = cache(partial(fetch, folder))  # looks for missing files once
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
    return expanded(named) if named else files.cache_dir() / "data"


def verify(root: Path | str | None = None) -> dict[str, Status]:
    """The state of each file, by the SHA-256 of the official ones."""
    folder = locate(root) / FOLDER
    return {name: _status(folder / name, sha256) for name, sha256 in SHA256.items()}


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
    state: Status = "missing"
    if archive.is_file():
        state = "ok" if check_integrity(archive, CIFAR100.tgz_md5) else "corrupt"
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


def _status(path: Path, sha256: str) -> Status:
    if not path.is_file():
        return "missing"
    return "ok" if files.sha256(path) == sha256 else "corrupt"


def _refuse_corrupt(root: Path, states: dict[str, Status]) -> None:
    for name, state in states.items():
        if state == "corrupt":
            path = root / name if name == ARCHIVE else root / FOLDER / name
            raise FedlensError(
                f"{path} is not the official file (its hash differs): move or delete it, then run "
                "'fedlens data fetch'."
            )


def _unavailable(root: Path, reason: str) -> FedlensError:
    return FedlensError(
        f"CIFAR-100 is not in {root} and could not be downloaded ({reason}): put the folder "
        f"{FOLDER} or the file {ARCHIVE} there, run 'fedlens data fetch' with a network, or use "
        "the synthetic benchmark, which works offline (data=synthetic)."
    )


class _Unpickler(pickle.Unpickler):
    """Reads what the official files are made of, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not part of CIFAR-100")
        return ALLOWED[module, name]


def _content(root: Path, name: str) -> dict[str, Any]:
    """The content of a file, whose very bytes are compared with the official hash first."""
    path = root / FOLDER / name
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != SHA256[name]:
        _refuse_corrupt(root, {name: "corrupt"})
    content: dict[str, Any] = _Unpickler(io.BytesIO(data), encoding="latin1").load()
    return content


def _class_names(root: Path) -> tuple[str, ...]:
    return tuple(_content(root, META)["fine_label_names"])


def _load(root: Path, *, train: bool) -> Images:
    content = _content(root, TRAIN if train else TEST)
    pixels = torch.from_numpy(content["data"].reshape(-1, 3, 32, 32)).contiguous()
    return Images(pixels, torch.tensor(content["fine_labels"], dtype=torch.int64))
