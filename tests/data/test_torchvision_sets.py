"""`data=torchvision:NAME`, on tiny files in torchvision's own layout; no network is needed."""

import pickle
import struct
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision import datasets

from fedlens.config.compose import compose
from fedlens.config.identity import run_name
from fedlens.config.labels import labels
from fedlens.data.images import MappedPixels
from fedlens.data.known_sizes import TORCHVISION
from fedlens.data.sources import torchvision_sets
from fedlens.data.sources.torchvision_sets import SETS, torchvision
from fedlens.errors import FedlensError
from fedlens.registry import dataset
from fedlens.suites.estimates.cost import dataset_sizes
from tests.data.pictures import picture


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLENS_CACHE", str(tmp_path / "cache"))


def fashion_mnist(root: Path) -> None:
    """Twenty and ten grey images of 28×28, as IDX files."""
    raw = root / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for prefix, count in (("train", 20), ("t10k", 10)):
        pixels = np.arange(count, dtype=np.uint8)[:, None, None].repeat(28, 1).repeat(28, 2)
        header = struct.pack(">HBBIII", 0, 8, 3, count, 28, 28)
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        numbers = (np.arange(count) % 10).astype(np.uint8)
        header = struct.pack(">HBBI", 0, 8, 1, count)
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(header + numbers.tobytes())


def cifar10(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of ten images; the official md5 sums are those of other files, so they are set."""
    folder = root / datasets.CIFAR10.base_folder
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    names = [f"data_batch_{number}" for number in range(1, 6)]
    for name in (*names, "test_batch"):
        content = {
            "data": rng.integers(0, 256, (10, 3072), dtype=np.uint8),
            "labels": list(range(10)),
        }
        (folder / name).write_bytes(pickle.dumps(content))
    words = {"label_names": [f"class {number}" for number in range(10)]}
    (folder / "batches.meta").write_bytes(pickle.dumps(words))
    monkeypatch.setattr(datasets.CIFAR10, "train_list", [[name, None] for name in names])
    monkeypatch.setattr(datasets.CIFAR10, "test_list", [["test_batch", None]])
    meta = {**datasets.CIFAR10.meta, "md5": None}
    monkeypatch.setattr(datasets.CIFAR10, "meta", meta)


def eurosat(root: Path) -> None:
    for label, name in enumerate(("Forest", "River")):
        folder = root / "eurosat" / "2750" / name
        folder.mkdir(parents=True)
        for number in range(10):
            picture(label, 16, 16, number).save(folder / f"{name}_{number}.jpg")
    (root / "eurosat" / "EuroSAT.zip").write_bytes(b"the archive is not part of the content")


def dtd(root: Path) -> None:
    base = root / "dtd" / "dtd"
    (base / "labels").mkdir(parents=True)
    for split, numbers in (("train", range(3)), ("val", range(3, 5)), ("test", range(5, 7))):
        lines = []
        for label, name in enumerate(("banded", "dotted")):
            (base / "images" / name).mkdir(parents=True, exist_ok=True)
            for number in numbers:
                picture(label, 20 + number, 24, number).save(
                    base / "images" / name / f"{number}.jpg"
                )
                lines.append(f"{name}/{number}.jpg")
        (base / "labels" / f"{split}1.txt").write_text("\n".join(lines))


def test_grey_images_keep_their_size_and_get_three_channels(tmp_path: Path) -> None:
    fashion_mnist(tmp_path)
    data = torchvision(tmp_path, 224, dataset="FashionMNIST")
    train, test = data.load_train(), data.load_test()
    assert isinstance(train.pixels, torch.Tensor)  # small images of one size: in memory
    assert train.pixels.shape == (20, 3, 28, 28)
    assert train.pixels[7].unique().tolist() == [7]
    assert train.labels.tolist() == [number % 10 for number in range(20)]
    assert len(test) == 10
    assert data.classes[9] == "Ankle boot"


def test_a_named_size_is_honoured(tmp_path: Path) -> None:
    fashion_mnist(tmp_path)
    data = torchvision(tmp_path, 224, dataset="FashionMNIST", size=14)
    assert data.load_train().pixels.shape == (20, 3, 14, 14)
    assert data.digest != torchvision(tmp_path, 224, dataset="FashionMNIST").digest


def test_cifar10_is_read_as_torchvision_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cifar10(tmp_path, monkeypatch)
    data = torchvision(tmp_path, dataset="CIFAR10")
    theirs = datasets.CIFAR10(tmp_path, train=True)
    train = data.load_train()
    assert train.pixels.shape == (50, 3, 32, 32)
    assert np.array_equal(train.pixels[13].permute(1, 2, 0).numpy(), theirs.data[13])
    assert train.labels.tolist() == theirs.targets
    assert data.classes[3] == "class 3"


def test_a_set_without_a_test_split_is_split_alike_every_time(tmp_path: Path) -> None:
    eurosat(tmp_path)
    data = torchvision(tmp_path, 64, dataset="EuroSAT")
    train, test = data.load_train(), data.load_test()
    assert torch.bincount(train.labels).tolist() == [8, 8]
    assert torch.bincount(test.labels).tolist() == [2, 2]
    assert isinstance(train.pixels, MappedPixels)
    assert train.pixels.shape[-1] == 16  # never stored larger than it is
    (tmp_path / "eurosat" / "EuroSAT.zip").unlink()
    assert torchvision(tmp_path, 64, dataset="EuroSAT").digest == data.digest


def test_validation_images_are_training_images(tmp_path: Path) -> None:
    dtd(tmp_path)
    data = torchvision(tmp_path, 16, dataset="DTD")
    assert (len(data.load_train()), len(data.load_test())) == (10, 4)
    assert data.classes == ("banded", "dotted")
    states = data.verify()
    assert len(states) == 14
    assert set(states.values()) == {"ok"}


def test_a_missing_set_without_a_network_is_said_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "fedlens.data.sources.torchvision_sets"
    monkeypatch.setattr(f"{module}.unreachable", lambda url: "no network")
    with pytest.raises(FedlensError) as refused:
        torchvision(tmp_path, dataset="SVHN")
    assert str(refused.value) == (
        f"torchvision's SVHN is not complete in {tmp_path} and could not be downloaded (no "
        "network): run 'fedlens data fetch torchvision:SVHN' with a network, or copy its files "
        "there."
    )


def test_a_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "fedlens.data.sources.downloads.urllib.request.urlopen", lambda *a, **k: time.sleep(30)
    )
    started = time.monotonic()
    assert torchvision_sets.unreachable("http://localhost", 0.2) == "no answer within 0.2 seconds"
    assert time.monotonic() - started < 10


def test_a_download_is_moved_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(self: datasets.EuroSAT) -> None:
        if not self._check_exists():
            eurosat(Path(self.root))

    monkeypatch.setattr(datasets.EuroSAT, "download", download)
    monkeypatch.setattr("fedlens.data.sources.torchvision_sets.unreachable", lambda url: None)
    data = torchvision(tmp_path / "data", 16, dataset="EuroSAT")
    assert len(data.load_train()) == 16
    assert [one.name for one in (tmp_path / "data").iterdir()] == ["eurosat"]


def test_an_unknown_name_is_suggested() -> None:
    with pytest.raises(FedlensError, match="torchvision:CIFAR11 is unknown: did you mean 'CIFAR10"):
        torchvision(None, dataset="CIFAR11")


def test_the_name_is_in_the_run_and_its_label() -> None:
    config = compose("quickstart", ["data=torchvision:CIFAR10"])
    assert config.data.dataset == "CIFAR10"
    assert "_torchvision-CIFAR10_" in run_name(config)
    assert labels(config)["data"] == "CIFAR10"
    assert dataset.spelled(config.data) == "torchvision:CIFAR10"
    sizes = {"classes": 10, "train_images": 50_000, "test_images": 10_000}
    assert dataset_sizes(config.data) == sizes


def test_every_set_has_a_class_and_published_sizes() -> None:
    assert SETS.keys() == TORCHVISION.keys()
    assert all(hasattr(datasets, name) for name in SETS)
