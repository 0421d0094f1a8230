"""`data=huggingface:…`: columns and splits found or named, of tables that lie on this disk."""

from pathlib import Path
from typing import Any

import pytest

from fedlens.config.compose import compose
from fedlens.config.identity import identity, run_name
from fedlens.data.sources.folder import folder as open_folder
from fedlens.data.sources.huggingface import huggingface
from fedlens.errors import FedlensError
from fedlens.experiments.preparation.local_data import whole
from tests.data import pictures

datasets = pytest.importorskip("datasets", reason="the extra fedlens[huggingface] is not installed")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLENS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "huggingface")
    datasets.utils.disable_progress_bars()


def table(root: Path, per_class: int = 6, **columns: Any) -> Any:
    """Pictures with labels and writers; a column that is None is left out."""
    paths = sorted(pictures.folder(root, per_class).rglob("*.*"))
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=pictures.CLASSES)}
    content = {
        "image": [str(path) for path in paths],
        "label": [path.parent.name for path in paths],
        "writer": [f"w{number % 4}" for number in range(len(paths))],
        **columns,
    }
    content = {name: values for name, values in content.items() if values is not None}
    made = datasets.Dataset.from_dict(content)
    for name in content.keys() & kinds.keys():
        made = made.cast_column(name, kinds[name])
    return made


def test_a_saved_table_is_split_and_has_the_digest_of_its_content(tmp_path: Path) -> None:
    table(tmp_path / "photos").save_to_disk(tmp_path / "saved")
    data = huggingface(None, 16, dataset=str(tmp_path / "saved"))
    assert data.classes == pictures.CLASSES
    assert (len(data.load_train()), len(data.load_test())) == (14, 4)
    same = open_folder(tmp_path / "photos", 16)
    assert data.digest == same.digest  # the same images, in the same order
    assert (data.load_train().pixels[:] == same.load_train().pixels[:]).all()


def test_splits_are_found(tmp_path: Path) -> None:
    made = table(tmp_path / "photos")
    parts = {"train": made, "validation": made.select(range(3)), "test": made.select(range(9))}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    data = huggingface(None, 16, dataset=str(tmp_path / "saved"))
    assert (len(data.load_train()), len(data.load_test())) == (21, 9)
    other = huggingface(None, 16, dataset=str(tmp_path / "saved"), test_split="validation")
    assert (len(other.load_train()), len(other.load_test())) == (18, 3)
    with pytest.raises(FedlensError, match=r"has no split 'tests' .*did you mean 'test'"):
        huggingface(None, 16, dataset=str(tmp_path / "saved"), test_split="tests")


def test_an_imagefolder_is_read(tmp_path: Path) -> None:
    pictures.folder(tmp_path / "photos", 4, splits=("train", "test"))
    data = huggingface(None, 16, dataset=str(tmp_path / "photos"))
    assert data.classes == pictures.CLASSES
    assert (len(data.load_train()), len(data.load_test())) == (12, 12)


def test_words_and_named_columns_are_labels(tmp_path: Path) -> None:
    made = table(tmp_path / "photos", label=None, kind=["b", "a", "c"] * 6)
    made.save_to_disk(tmp_path / "saved")
    path = str(tmp_path / "saved")
    with pytest.raises(FedlensError, match=r"has no column of labels; .*: set data\.label"):
        huggingface(None, 16, dataset=path)
    assert huggingface(None, 16, dataset=path, label="kind").classes == ("a", "b", "c")
    with pytest.raises(
        FedlensError, match=r"no column 'knid' \(data\.label\): did you mean 'kind'"
    ):
        huggingface(None, 16, dataset=path, label="knid")
    with pytest.raises(FedlensError, match=r"'kind' .* \(data\.image\) has no images"):
        huggingface(None, 16, dataset=path, image="kind", label="kind")


def test_a_table_without_images_is_refused(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]}).save_to_disk(tmp_path / "t")
    with pytest.raises(FedlensError, match="has no column of images; its columns are text, label"):
        huggingface(None, 16, dataset=str(tmp_path / "t"))


def test_a_path_that_is_not_there_and_one_that_is_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(FedlensError, match="does not exist: give the path of a dataset"):
        huggingface(None, 16, dataset=str(tmp_path / "gone"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(FedlensError, match="could not be loaded") as refused:
        huggingface(None, 16, dataset=str(tmp_path / "empty"))
    assert "\n" not in str(refused.value)


def test_a_name_without_a_network_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedlens.data.sources.huggingface.unreachable", lambda url: "no network")
    with pytest.raises(FedlensError, match=r"could not be downloaded \(no network\): run 'fedlens"):
        huggingface(None, 16, dataset="nobody/nothing-of-this-name")


def test_a_column_of_clients_is_a_partition(tmp_path: Path) -> None:
    table(tmp_path / "photos").save_to_disk(tmp_path / "saved")
    words = [f"data=huggingface:{tmp_path / 'saved'}", "data.client=writer", "partition=key"]
    data = whole(compose("quickstart_fedavg", [*words, "federated.clients=4"]))
    assert data.partition is not None
    for client in range(4):
        positions = data.train_index[data.partition.shard(client)].tolist()
        assert {(data.images.clients or ())[one] for one in positions} == {f"w{client}"}


def test_a_local_path_is_named_by_its_last_part() -> None:
    here, there, hub = (
        compose("quickstart", [f"data=huggingface:{name}"])
        for name in ("/here/digits", "/there/digits", "somebody/digits")
    )
    assert identity(here) == identity(there)
    assert run_name(here) == run_name(there)
    assert "_huggingface-digits_" in run_name(here)
    assert "_huggingface-somebody-digits_" in run_name(hub)
