"""Shards on disk: what the nodes hold together is the whole, place by place, and damage is seen."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlens import files
from fedlens.data.images import Dataset, Images
from fedlens.data.partitions import shards
from fedlens.data.partitions.partition import Partition, partition
from fedlens.data.partitions.partition_statistics import histogram
from fedlens.data.sources import synthetic
from fedlens.data.splits import stratified
from fedlens.errors import FedlensError

CLASSES = ("ant", "bee", "cat")
modest = settings(deadline=None, max_examples=25)


@dataclass(frozen=True)
class Whole:
    """All arguments of `write` but the folder and the number of nodes."""

    dataset: Dataset
    images: Images
    train_index: torch.Tensor
    validation_index: torch.Tensor
    test: Images
    partition: Partition
    partition_spec: dict[str, Any]


def random_images(count: int, seed: int) -> Images:
    draw = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (count, 3, 2, 2), generator=draw, dtype=torch.uint8)
    return Images(pixels, torch.randint(len(CLASSES), (count,), generator=draw))


def whole(
    *, count: int = 40, clients: int = 5, seed: int = 0, name: str = "quantity", share: float = 0.25
) -> Whole:
    images, test = random_images(count, seed), random_images(7, seed + 1)
    train, validation = stratified(images.labels, share, seed)
    keys = {} if name == "iid" else {"min_size": 1}
    made = partition(images.labels[train], clients=clients, by=name, seed=seed, **keys)
    dataset = Dataset("insects", "d1935", lambda: CLASSES, lambda: images, lambda: test)
    spec = {"seed": seed, "data": {"validation": share}, "partition": {"name": name}}
    return Whole(dataset, images, train, validation, test, made, spec)


def written(folder: Path, made: Whole, nodes: int = 2, **changed: Any) -> bool:
    return shards.write(folder, **{**vars(made), "nodes": nodes, **changed})


def content(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@contextmanager
def scratch() -> Iterator[Path]:
    """Hypothesis draws many examples in one test, each wants a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "federation"


def flattened(pixels: torch.Tensor) -> list[bytes]:
    return [one.numpy().tobytes() for one in pixels]


federations = st.builds(
    whole,
    count=st.integers(30, 60),
    clients=st.integers(1, 14),
    seed=st.integers(0, 99),
    name=st.sampled_from(["iid", "dirichlet", "quantity"]),
    share=st.sampled_from([0.0, 0.1, 0.4]),
)


@pytest.mark.slow
@modest
@given(federations, st.integers(1, 9))
def test_the_nodes_share_no_image_and_hold_all_of_them(made: Whole, nodes: int) -> None:
    nodes = min(nodes, len(made.partition))
    with scratch() as folder:
        assert written(folder, made, nodes)
        found = [shards.read_node(folder / f"node-{node}") for node in range(nodes)]
        pixels = [image for node in found for image in flattened(node.images.pixels)]
        assert sorted(pixels) == sorted(flattened(made.images.pixels[made.train_index]))
        clients = [client for node in found for client in node.clients]
        assert clients == list(range(len(made.partition)))
        sizes = [len(node.clients) for node in found]
        assert max(sizes) - min(sizes) <= 1
        assert sorted(p.name for p in folder.iterdir()) == sorted(
            ["server", *(f"node-{node}" for node in range(nodes))]
        )


@pytest.mark.slow
@modest
@given(federations, st.integers(1, 9))
def test_every_place_in_a_client_s_shard_is_the_same_image_everywhere(
    made: Whole, nodes: int
) -> None:
    nodes = min(nodes, len(made.partition))
    pixels, labels = made.images.pixels[made.train_index], made.images.labels[made.train_index]
    with scratch() as folder:
        written(folder, made, nodes)
        for node in range(nodes):
            found = shards.read_node(folder / f"node-{node}")
            assert found.images.pixels.dtype == torch.uint8
            assert found.images.labels.dtype == found.class_counts.dtype == torch.int64
            assert len(found.partition) == len(made.partition)
            for client in range(len(made.partition)):
                here = found.partition.shard(client)
                if client in found.clients:
                    there = made.partition.shard(client)
                    assert torch.equal(found.images.pixels[here], pixels[there])
                    assert torch.equal(found.images.labels[here], labels[there])
                else:
                    assert len(here) == 0
            counted = histogram(found.partition, found.images.labels, len(CLASSES))
            assert torch.equal(found.class_counts, counted)


@modest
@given(federations)
def test_the_server_has_counts_of_all_clients_and_no_training_image(made: Whole) -> None:
    with scratch() as folder:
        written(folder, made, 1)
        found = shards.read_server(folder / "server")
        labels = made.images.labels[made.train_index]
        assert torch.equal(found.class_counts, histogram(made.partition, labels, len(CLASSES)))
        assert torch.equal(found.partition.sizes, made.partition.sizes)
        assert len(found.partition.order) == len(made.train_index)
        assert torch.equal(found.validation.pixels, made.images.pixels[made.validation_index])
        assert torch.equal(found.validation.labels, made.images.labels[made.validation_index])
        assert found.validation.pixels.shape[1:] == made.images.pixels.shape[1:]
        test = found.load_test()
        assert torch.equal(test.pixels, made.test.pixels)
        assert torch.equal(test.labels, made.test.labels)
        assert {path.name for path in (folder / "server").iterdir()} == {
            "shard.json", "validation.safetensors", "test.safetensors",
        }  # fmt: skip


def test_a_shard_by_hand(tmp_path: Path) -> None:
    """Images 0 to 5, of which 1 is for validation; 0 2 3 4 5 are split as (3, 5), (0), (2, 4)."""
    pixels = torch.arange(6, dtype=torch.uint8).view(6, 1, 1, 1).expand(6, 3, 2, 2)
    images = Images(pixels.contiguous(), torch.tensor([0, 1, 2, 0, 1, 0]))
    made = Partition(torch.tensor([2, 4, 0, 1, 3]), torch.tensor([0, 2, 3, 5]))
    dataset = Dataset("insects", "d1935", lambda: CLASSES, lambda: images, lambda: images)
    shards.write(
        tmp_path,
        dataset=dataset,
        images=images,
        train_index=torch.tensor([0, 2, 3, 4, 5]),
        validation_index=torch.tensor([1]),
        test=images,
        partition=made,
        partition_spec={"seed": 3},
        nodes=2,
    )
    second = shards.read_node(tmp_path / "node-1")
    assert second.clients == (1, 2)
    assert second.images.pixels[:, 0, 0, 0].tolist() == [0, 2, 4]
    assert second.images.labels.tolist() == [0, 2, 1]
    assert second.partition.offsets.tolist() == [0, 0, 1, 3]
    assert second.class_counts.tolist() == [[0, 0, 0], [1, 0, 0], [0, 1, 1]]
    assert (second.dataset, second.classes, second.dataset_digest) == ("insects", CLASSES, "d1935")
    assert (second.partition_spec, second.nodes) == ({"seed": 3}, 2)
    about = json.loads((tmp_path / "node-0" / "shard.json").read_text())
    assert (about["version"], about["kind"]) == (1, "node")
    assert about["clients"] == {"0": {"examples": 2, "class_counts": [2, 0, 0]}}
    assert about["files"] == {
        "train.safetensors": files.sha256(tmp_path / "node-0" / "train.safetensors")
    }
    server = shards.read_server(tmp_path / "server")
    assert server.class_counts.tolist() == [[2, 0, 0], [1, 0, 0], [0, 1, 1]]
    assert server.validation.labels.tolist() == [1]


@given(st.integers(1, 200), st.integers(1, 200))
def test_clients_of_a_node_are_contiguous_and_balanced(clients: int, nodes: int) -> None:
    nodes = min(nodes, clients)
    homes = shards.clients_by_node(clients, nodes)
    assert [client for home in homes for client in home] == list(range(clients))
    assert {len(home) for home in homes} <= {clients // nodes, -(-clients // nodes)}


@pytest.mark.parametrize(("nodes", "message"), [(0, "must be 1 or more"), (6, "choose 5 or fewer")])
def test_too_few_or_too_many_nodes_are_refused(tmp_path: Path, nodes: int, message: str) -> None:
    with pytest.raises(FedlensError, match=message):
        written(tmp_path, whole(clients=5), nodes)
    assert not content(tmp_path)


def test_a_partition_of_other_images_is_a_mistake_of_the_caller(tmp_path: Path) -> None:
    made = whole()
    with pytest.raises(ValueError, match="training images"):
        written(tmp_path, made, train_index=torch.arange(len(made.images)))


def test_all_folders_of_a_federation_know_that_they_belong_together(tmp_path: Path) -> None:
    written(tmp_path / "one", whole(seed=0))
    written(tmp_path / "two", whole(seed=1))
    found: list[shards.NodeShard | shards.ServerShard] = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        found += [shards.read_node(folder / "node-0"), shards.read_node(folder / "node-1")]
        found += [shards.read_server(folder / "server")]
    assert (
        len({shard.partition_digest for shard in found[:3]})
        == len({shard.partition_digest for shard in found[3:]})
        == 1
    )
    assert found[0].partition_digest != found[3].partition_digest
    assert len({shard.digest for shard in found}) == 6


def test_a_copied_folder_reads_the_same_elsewhere(tmp_path: Path) -> None:
    written(tmp_path / "here", whole())
    shutil.copytree(tmp_path / "here" / "node-1", tmp_path / "there" / "mine")
    copied = shards.read_node(tmp_path / "there" / "mine")
    assert copied.digest == shards.read_node(tmp_path / "here" / "node-1").digest


def test_writing_again_changes_nothing_and_says_so(tmp_path: Path) -> None:
    made = whole()
    made.partition_spec["a pair"] = (1, 2)  # JSON makes a list of it
    assert written(tmp_path, made)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert not written(tmp_path, made)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_the_same_settings_give_the_same_bytes(tmp_path: Path) -> None:
    written(tmp_path / "one", whole())
    written(tmp_path / "two", whole())
    assert content(tmp_path / "one") == content(tmp_path / "two")


OTHERS: dict[str, tuple[Callable[[], Whole], int, str]] = {
    "seed": (lambda: whole(seed=1), 3, "its partition_spec.seed is 0, not 1"),
    "partition": (
        lambda: whole(name="iid"),
        3,
        "its partition_spec.partition.name is quantity, not iid",
    ),
    "fewer nodes": (whole, 2, "its nodes is 3, not 2"),
    "more nodes": (whole, 4, "its nodes is 3, not 4"),
}


@pytest.mark.parametrize("left", [("server", "node-0", "node-1", "node-2"), ("node-2",)])
@pytest.mark.parametrize("other", OTHERS)
def test_another_partition_is_refused_and_what_was_there_stays(
    tmp_path: Path, other: str, left: tuple[str, ...]
) -> None:
    written(tmp_path, whole(), 3)
    for path in tmp_path.iterdir():
        if path.name not in left:
            shutil.rmtree(path)
    before = content(tmp_path)
    make, nodes, message = OTHERS[other]
    with pytest.raises(FedlensError, match=f"another federation \\({message}\\): choose another"):
        written(tmp_path, make(), nodes)
    assert content(tmp_path) == before


def test_another_partition_of_the_same_settings_is_refused(tmp_path: Path) -> None:
    """As after a change of how partitions are drawn: the counts may agree, the images do not."""
    made = whole(clients=1)
    written(tmp_path, made, 1)
    turned = Partition(made.partition.order.flip(0), made.partition.offsets)
    with pytest.raises(FedlensError, match="its partition_digest is"):
        written(tmp_path, made, 1, partition=turned)


def stranger(path: Path) -> None:
    path.mkdir()
    (path / "thesis.txt").write_text("years of work")


def broken(path: Path) -> None:
    path.mkdir()
    (path / "shard.json").write_text('{"version": 1, "nodes": {')


def somebody_s(path: Path) -> None:
    path.mkdir()
    (path / "shard.json").write_text("[1, 2]")


def plain_file(path: Path) -> None:
    path.write_text("years of work")


@pytest.mark.parametrize("make", [stranger, broken, somebody_s, plain_file])
@pytest.mark.parametrize("name", ["node-1", "server"])
def test_what_is_not_ours_is_neither_replaced_nor_read(
    tmp_path: Path, make: Callable[[Path], None], name: str
) -> None:
    make(tmp_path / name)
    before = content(tmp_path)
    with pytest.raises(FedlensError, match="is not a shard that fedlens wrote"):
        written(tmp_path, whole())
    assert content(tmp_path) == before
    for read in (shards.read_node, shards.read_server):
        with pytest.raises(FedlensError, match=f"flower partition … --federation {tmp_path}'"):
            read(tmp_path / name)


def test_certificates_and_logs_beside_the_shards_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "node-0").write_text("secret")
    (tmp_path / "node-0").mkdir()  # empty, as a mount point or a first mkdir leaves it
    assert written(tmp_path, whole())
    assert (tmp_path / "keys" / "node-0").read_text() == "secret"
    assert shards.read_node(tmp_path / "node-0").clients


@dataclass
class Patience:
    """Raises when it is asked for the n-th time."""

    left: int

    def __call__(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("after", range(4))
def test_an_interrupted_write_leaves_whole_folders_only_and_is_completed_later(
    tmp_path: Path, after: int
) -> None:
    made = whole()
    with pytest.raises(KeyboardInterrupt):
        written(tmp_path / "late", made, 3, check=Patience(after))
    for node in range(after):
        shards.read_node(tmp_path / "late" / f"node-{node}")
    with pytest.raises(FedlensError, match="not a complete shard"):
        shards.read_server(tmp_path / "late" / "server")
    assert written(tmp_path / "late", made, 3)
    written(tmp_path / "at once", made, 3)
    assert content(tmp_path / "late") == content(tmp_path / "at once")


def test_a_full_disk_leaves_no_half_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as stream:
            stream.write(data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(FedlensError, match="No space left"):
            written(tmp_path, whole())
    assert not list(tmp_path.iterdir())


def test_what_a_kill_left_half_written_is_no_shard_and_is_cleared(tmp_path: Path) -> None:
    made = whole()
    written(tmp_path, made)
    half = tmp_path / f"{files.TEMPORARY}node-0-1234abcd"
    (tmp_path / "node-0").rename(half)
    (half / "shard.json").unlink()
    with pytest.raises(FedlensError, match="not a complete shard"):
        shards.read_node(half)
    assert written(tmp_path, made)
    assert not half.exists()


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


@pytest.mark.parametrize("damage", [flipped, cut, Path.unlink])
@pytest.mark.parametrize("file", ["node-0/train", "server/validation", "server/test"])
def test_damaged_images_are_found_and_written_again(
    tmp_path: Path, damage: Callable[[Path], None], file: str
) -> None:
    made = whole()
    written(tmp_path, made)
    before = content(tmp_path)
    damage(tmp_path / f"{file}.safetensors")
    with pytest.raises(FedlensError, match=r"not a complete shard \(.*safetensors.*copy it again"):
        if file.startswith("node"):
            shards.read_node(tmp_path / "node-0")
        else:
            shards.read_server(tmp_path / "server").load_test()
    assert written(tmp_path, made)
    assert content(tmp_path) == before


def test_test_images_are_not_read_before_they_are_asked_for(tmp_path: Path) -> None:
    written(tmp_path, whole())
    (tmp_path / "server" / "test.safetensors").write_bytes(b"not even tensors")
    found = shards.read_server(tmp_path / "server")
    with pytest.raises(FedlensError, match="does not match its checksum"):
        found.load_test()


def test_missing_test_images_are_noticed_at_once(tmp_path: Path) -> None:
    written(tmp_path, whole())
    (tmp_path / "server" / "test.safetensors").unlink()
    with pytest.raises(FedlensError, match="missing"):
        shards.read_server(tmp_path / "server")


@pytest.mark.parametrize("kind", ["node-0", "server"])
@given(data=st.data())
@settings(deadline=None, max_examples=30)
def test_no_digit_of_a_description_changes_unseen(
    tmp_path_factory: pytest.TempPathFactory, kind: str, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("federation")
    written(folder, whole(count=30))
    path = folder / kind / "shard.json"
    text = path.read_text()
    place = data.draw(st.sampled_from([i for i, letter in enumerate(text) if letter.isdigit()]))
    digit = data.draw(st.sampled_from("0123456789").filter(lambda digit: digit != text[place]))
    path.write_text(text[:place] + digit + text[place + 1 :])
    with pytest.raises(FedlensError, match="not a complete shard"):
        shards.read_node(path.parent) if kind == "node-0" else shards.read_server(path.parent)


def test_a_node_s_folder_is_not_the_server_s(tmp_path: Path) -> None:
    written(tmp_path, whole())
    with pytest.raises(FedlensError, match="is a server's shard, not a node's: give a folder node"):
        shards.read_node(tmp_path / "server")
    with pytest.raises(FedlensError, match="is a node's shard, not a server's: give the folder"):
        shards.read_server(tmp_path / "node-0")


def test_a_folder_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    for read in (shards.read_node, shards.read_server):
        with pytest.raises(FedlensError, match="not a complete shard"):
            read(tmp_path / "federation" / "node-0")


def test_a_folder_of_a_later_version_is_not_guessed_at(tmp_path: Path) -> None:
    written(tmp_path, whole())
    path = tmp_path / "node-0" / "shard.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(FedlensError, match="not of this version of fedlens"):
        shards.read_node(path.parent)


@pytest.mark.slow
def test_the_synthetic_benchmark_is_read_as_written(tmp_path: Path) -> None:
    dataset = synthetic.draw_dataset(train_per_class=3, test_per_class=1, cache=tmp_path / "cache")
    images, test = dataset.load_train(), dataset.load_test()
    train, validation = stratified(images.labels, 0.1, 0)
    shared = partition(images.labels[train], clients=12, by="classes", classes_per_client=10)
    made = Whole(dataset, images, train, validation, test, shared, {"seed": 0})
    assert written(tmp_path / "federation", made, 4)
    server = shards.read_server(tmp_path / "federation" / "server")
    assert server.classes == dataset.classes
    assert torch.equal(server.load_test().pixels, test.pixels)
    for node in range(4):
        found = shards.read_node(tmp_path / "federation" / f"node-{node}")
        assert found.clients == tuple(range(3 * node, 3 * node + 3))
        for client in found.clients:
            expected = images.pixels[train[shared.shard(client)]]
            assert torch.equal(found.images.pixels[found.partition.shard(client)], expected)
            assert torch.equal(found.class_counts[client], server.class_counts[client])
