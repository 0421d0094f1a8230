"""`data=folder`: classes by folders, a fixed test split, a digest of the content, refusals."""

import shutil
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset as TorchDataset

import fedlens as fl
from fedlens.config.compose import compose
from fedlens.config.identity import identity, run_name
from fedlens.config.labels import labels
from fedlens.data.images import Dataset, Images, MappedPixels
from fedlens.data.sources.folder import folder as open_folder
from fedlens.errors import FedlensError
from fedlens.experiments.preparation.local_data import dataset, training_images
from fedlens.suites.estimates.cost import dataset_sizes
from tests.data import pictures


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLENS_CACHE", str(tmp_path / "cache"))


def test_train_and_test_folders(tmp_path: Path) -> None:
    data = open_folder(pictures.folder(tmp_path / "photos", 4, splits=("train", "test")), 16)
    train, test = data.load_train(), data.load_test()
    assert data.classes == pictures.CLASSES
    assert train.labels.tolist() == test.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert train.names is not None
    assert train.names[0].startswith("train/apple/")
    assert train.pixels.shape == (12, 3, 16, 16)
    assert isinstance(train.pixels, MappedPixels)
    colour = train.pixels[torch.tensor([0, 4, 8])].float().mean((2, 3)).argmax(1)
    assert colour.tolist() == [0, 1, 2]  # 0.png of each class, whose bright channel says it


def test_one_folder_is_split_in_every_class(tmp_path: Path) -> None:
    data = open_folder(pictures.folder(tmp_path / "photos", 8), 16, test_fraction=0.25)
    train, test = data.load_train(), data.load_test()
    assert torch.bincount(train.labels).tolist() == [6, 6, 6]
    assert torch.bincount(test.labels).tolist() == [2, 2, 2]
    assert set(train.names or ()).isdisjoint(test.names or ())
    again = open_folder(tmp_path / "photos", 16, test_fraction=0.25)
    assert again.load_test().names == test.names


def test_validation_folders_are_training_data_beside_test_and_test_data_without(
    tmp_path: Path,
) -> None:
    root = pictures.folder(tmp_path / "photos", 2, splits=("train", "val", "test"))
    assert len(open_folder(root, 16).load_train()) == 12
    shutil.rmtree(root / "test")
    data = open_folder(root, 16)
    assert (len(data.load_train()), len(data.load_test())) == (6, 6)


def test_the_digest_is_of_the_content_not_of_the_place(tmp_path: Path) -> None:
    first = pictures.folder(tmp_path / "photos", 3)
    digest = open_folder(first, 16).digest
    shutil.copytree(first, tmp_path / "elsewhere" / "others")
    assert open_folder(tmp_path / "elsewhere" / "others", 16).digest == digest
    assert open_folder(first, 8).digest != digest  # other pixels
    assert open_folder(first, 16, crop="squash").digest != digest
    pictures.picture(1, 30, 30, seed=9).save(first / "apple" / "0.png")
    assert open_folder(first, 16).digest != digest


def test_images_are_never_stored_larger_than_they_are(tmp_path: Path) -> None:
    root = tmp_path / "small"
    for label, name in enumerate("ab"):
        (root / name).mkdir(parents=True)
        for number in range(5):
            pictures.picture(label, 12, 12, number).save(root / name / f"{number}.png")
    assert open_folder(root, 224).load_train().pixels.shape[-1] == 12
    assert open_folder(root, 8).load_train().pixels.shape[-1] == 8
    assert open_folder(root, 224, size=20).load_train().pixels.shape[-1] == 20


def one_class(root: Path) -> None:
    pictures.folder(root, 2)
    shutil.rmtree(root / "apple")
    shutil.rmtree(root / "birch")


def one_image(root: Path) -> None:
    (root / "a").mkdir(parents=True)
    pictures.picture(0, 9, 9).save(root / "a" / "1.png")


def empty_class(root: Path) -> None:
    (pictures.folder(root, 2) / "dune").mkdir()


def no_classes(root: Path) -> None:
    root.mkdir()
    pictures.picture(0, 9, 9).save(root / "1.png")


def corrupt(root: Path) -> None:
    (pictures.folder(root, 2) / "apple" / "broken.png").write_bytes(b"not an image")


def unknown_in_test(root: Path) -> None:
    pictures.folder(root, 2, splits=("train", "test"))
    (root / "test" / "apple").rename(root / "test" / "dune")


def without_test(root: Path) -> None:
    pictures.folder(root, 2, splits=("train",))


def single_image_of_a_class(root: Path) -> None:
    for path in sorted((pictures.folder(root, 2) / "birch").iterdir())[1:]:
        path.unlink()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: None, "is not a folder: set data.root"),
        (no_classes, "has no folders of classes: put the images of each class into a folder"),
        (one_class, "has only one class, 'cloud': a classifier needs at least two"),
        (one_image, "has one image only: give at least two images"),
        (empty_class, "dune has no images: add some, or remove the empty folder"),
        (corrupt, "broken.png cannot be read as an image .it is not an image that Pillow knows"),
        (unknown_in_test, "test/dune is of class 'dune', which .*train does not have"),
        (without_test, "has train/ but no test/: add test/, or set data.root="),
        (single_image_of_a_class, "has only one image of class 'birch', which cannot be in both"),
    ],
)
def test_bad_folders_get_one_sentence(tmp_path: Path, make: object, message: str) -> None:
    make(tmp_path / "photos")  # type: ignore[operator]
    with pytest.raises(FedlensError, match=message) as refused:
        open_folder(tmp_path / "photos", 16)
    assert "\n" not in str(refused.value)


def test_a_truncated_image_is_named_when_it_is_decoded(tmp_path: Path) -> None:
    root = pictures.folder(tmp_path / "photos", 3)
    path = root / "apple" / "0.png"
    path.write_bytes(path.read_bytes()[:-200])
    data = open_folder(root, 16)
    assert data.verify()[path] == "corrupt"
    with pytest.raises(FedlensError, match=r"apple.0\.png cannot be read as an image"):
        data.load_train()
        data.load_test()


def test_a_class_missing_in_test_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = pictures.folder(tmp_path / "photos", 2, splits=("train", "test"))
    shutil.rmtree(root / "test" / "birch")
    open_folder(root, 16)
    assert "has no test images of 'birch': test accuracy says nothing about them" in caplog.text


def test_other_files_are_left_out_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = pictures.folder(tmp_path / "photos", 3)
    (root / "apple" / "notes.txt").write_text("taken in spring")
    (root / "apple" / ".DS_Store").write_bytes(b"")
    assert "notes.txt" not in " ".join(open_folder(root, 16).load_train().names or ())
    assert "1 files below" in caplog.text


# --- what a run is


def test_the_folders_name_is_part_of_the_run_and_its_place_is_not(tmp_path: Path) -> None:
    def named(root: Path) -> tuple[str, dict[str, object], str]:
        config = compose("quickstart", ["data=folder", f"data.root={root}"])
        return run_name(config), identity(config), labels(config)["data"]

    here, there, other = (named(tmp_path / one) for one in ("photos", "elsewhere/photos", "scans"))
    assert here == there
    assert here[0] != other[0]
    assert "_folder-photos_" in here[0]
    assert (here[2], other[2]) == ("photos", "scans")


def test_a_folder_needs_its_root() -> None:
    with pytest.raises(FedlensError, match=r"data=folder needs data\.root"):
        compose("quickstart", ["data=folder"])


def test_the_backbone_says_the_size(tmp_path: Path) -> None:
    root = pictures.folder(tmp_path / "photos", 4)
    words = ["data=folder", f"data.root={root}", "backbone.resolution=8"]
    assert dataset(compose("quickstart", words)).load_train().pixels.shape[-1] == 8
    words = ["data=folder", f"data.root={root}", "data.size=10"]
    assert dataset(compose("quickstart", words)).load_train().pixels.shape[-1] == 10


def test_costs_count_the_files(tmp_path: Path) -> None:
    root = pictures.folder(tmp_path / "photos", 10)
    config = compose("quickstart", ["data=folder", f"data.root={root}"])
    expected = {"classes": 3, "train_images": 24, "test_images": 6}
    assert dataset_sizes(config.data) == expected
    gone = compose("quickstart", ["data=folder", f"data.root={tmp_path / 'gone'}"])
    assert dataset_sizes(gone.data)["classes"] == 100  # unknown: as CIFAR-100


def test_a_label_out_of_range_is_refused() -> None:
    wrong = Images(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 5, 0]))
    data = Dataset("mine", "digest", lambda: ("a", "b"), lambda: wrong, lambda: wrong)
    with pytest.raises(FedlensError, match="has the label 5, and its 2 classes are numbered"):
        training_images(compose("quickstart", []), data)


# --- the library


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1, 2, 1], "The label 2 is out of range: the model has 2 outputs"),
        ([0, 1, -1, 1], "labels has -1: classes are whole numbers from 0"),
        ([0, 1, 0.5, 1], "labels has fractions"),
        ([0, 1, 1], "give as many labels as inputs"),
    ],
)
def test_bad_labels_of_arrays_get_one_sentence(labels: list[float], message: str) -> None:
    clients = fl.partition([0, 1, 0, 1], clients=2)
    with pytest.raises(FedlensError, match=message):
        fed = fl.fedavg(
            torch.nn.Linear(3, 2), (torch.rand(4, 3), labels), clients,
            lr=0.1, local_steps=2, batch_size=2,
        )  # fmt: skip
        fed.apply(fed.init(), fed.sample(fed.init(), participation=1.0))


class Photos(TorchDataset):  # type: ignore[type-arg]
    """A dataset of Pillow images of unequal sizes."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, position: int) -> tuple[object, int]:
        return pictures.picture(position % 2, 9 + position, 8, position), position % 2


def test_a_torch_dataset_of_unequal_images_trains() -> None:
    examples = fl.images(Photos(), size=6)
    clients = fl.partition(examples.labels, clients=2)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(108, 2))
    fed = fl.fedavg(model, examples, clients, lr=0.1, local_steps=1, batch_size=2)
    state, _ = fed.apply(fed.init(), fed.sample(fed.init(), participation=1.0))
    assert state.round == 1


def test_a_folder_and_its_images_give_the_same_examples(tmp_path: Path) -> None:
    from torchvision.datasets import ImageFolder

    root = tmp_path / "photos"
    for label, name in enumerate("ab"):
        (root / name).mkdir(parents=True)
        for number in range(3):
            pictures.picture(label, 9, 11, number).save(root / name / f"{number}.png")
    every = torch.arange(6)
    one, other = fl.images(root, size=6), fl.images(ImageFolder(root), size=6)
    assert torch.equal(one.batch(every), other.batch(every))
    assert torch.equal(one.labels, other.labels)


def test_more_than_fits_goes_into_a_temporary_file(monkeypatch: pytest.MonkeyPatch) -> None:
    in_memory = fl.images(Photos(), size=6)
    monkeypatch.setattr("fedlens.data.sources.own_images.IN_MEMORY", 10)
    in_a_file = fl.images(Photos(), size=6)
    assert isinstance(in_a_file.images.pixels, MappedPixels)
    assert torch.equal(in_a_file.batch(torch.arange(6)), in_memory.batch(torch.arange(6)))


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ((pictures.picture(0, 4, 4), -1), "The label of image 0 is -1"),
        ((pictures.picture(0, 4, 4), 0.5), "The label of image 0 is 0.5"),
        ((torch.zeros(3, 4, 4), 0), r"has shape \(4, 4, 3\) and type float32"),
        ((7,), "Item 0 of data is not a pair"),
    ],
)
def test_bad_items_get_one_sentence(item: object, message: str) -> None:
    with pytest.raises(FedlensError, match=message):
        fl.images([item], size=4)  # type: ignore[list-item]
