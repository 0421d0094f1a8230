"""CIFAR-100: 50,000 + 10,000 colour images of 32×32 pixels in 100 classes (Krizhevsky, 2009).

torchvision downloads, checks and reads the official files; here they become one uint8 tensor.
"""

import hashlib
import os
import pickle
import urllib.request
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from torchvision.datasets import CIFAR100
from torchvision.datasets.utils import (
    check_integrity,
    download_and_extract_archive,
    extract_archive,
)

from fedlens import files
from fedlens.data.images import Dataset, Images
from fedlens.errors import FedlensError

Status = Literal["ok", "missing", "corrupt"]

FOLDER: str = CIFAR100.base_folder
ARCHIVE: str = CIFAR100.filename
MD5: dict[str, str] = {
    **dict(CIFAR100.train_list),
    **dict(CIFAR100.test_list),
    CIFAR100.meta["filename"]: CIFAR100.meta["md5"],
}
PATIENCE = 10  # seconds for the server's first answer: offline should be said soon


def dataset(root: Path | None = None, *, download: bool = True) -> Dataset:
    """CIFAR-100 under `root`; no image is read before `load_train` or `load_test` is called."""
    root = fetch(root) if download else _complete(locate(root))
    return Dataset(
        name="cifar100",
        classes=_class_names(root),
        digest=hashlib.sha256(repr(sorted(MD5.items())).encode()).hexdigest(),
        load_train=lambda: _load(root, train=True),
        load_test=lambda: _load(root, train=False),
    )


def locate(root: Path | None = None) -> Path:
    """The folder that holds `cifar-100-python`: the argument, else FEDLENS_DATA, else the cache."""
    named = root or os.environ.get("FEDLENS_DATA")
    return Path(named).expanduser() if named else files.cache_dir() / "data"


def verify(root: Path | None = None) -> dict[str, Status]:
    """Each file's state against the official md5 sums."""
    folder = locate(root) / FOLDER
    return {name: _status(folder / name, md5) for name, md5 in MD5.items()}


def fetch(root: Path | None = None) -> Path:
    """Makes the dataset complete: files in place stay, missing ones come from the archive."""
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
    """Unpacked beside the target and moved file by file, so an interruption leaves no half file."""
    archive = root / ARCHIVE
    held = _status(archive, CIFAR100.tgz_md5)
    _refuse_corrupt(root, {ARCHIVE: held})
    (root / FOLDER).mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=root, prefix=files.TEMPORARY) as scratch:
        if held == "ok":
            extract_archive(archive, scratch)
        else:
            request = urllib.request.Request(CIFAR100.url, method="HEAD")
            urllib.request.urlopen(request, timeout=PATIENCE).close()
            download_and_extract_archive(
                CIFAR100.url, scratch, filename=ARCHIVE, md5=CIFAR100.tgz_md5
            )
        for name in missing:
            (Path(scratch) / FOLDER / name).replace(root / FOLDER / name)


def _status(path: Path, md5: str) -> Status:
    if not path.is_file():
        return "missing"
    return "ok" if check_integrity(path, md5) else "corrupt"


def _complete(root: Path) -> Path:
    states = verify(root)
    _refuse_corrupt(root, states)
    if "missing" in states.values():
        raise _unavailable(root, "downloading is off")
    return root


def _refuse_corrupt(root: Path, states: dict[str, Status]) -> None:
    for name, state in states.items():
        if state == "corrupt":
            path = root / name if name == ARCHIVE else root / FOLDER / name
            raise FedlensError(
                f"{path} is not the official file (its md5 differs), and it is yours to keep or "
                "remove: move it away, then run 'fedlens data fetch'."
            )


def _unavailable(root: Path, reason: str) -> FedlensError:
    return FedlensError(
        f"CIFAR-100 is not in {root} and could not be fetched ({reason}): put the folder {FOLDER} "
        f"or the file {ARCHIVE} there, or run 'fedlens data fetch' where there is a network, or "
        "try data=synthetic, which works offline."
    )


def _class_names(root: Path) -> tuple[str, ...]:
    # A pickle, but a known one: its md5 has just been compared with the official sum.
    with (root / FOLDER / CIFAR100.meta["filename"]).open("rb") as stream:
        return tuple(pickle.load(stream, encoding="latin1")[CIFAR100.meta["key"]])


def _load(root: Path, *, train: bool) -> Images:
    source = CIFAR100(root, train=train)
    # torchvision turns the stored planes into a height × width × channel view; this turns it back.
    pixels = torch.from_numpy(source.data.transpose(0, 3, 1, 2)).contiguous()
    return Images(pixels, torch.tensor(source.targets, dtype=torch.int64))
