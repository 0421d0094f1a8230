"""Partitions that the data or a file give: by client ids, by names, by positions."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import fedlens as fl
from fedlens.config.compose import compose
from fedlens.config.identity import identity, run_name
from fedlens.config.schema import Config
from fedlens.data.images import Dataset, Images
from fedlens.data.partitions.shards import read_node, read_server
from fedlens.errors import FedlensError
from fedlens.experiments.preparation.local_data import training_images, whole, write_shards
from tests.data import pictures


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLENS_CACHE", str(tmp_path / "cache"))


def lists(path: Path, content: object) -> str:
    path.write_text(json.dumps(content))
    return str(path)


def test_three_formats_say_the_same(tmp_path: Path) -> None:
    holder = [2, 0, 1, 0, 2, 2]
    json_file = lists(tmp_path / "p.json", [[1, 3], [2], [0, 4, 5]])
    np.save(tmp_path / "p.npy", np.array(holder))
    (tmp_path / "p.csv").write_text("client\n" + "\n".join(map(str, holder)) + "\n")
    for file in (json_file, str(tmp_path / "p.npy"), str(tmp_path / "p.csv")):
        clients = fl.partition([0] * 6, by="file", file=file)
        assert [clients.shard(k).tolist() for k in range(3)] == [[1, 3], [2], [0, 4, 5]]


def test_client_ids_are_sorted_numbers_or_words() -> None:
    by_number = fl.partition([0, 0, 0], by="key", keys=["10", "9", "10"])
    assert by_number.shard(0).tolist() == [1]
    by_word = fl.partition([0, 0, 0], by="key", keys=["bob", "ann", "bob"], clients=2)
    assert by_word.shard(1).tolist() == [0, 2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([[0, 1], [2]], "gives 1 of 4 training images to no client, such as image 3"),
        ([[0, 1], [1, 2, 3]], "gives image 1 to client 0 and to client 1"),
        ([[0, 1], [2, 4]], "has position 4, but the 4 training images are numbered from 0 to 3"),
        ([[0, 1, 2, 3], []], "gives client 1 no images"),
        ({"a": [0]}, "is not a list of lists of positions"),
        ([[0, "1"]], "is not a list of lists of positions"),
    ],
)
def test_bad_lists_get_one_sentence(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(FedlensError, match=message):
        fl.partition([0] * 4, by="file", file=lists(tmp_path / "p.json", content))


def test_wrong_lengths_and_numbers_get_one_sentence(tmp_path: Path) -> None:
    np.save(tmp_path / "p.npy", np.zeros(3, dtype=int))
    with pytest.raises(FedlensError, match="has 3 client ids and the dataset has 4 training"):
        fl.partition([0] * 4, by="file", file=str(tmp_path / "p.npy"))
    np.save(tmp_path / "p.npy", np.zeros(4))
    with pytest.raises(FedlensError, match="float64: give one whole number or word"):
        fl.partition([0] * 4, by="file", file=str(tmp_path / "p.npy"))
    with pytest.raises(FedlensError, match=r"cannot be read as a partition \(No such file"):
        fl.partition([0] * 4, by="file", file=str(tmp_path / "gone.csv"))
    with pytest.raises(FedlensError, match=r"has 2 clients, not 3: set federated\.clients=2"):
        fl.partition([0] * 4, by="key", keys="abab", clients=3)
    with pytest.raises(FedlensError, match="There are 2 client ids for 4 samples"):
        fl.partition([0] * 4, by="key", keys="ab")
    with pytest.raises(FedlensError, match="partition=key needs a client for each image"):
        fl.partition([0] * 4, by="key")
    with pytest.raises(FedlensError, match="clients is missing"):
        fl.partition([0] * 4)


# --- in an experiment


def folder_by_hand(tmp_path: Path) -> tuple[Path, Path]:
    """Eight images of each of three classes, and clients.csv: even numbers are ann's."""
    root = pictures.folder(tmp_path / "photos", 8, splits=("train", "test"))
    table = tmp_path / "clients.csv"
    names = sorted(one.relative_to(root).as_posix() for one in root.rglob("*.*"))
    owners = {name: "ann" if int(Path(name).stem) % 2 == 0 else "bob" for name in names}
    table.write_text("image,client\n" + "".join(f"{n},{c}\n" for n, c in owners.items()))
    return root, table


def configured(root: Path, *words: str, clients: int = 2):  # type: ignore[no-untyped-def]
    return compose(
        "quickstart_fedavg",
        ["data=folder", f"data.root={root}", f"federated.clients={clients}", *words],
    )


def test_a_file_of_owners_decides_who_trains_on_what(tmp_path: Path) -> None:
    root, table = folder_by_hand(tmp_path)
    data = whole(configured(root, "partition=key", f"partition.file={table}"))
    assert data.partition is not None
    assert len(data.train_index) + len(data.validation_index) == 24
    for client, parity in ((0, 0), (1, 1)):
        positions = data.train_index[data.partition.shard(client)].tolist()
        assert {int(Path((data.images.names or ())[one]).stem) % 2 for one in positions} == {parity}


def test_a_missing_image_is_named(tmp_path: Path) -> None:
    root, table = folder_by_hand(tmp_path)
    text = table.read_text().replace("train/birch/0.png,ann\n", "")
    table.write_text(text)
    config = configured(root, "partition=key", f"partition.file={table}")
    with pytest.raises(FedlensError, match=r"does not name a client for train/birch/0\.png"):
        whole(config)


def test_positions_are_those_before_validation_is_held_out() -> None:
    labels = torch.arange(40) % 2
    keys = tuple("ab"[n // 20] for n in range(40))
    images = Images(torch.zeros(40, 3, 4, 4, dtype=torch.uint8), labels, clients=keys)
    data = Dataset("mine", "digest", lambda: ("x", "y"), lambda: images, lambda: images)
    config = compose("quickstart_fedavg", ["partition=key", "federated.clients=2"])
    _, train, validation, clients = training_images(config, data)
    assert clients is not None
    assert len(validation) == 4
    assert train[clients.shard(0)].tolist() == [n for n in range(20) if n not in validation]
    assert train[clients.shard(1)].tolist() == [n for n in range(20, 40) if n not in validation]


def test_no_client_loses_its_last_image_to_validation() -> None:
    keys = tuple(str(n) for n in range(40))  # a client for every image
    images = Images(
        torch.zeros(40, 3, 4, 4, dtype=torch.uint8), torch.arange(40) % 2, clients=(*keys,)
    )
    data = Dataset("mine", "digest", lambda: ("x", "y"), lambda: images, lambda: images)
    config = compose("quickstart_fedavg", ["partition=key", "federated.clients=40"])
    _, train, validation, clients = training_images(config, data)
    assert clients is not None
    assert (len(train), len(validation)) == (40, 0)
    assert clients.sizes.tolist() == [1] * 40


def test_another_file_of_the_same_name_is_another_input(tmp_path: Path) -> None:
    root, table = folder_by_hand(tmp_path)
    config = configured(root, "partition=key", f"partition.file={table}")
    before = whole(config).partition_digest
    assert before is not None
    assert whole(config).partition_digest == before
    table.write_text(table.read_text().replace("train/apple/0.png,ann", "train/apple/0.png,bob"))
    assert whole(config).partition_digest != before
    assert whole(configured(root)).partition_digest is None  # drawn by the seed


def test_the_files_name_is_part_of_the_run_and_its_place_is_not(tmp_path: Path) -> None:
    one, other = (
        configured(tmp_path, "partition=file", f"partition.file={tmp_path / place}")
        for place in ("a/split.json", "b/split.json")
    )
    assert identity(one) == identity(other)
    assert "clients-of-split.json" in run_name(one)


def test_nodes_are_sent_names_and_simulated_clients_paths(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="the extra fedlens[flower] is not installed")
    from fedlens.config.compose import from_yaml
    from fedlens.experiments.flower.setup import NodeSettings, encode_setup, read_client_part

    def as_node(text: str) -> Config:
        return read_client_part(text, NodeSettings())

    def as_simulated(text: str) -> Config:
        return from_yaml(text, "what was sent")

    given = ["partition=file", f"partition.file={tmp_path / 'split.json'}"]
    for engine, read, root, file in (
        ("flower", as_node, "photos", "split.json"),
        ("flower_simulation", as_simulated, str(tmp_path / "photos"), str(tmp_path / "split.json")),
    ):
        config = configured(tmp_path / "photos", *given, f"engine={engine}")
        sent = read(encode_setup(config, None).config)
        assert (sent.data.root, sent.partition.file) == (root, file)
    central = compose("quickstart_fedavg", ["data.root=/mine", "engine=flower"])
    assert as_node(encode_setup(central, None).config).data.root is None


def test_shards_follow(tmp_path: Path) -> None:
    root, table = folder_by_hand(tmp_path)
    config = configured(root, "partition=key", f"partition.file={table}")
    assert write_shards(config, tmp_path / "federation", 2)
    assert not write_shards(config, tmp_path / "federation", 2)
    data = whole(config)
    assert data.partition is not None
    server = read_server(tmp_path / "federation" / "server")
    assert server.partition_digest == data.partition_digest
    for node in (0, 1):
        shard = read_node(tmp_path / "federation" / f"node-{node}")
        positions = data.train_index[data.partition.shard(node)]
        assert torch.equal(shard.images.pixels[:], data.images.pixels[positions])
