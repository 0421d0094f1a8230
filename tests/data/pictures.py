"""Small folders of images in many formats, for the tests of users' own data."""

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("apple", "birch", "cloud")


def picture(label: int, height: int, width: int, seed: int = 0) -> Image.Image:
    """Noise with one bright channel, which says the class."""
    draw = np.random.default_rng(seed)
    pixels = draw.integers(0, 80, (height, width, 3), dtype=np.uint8)
    pixels[..., label] += 150
    return Image.fromarray(pixels)


def save_oddly(image: Image.Image, stem: Path, kind: int) -> None:
    """The image in one of eight formats."""
    sixteen_bits = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
    turned = Image.Exif()
    turned[0x0112] = 6
    odd, ending = [
        (image, ".png"),
        (image.convert("L"), ".png"),
        (image.convert("P"), ".png"),
        (image.convert("CMYK"), ".jpg"),
        (image, ".gif"),
        (image, ".webp"),
        (sixteen_bits, ".png"),
        (image, ".jpeg"),
    ][kind % 8]
    odd.save(stem.with_suffix(ending), **({"exif": turned} if ending == ".jpeg" else {}))


def folder(root: Path, per_class: int = 8, *, splits: tuple[str, ...] = ("",)) -> Path:
    """A folder for each class, of images in many formats and sizes."""
    for split in splits:
        for label, name in enumerate(CLASSES):
            place = root / split / name
            place.mkdir(parents=True)
            for number in range(per_class):
                seed = 1000 * label + number + 100 * len(split)
                image = picture(label, 20 + seed % 7, 18 + seed % 5, seed)
                save_oddly(image, place / f"{number}", number)
    return root
