import hashlib
import os
import pickle
import tarfile
import urllib.error
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
from torchvision.datasets import CIFAR100

from fedlens.data.sources import cifar100
from fedlens.errors import FedlensError

NAMES = ("train", "test", "meta")


def one_sentence(error: pytest.ExceptionInfo[FedlensError]) -> str:
    text = str(error.value)
    assert text.endswith((".", "?"))
    assert "\n" not in text
    return text


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A CIFAR-100 of six images whose hashes pass for the official ones, in its archive."""
    draw = np.random.default_rng(0)
    contents = {
        "train": {"data": draw.integers(0, 256, (4, 3072), np.uint8), "fine_labels": [3, 1, 0, 2]},
        "test": {"data": draw.integers(0, 256, (2, 3072), np.uint8), "fine_labels": [1, 1]},
        "meta": {"fine_label_names": ["apple", "bee", "can", "dog"]},
    }
    source, root = tmp_path / "source" / cifar100.FOLDER, tmp_path / "root"
    source.mkdir(parents=True)
    root.mkdir()
    for name, content in contents.items():
        (source / name).write_bytes(pickle.dumps(content, protocol=4))
    with tarfile.open(root / cifar100.ARCHIVE, "w:gz") as archive:
        archive.add(source, cifar100.FOLDER)
    hashes = {name: hashlib.sha256((source / name).read_bytes()).hexdigest() for name in NAMES}
    monkeypatch.setattr(cifar100, "SHA256", hashes)
    packed = hashlib.md5((root / cifar100.ARCHIVE).read_bytes()).hexdigest()
    monkeypatch.setattr(CIFAR100, "tgz_md5", packed)
    return root


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr("urllib.request.urlopen", refuse)


@pytest.mark.usefixtures("offline")
def test_an_archive_put_there_by_hand_is_enough(tiny: Path) -> None:
    assert cifar100.verify(tiny) == dict.fromkeys(NAMES, "missing")
    data = cifar100.cifar100(tiny)
    assert data.classes == ("apple", "bee", "can", "dog")
    assert cifar100.verify(tiny) == dict.fromkeys(NAMES, "ok")
    train, test = data.load_train(), data.load_test()
    assert (len(train), len(test)) == (4, 2)
    assert train.labels.tolist() == [3, 1, 0, 2]
    raw = pickle.loads((tiny / cifar100.FOLDER / "train").read_bytes())["data"]
    assert np.array_equal(train.pixels.numpy().reshape(4, -1), raw)
    assert train.pixels.is_contiguous()
    assert sorted(path.name for path in tiny.iterdir()) == [cifar100.FOLDER, cifar100.ARCHIVE]


def test_the_test_file_is_not_unpickled_before_it_is_asked_for(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    content = cifar100._content

    def spy(root: Path, name: str) -> object:
        opened.append(name)
        return content(root, name)

    monkeypatch.setattr(cifar100, "_content", spy)
    data = cifar100.cifar100(tiny)
    data.load_train()
    assert data.classes
    assert set(opened) == {"train", "meta"}
    data.load_test()
    assert "test" in opened


@pytest.mark.usefixtures("offline")
def test_only_missing_files_are_filled_in(tiny: Path) -> None:
    cifar100.fetch(tiny)
    (tiny / cifar100.FOLDER / "test").unlink()
    kept = (tiny / cifar100.FOLDER / "train").stat().st_mtime_ns
    (tiny / cifar100.FOLDER / "notes.txt").write_text("mine")
    cifar100.fetch(tiny)
    assert set(cifar100.verify(tiny).values()) == {"ok"}
    assert (tiny / cifar100.FOLDER / "train").stat().st_mtime_ns == kept
    assert (tiny / cifar100.FOLDER / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", NAMES)
def test_a_corrupt_file_is_named_and_kept(tiny: Path, name: str) -> None:
    cifar100.fetch(tiny)
    path = tiny / cifar100.FOLDER / name
    path.write_bytes(b"mine")
    assert cifar100.verify(tiny)[name] == "corrupt"
    assert cifar100.cifar100(tiny).verify()[path] == "corrupt"
    with pytest.raises(FedlensError) as error:
        cifar100.cifar100(tiny).load_train()
    assert str(path) in one_sentence(error)
    assert path.read_bytes() == b"mine"


class Malicious:
    """Unpickling it calls a function of its choice."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("exit 1",)


def test_a_pickle_cannot_call_anything(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cifar100.fetch(tiny)
    bad = pickle.dumps({"fine_label_names": [Malicious()]}, protocol=4)
    (tiny / cifar100.FOLDER / "meta").write_bytes(bad)
    hashes = {**cifar100.SHA256, "meta": hashlib.sha256(bad).hexdigest()}
    monkeypatch.setattr(cifar100, "SHA256", hashes)  # even one that passes for official
    with pytest.raises(pickle.UnpicklingError, match="system is not part of CIFAR-100"):
        _ = cifar100.cifar100(tiny).classes


def test_the_name_of_the_data_in_records_has_not_changed(tmp_path: Path) -> None:
    digest = cifar100.cifar100(tmp_path).digest
    assert digest == hashlib.sha256(repr(sorted(cifar100.MD5.items())).encode()).hexdigest()
    assert sorted(cifar100.MD5) == sorted(cifar100.SHA256)


def test_a_corrupt_archive_is_named_and_kept(tiny: Path) -> None:
    (tiny / cifar100.ARCHIVE).write_bytes(b"half")
    with pytest.raises(FedlensError) as error:
        cifar100.cifar100(tiny).load_train()
    assert cifar100.ARCHIVE in one_sentence(error)
    assert (tiny / cifar100.ARCHIVE).read_bytes() == b"half"


@pytest.mark.usefixtures("offline")
def test_without_a_network_one_sentence_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FedlensError) as error:
        cifar100.cifar100(tmp_path).load_train()
    text = one_sentence(error)
    for hint in (str(tmp_path), cifar100.FOLDER, cifar100.ARCHIVE, "data fetch", "data=synthetic"):
        assert hint in text
    assert not list(tmp_path.rglob("*.gz"))


@pytest.fixture
def server(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder served as if it were the dataset's home page, holding the archive."""
    served = tiny.parent / "served"
    served.mkdir()
    (tiny / cifar100.ARCHIVE).rename(served / cifar100.ARCHIVE)

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=served)) as running:
        Thread(target=running.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{running.server_port}/{cifar100.ARCHIVE}"
        monkeypatch.setattr(CIFAR100, "url", address)
        yield served
        running.shutdown()


@pytest.mark.usefixtures("server")
def test_what_is_missing_is_downloaded_on_first_use(tiny: Path) -> None:
    assert len(cifar100.cifar100(tiny).load_train()) == 4
    assert [path.name for path in tiny.iterdir()] == [cifar100.FOLDER]


def test_a_download_with_another_md5_is_not_kept(tiny: Path, server: Path) -> None:
    (server / cifar100.ARCHIVE).write_bytes(b"something else")
    with pytest.raises(FedlensError) as error:
        cifar100.cifar100(tiny).load_train()
    assert "corrupted" in one_sentence(error)
    assert set(cifar100.verify(tiny).values()) == {"missing"}
    assert [path.name for path in tiny.iterdir()] == [cifar100.FOLDER]


def test_root_is_the_argument_then_the_environment_then_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDLENS_DATA", str(tmp_path / "named"))
    monkeypatch.setenv("FEDLENS_CACHE", str(tmp_path / "cache"))
    assert cifar100.locate(tmp_path / "given") == tmp_path / "given"
    assert cifar100.locate() == tmp_path / "named"
    monkeypatch.delenv("FEDLENS_DATA")
    assert cifar100.locate() == tmp_path / "cache" / "data"


@pytest.mark.usefixtures("offline")
def test_nothing_is_fetched_before_something_is_loaded(tmp_path: Path) -> None:
    states = cifar100.cifar100(tmp_path / "nowhere").verify()
    assert set(states.values()) == {"missing"}
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.slow
def test_the_real_files() -> None:
    if "FEDLENS_DATA" not in os.environ or "missing" in cifar100.verify().values():
        pytest.skip("FEDLENS_DATA names no folder with cifar-100-python")
    assert set(cifar100.verify().values()) == {"ok"}
    data = cifar100.cifar100()
    assert data.name == "cifar100"
    assert len(data.classes) == 100
    assert data.classes[:2] == ("apple", "aquarium_fish")
    train = data.load_train()
    for images, count in ((train, 50_000), (data.load_test(), 10_000)):
        assert images.pixels.shape == (count, 3, 32, 32)
        assert images.pixels.dtype == torch.uint8
        assert images.pixels.is_contiguous()
        assert torch.equal(images.labels.bincount(), torch.full((100,), count // 100))
    mean = train.pixels.sum((0, 2, 3), dtype=torch.int64) / (50_000 * 32 * 32 * 255)
    assert torch.allclose(mean, torch.tensor([0.5071, 0.4865, 0.4409]), atol=1e-4)
