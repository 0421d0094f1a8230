"""The synthetic benchmark: the same everywhere, balanced, with independent splits."""

import hashlib
import logging
from pathlib import Path

import pytest
import torch

from fedlens.data.images import Dataset
from fedlens.data.sources import synthetic
from fedlens.registry import dataset as rows

SPLITS = ("train", "test")


def small(cache: Path) -> Dataset:
    return synthetic.draw_dataset(train_per_class=3, test_per_class=2, cache=cache)


def digest(pixels: torch.Tensor) -> str:
    return hashlib.sha256(pixels.numpy().tobytes()).hexdigest()


def kept(cache: Path) -> list[str]:
    return sorted(path.stem for path in cache.rglob("*.safetensors"))


def test_a_hundred_classes_with_readable_names(tmp_path: Path) -> None:
    names = small(tmp_path).classes
    assert len(set(names)) == 100
    assert all(len(name.split()) == 3 for name in names)


def test_no_combination_is_both_a_class_and_in_pretraining() -> None:
    classes, others = synthetic.combinations()
    every = len(synthetic.COLOURS) * len(synthetic.TEXTURES) * len(synthetic.SHAPES)
    assert len(set(classes)) == 100
    assert set(classes).isdisjoint(others)
    assert len({*classes, *others}) == every
    for position, words in enumerate((synthetic.COLOURS, synthetic.TEXTURES, synthetic.SHAPES)):
        for group in (classes, others):  # no word is new to either
            assert {combination[position] for combination in group} == set(words)


def test_balanced_bytes(tmp_path: Path) -> None:
    data = small(tmp_path)
    for images, per_class in ((data.load_train(), 3), (data.load_test(), 2)):
        assert images.pixels.shape == (100 * per_class, 3, 32, 32)
        assert images.pixels.dtype == torch.uint8
        assert images.labels.dtype == torch.int64
        assert torch.bincount(images.labels).tolist() == [per_class] * 100
        assert len(images.pixels.flatten(1).unique(dim=0)) == len(images)  # no image twice


@pytest.mark.slow
def test_the_same_bits_at_any_number_of_threads(tmp_path: Path) -> None:
    combination, before = ("teal", "dotted", "star"), torch.get_num_threads()
    seen = set()
    try:
        for threads in (1, 2, 3, 2):
            torch.set_num_threads(threads)
            draw = torch.Generator().manual_seed(0)
            seen.add(digest(synthetic.paint(combination, 150, draw)))  # over the grain of a thread
    finally:
        torch.set_num_threads(before)
    assert len(seen) == 1
    first, second = (small(tmp_path / name).load_train() for name in ("one", "two"))
    assert digest(first.pixels) == digest(second.pixels)


def test_the_digest_is_of_the_recipe(tmp_path: Path) -> None:
    assert small(tmp_path).digest == small(tmp_path / "elsewhere").digest
    assert (
        small(tmp_path).digest != synthetic.draw_dataset(train_per_class=4, cache=tmp_path).digest
    )
    assert kept(tmp_path) == []  # nothing was drawn for it


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_a_split_is_drawn_and_read_without_the_other(split: str, tmp_path: Path) -> None:
    data = small(tmp_path)
    load = {"train": data.load_train, "test": data.load_test}[split]
    alone = load()
    assert kept(tmp_path) == [split]
    data.load_train(), data.load_test()
    (other,) = (path for path in tmp_path.rglob("*.safetensors") if path.stem != split)
    other.write_bytes(b"unreadable")
    assert torch.equal(load().pixels, alone.pixels)
    assert other.read_bytes() == b"unreadable"


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_cache_is_drawn_again(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = small(tmp_path)
    pixels = data.load_train().pixels.clone()
    (path,) = tmp_path.rglob("train.safetensors")
    whole = path.read_bytes()
    middle = len(whole) // 2
    path.write_bytes(
        {
            "cut": whole[:middle],
            "flipped": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
            "empty": b"",
        }[damage]
    )
    with caplog.at_level(logging.WARNING):
        assert torch.equal(data.load_train().pixels, pixels)
    assert "made again" in caplog.text
    assert path.read_bytes() == whole


def test_the_cache_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = small(tmp_path).load_train().pixels
    monkeypatch.delattr(synthetic, "paint")
    assert torch.equal(small(tmp_path).load_train().pixels, pixels)


def test_by_default_it_is_kept_in_the_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDLENS_CACHE", str(tmp_path))
    synthetic.draw_dataset(train_per_class=1, test_per_class=1).load_test()
    assert kept(tmp_path / "synthetic") == ["test"]


def test_the_row_has_the_sizes_of_the_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []

    def draw(classes: object, split: str, per_class: int) -> dict[str, torch.Tensor]:
        drawn.append(per_class)
        pixels = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
        return {"pixels": pixels, "labels": torch.zeros(1, dtype=torch.int64)}

    monkeypatch.setattr(synthetic, "_draw", draw)
    monkeypatch.setenv("FEDLENS_CACHE", str(tmp_path))
    row = rows["synthetic"]
    data = row.make(None)
    data.load_train(), data.load_test()
    assert len(data.classes) == row.traits["classes"] == 100
    assert [count * 100 for count in drawn] == [
        row.traits["train_images"], row.traits["test_images"],
    ]  # fmt: skip
    assert data.verify() == {}
