"""A folder of images in many formats goes through a federated run to a report."""

import json
from pathlib import Path

import pytest

from tests.data import pictures
from tests.integration.conftest import Call

RUN = [
    "run",
    "quickstart_fedavg",
    "data=folder",
    "backbone.pretrained=false",
    "federated.clients=2",
    "federated.participation=1.0",
    "federated.rounds=2",
    "federated.local_steps=2",
    "train.batch_size=8",
    "evaluate.every=1",
    "threads=1",
]


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDLENS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return pictures.folder(tmp_path / "photos", 10)


def clients_file(photos: Path, modulus: int) -> Path:
    path = photos.parent / "clients.csv"
    names = sorted(one.relative_to(photos).as_posix() for one in photos.rglob("*.*"))
    owners = (("ann", "bob")[int(Path(name).stem) % modulus == 0] for name in names)
    path.write_text("".join(f"{n},{c}\n" for n, c in zip(names, owners, strict=True)))
    return path


def test_from_a_folder_to_a_report(photos: Path, fedlens: Call, unsaved_figures: None) -> None:
    assert fedlens("data", "verify", "folder", "--root", "photos")[0] == 0
    code, printed, _ = fedlens("data", "describe", "folder", "data.size=16", "--root", "photos")
    assert code == 0
    assert "24, (3, 16, 16) uint8" in printed
    clients = clients_file(photos, 2)
    given = ["partition=key", f"partition.file={clients}"]
    code, printed, error = fedlens(*RUN, "data.root=photos", *given)
    assert code == 0, error
    (run,) = Path("runs").iterdir()
    assert "_folder-photos_" in run.name
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["inputs"].keys() == {"data", "weights", "partition"}
    assert json.loads((run / "partition.json").read_text())["statistics"]["clients"] == 2
    code, _, error = fedlens("report", "runs", "--out", "report")
    assert code == 0, error
    assert "photos" in Path("report", "index.html").read_text()

    (run / "result.json").unlink()  # as if it had been stopped before its end
    clients_file(photos, 3)
    code, _, error = fedlens("resume", str(run))
    assert code != 0
    assert "began with different partition (the hashes differ)" in error
    clients_file(photos, 2)
    pictures.picture(2, 30, 30).save(photos / "apple" / "0.png")
    code, _, error = fedlens("resume", str(run))
    assert code != 0
    assert "began with different data (the hashes differ)" in error


def test_bad_input_is_one_sentence_without_a_traceback(photos: Path, fedlens: Call) -> None:
    (photos / "apple" / "broken.jpg").write_bytes(b"nothing")
    code, _, error = fedlens(*RUN, "data.root=photos")
    assert code != 0
    assert "broken.jpg cannot be read as an image" in error
    assert "Traceback" not in error


def test_the_picture_of_a_given_partition(photos: Path, fedlens: Call) -> None:
    given = ["partition=key", f"partition.file={clients_file(photos, 2)}"]
    words = ["quickstart_fedavg", "data=folder", "data.root=photos", *given]
    code, printed, error = fedlens(
        "data", "partition", *words, "federated.clients=2", "--figure", "partition.png"
    )
    assert code == 0, error
    assert "2 clients" in printed
    assert Path("partition.png").stat().st_size > 1000
    code, _, error = fedlens("data", "partition", *words, "federated.clients=3")
    assert code != 0
    assert "has 2 clients, not 3: set federated.clients=2" in error
