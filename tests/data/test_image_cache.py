"""Images of any kind become RGB squares, decoded once into a mapped file that is checked."""

import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedlens import files
from fedlens.data import mapped_file
from fedlens.data.images import Images, MappedPixels
from fedlens.data.sources import decoding, image_cache
from fedlens.data.sources.image_cache import Source, mapped
from fedlens.errors import FedlensError
from tests.data.pictures import picture


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLENS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(image_cache, "PART", 4)


class Opened:
    """A source that counts what is opened, and may fail at one image."""

    def __init__(self, count: int = 10, fails_at: int | None = None) -> None:
        self.opened: list[int] = []
        self.fails_at = fails_at
        self.images = [picture(n % 3, 9 + n, 12, seed=n) for n in range(count)]

    def source(self) -> Source:
        hashes = [hashlib.sha256(one.tobytes()).hexdigest() for one in self.images]
        return Source([f"{n}.png" for n in range(len(hashes))], self._open, hashes)

    def _open(self, position: int) -> Image.Image:
        self.opened.append(position)
        if position == self.fails_at:
            raise OSError("image file is truncated")
        return self.images[position].copy()


def entry() -> Path:
    (found,) = (files.cache_dir() / "images").iterdir()
    return found


def test_the_pixels_are_those_of_each_image_decoded_alone() -> None:
    opened = Opened()
    pixels = mapped(opened.source(), size=8, title="")
    assert pixels.shape == (10, 3, 8, 8)
    for position, image in enumerate(opened.images):
        alone = decoding.square(image, 8, "centre")
        assert np.array_equal(pixels[position].numpy(), alone)


def test_decoded_images_are_found_again_without_opening_any() -> None:
    mapped(Opened().source(), size=8, title="")
    again = Opened()
    mapped(again.source(), size=8, title="")
    assert again.opened == []


def test_a_killed_build_continues_where_it_was() -> None:
    with pytest.raises(FedlensError, match=r"6\.png cannot be read as an image .*truncated"):
        mapped(Opened(fails_at=6).source(), size=8, title="")
    again = Opened()
    pixels = mapped(again.source(), size=8, title="")
    assert sorted(again.opened) == [4, 5, 6, 7, 8, 9]  # the first part of four was finished
    assert np.array_equal(pixels[0].numpy(), decoding.square(again.images[0], 8, "centre"))


SLOW = """
import sys, time
from fedlens.data.sources import image_cache
from tests.data.test_image_cache import Opened
image_cache.PART = 4
opened = Opened()
source = opened.source()
def slowly(position):
    time.sleep(0.2)
    return source.open(position)
slow = image_cache.Source(source.names, slowly, source.hashes)
image_cache.mapped(slow, size=8, title="")
"""


@pytest.mark.slow
def test_a_process_killed_at_any_moment_leaves_what_it_had_finished() -> None:
    process = subprocess.Popen([sys.executable, "-c", SLOW], cwd=Path(__file__).parents[2])
    images = files.cache_dir() / "images"
    deadline = time.monotonic() + 120
    while not list(images.glob("*/parts.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.wait()
    recorded = json.loads((entry() / "parts.json").read_text())["digests"]
    finished = sum(digest is not None for digest in recorded)
    assert finished >= 1
    again = Opened()
    pixels = mapped(again.source(), size=8, title="")
    assert sorted(again.opened) == list(range(4 * finished, 10))
    for position, image in enumerate(again.images):
        assert np.array_equal(pixels[position].numpy(), decoding.square(image, 8, "centre"))


def test_a_damaged_part_is_found_and_decoded_again(caplog: pytest.LogCaptureFixture) -> None:
    mapped(Opened().source(), size=8, title="")
    path = entry() / "pixels.bin"
    content = bytearray(path.read_bytes())
    content[4 * 3 * 64 + 5] ^= 1  # one bit of image 4, in the second part
    path.write_bytes(content)
    again = Opened()
    pixels = mapped(again.source(), size=8, title="")
    assert sorted(again.opened) == [4, 5, 6, 7]
    assert np.array_equal(pixels[4].numpy(), decoding.square(again.images[4], 8, "centre"))
    assert "is damaged (part 2 of 3): its decoded images are made again." in caplog.text


@pytest.mark.parametrize("damage", ["cut", "no list"])
def test_a_cut_file_or_a_lost_list_is_made_anew(damage: str) -> None:
    mapped(Opened().source(), size=8, title="")
    if damage == "cut":
        path = entry() / "pixels.bin"
        path.write_bytes(path.read_bytes()[:-1])
    else:
        (entry() / "parts.json").write_text("{")
    again = Opened()
    mapped(again.source(), size=8, title="")
    assert sorted(again.opened) == list(range(10))


def test_each_part_has_a_digest() -> None:
    mapped(Opened().source(), size=8, title="")
    content = (entry() / "pixels.bin").read_bytes()
    parts = [content[start : start + 4 * 3 * 64] for start in range(0, len(content), 4 * 3 * 64)]
    recorded = json.loads((entry() / "parts.json").read_text())["digests"]
    assert recorded == [hashlib.sha256(part).hexdigest() for part in parts]


def test_mapped_pixels_are_read_only_where_an_index_asks() -> None:
    pixels = mapped(Opened().source(), size=8, title="")
    images = Images(pixels, torch.arange(10) % 2)
    assert isinstance(pixels, MappedPixels)
    moved = images.to(torch.device("cpu")).pixels
    limited = images.limited(2).pixels
    assert isinstance(moved, MappedPixels)
    assert isinstance(limited, MappedPixels)
    storage = pixels.stored.untyped_storage().data_ptr()
    assert moved.stored.untyped_storage().data_ptr() == storage
    assert limited.stored.untyped_storage().data_ptr() == storage
    assert torch.equal(limited[torch.tensor([3, 0])], pixels[torch.tensor([3, 0])])
    everything = pixels[torch.arange(10)]
    assert torch.equal(Images(everything, images.labels).limited(2).pixels, limited[:])


def test_a_batch_may_be_changed_and_the_file_stays() -> None:
    pixels = mapped(Opened().source(), size=8, title="")
    before = pixels[0].clone()
    pixels[0].zero_()
    pixels[:].zero_()
    assert torch.equal(pixels[0], before)


def test_another_size_or_crop_is_another_file() -> None:
    for size, crop in ((8, "centre"), (8, "squash"), (6, "centre")):
        mapped(Opened().source(), size=size, crop=crop, title="")
    assert len(list((files.cache_dir() / "images").iterdir())) == 3


def test_a_disk_without_room_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr(mapped_file.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(FedlensError, match="set FEDLENS_CACHE to a larger disk"):
        mapped(Opened().source(), size=8, title="")


# --- decoding


def test_centre_keeps_the_middle_and_squash_all() -> None:
    stripes = np.zeros((4, 8, 3), dtype=np.uint8)
    stripes[:, 2:6] = 200  # the central square is light
    image = Image.fromarray(stripes)
    assert decoding.square(image, 4, "centre").min() == 200
    assert decoding.square(image, 4, "squash").min() < 50


def test_grey_palette_and_sixteen_bits_agree_with_eight() -> None:
    grey = Image.fromarray((np.arange(64, dtype=np.uint8) * 4).reshape(8, 8))
    wide = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    assert wide.mode == "I;16"
    expected = np.repeat(np.asarray(grey)[None], 3, axis=0)
    for image in (grey, wide, grey.convert("RGB"), grey.convert("P")):
        assert np.array_equal(decoding.square(image, 8, "centre"), expected)


def test_transparency_is_laid_over_white() -> None:
    half = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    assert decoding.square(half, 4, "centre").min() == 255
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([10, 20, 30])
    palette.info["transparency"] = 0
    assert decoding.square(palette, 4, "centre").min() == 255


def test_cmyk_black_is_black() -> None:
    assert decoding.square(Image.new("CMYK", (4, 4), (0, 0, 0, 255)), 4, "centre").max() == 0


def test_a_photograph_is_turned_upright(tmp_path: Path) -> None:
    pixels = np.zeros((8, 8, 3), dtype=np.uint8)
    pixels[:4] = 255  # light above, as the camera stored it
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise: what is above comes to the right
    Image.fromarray(pixels).save(tmp_path / "p.png", exif=exif)
    with Image.open(tmp_path / "p.png") as image:
        upright = decoding.square(image, 8, "centre")
    assert upright[:, :, 4:].min() == 255
    assert upright[:, :, :4].max() == 0
